"""Losses over long rows in chunks: the numbers of the whole, and less memory."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rhino_jax._compat import jaxpr_consts, open_jaxpr
from rhino_jax.errors import MicrobatchError
from rhino_jax.frontend.trace import trace
from rhino_jax.ir.transform import CHUNKS, chosen
from rhino_jax.models import registry
from rhino_jax.passes.apply import apply_passes
from rhino_jax.passes.chunks import may_chunk, run_in_chunks
from rhino_jax.passes.microbatch import MicrobatchCut
from tests.cases import covering
from tests.passes.interpreter import interpret
from tests.passes.zoo import compiled, of_zoo


B, S, D, V = 4, 12, 16, 96


def check(step, args, donate=(), counts=(4,)):
    """Check that chunks give what the undivided step gives; return what would run
    where."""
    traced = trace(step, args, {}, donate_argnums=donate)
    return check_traced(traced, jax.tree.leaves(args), counts)


def check_traced(traced, arrays, counts=(4,), run=interpret):
    closed, program = traced.closed_jaxpr, traced.program
    expected, cuts = run(closed, arrays), []
    for count in counts:
        cut = may_chunk(closed, program, count)
        assert isinstance(cut, MicrobatchCut), cut
        cuts.append(cut)
        new = run_in_chunks(closed, program, json.dumps({"count": count}))
        for end, a, b in zip(program.outputs, expected, run(new, arrays), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            atol = 1e-4 * np.abs(a).max(initial=0) + 1e-7
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=atol, err_msg=end.path)
    return cuts


@pytest.mark.parametrize(
    ("name", "run"),
    covering(
        [
            *((name, interpret) for name in ("gpt-tiny", "llama-tiny", "t5-tiny")),
            ("gpt-tiny", compiled),
            ("t5-tiny", compiled),
        ]
    ),
)
def test_numbers_of_the_zoo_are_those_of_the_undivided_step(name, run):
    for cut in check_traced(*of_zoo(name), run=run):
        assert len(cut.loops) == 1 and not cut.again_flops


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "moe-tiny", "rnn-tiny"])
@pytest.mark.parametrize("layers", ["unroll", "scan"])
def test_numbers_of_more_of_the_zoo(name, layers):
    overrides = {} if name == "rnn-tiny" else {"layers": layers}
    check_traced(*of_zoo(name, **overrides), counts=(2, 3))


def by_class(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def by_one_hot(logits, y):
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(y, V))


def by_row_number(logits, y):
    rows = jax.nn.log_softmax(logits).reshape(-1, V)
    return -rows[jnp.arange(rows.shape[0]), y.reshape(-1)].reshape(y.shape)


def smoothed(logits, y):
    classes = jax.nn.one_hot(y, V) * 0.9 + 0.1 / V
    z = jax.nn.logsumexp(logits, -1)
    return optax.softmax_cross_entropy(logits, classes) + 1e-3 * z**2


def step_of(losses, **options):
    """SGD on a masked mean over tokens, its normaliser the whole batch's."""

    def loss(params, batch):
        h = jnp.tanh(params["embed"][batch["x"]])
        if options.get("flat"):
            h = h.reshape(-1, D)
        logits = h @ params["head"] + params["bias"]
        y, mask = batch["y"], batch["mask"]
        if options.get("flat"):
            y, mask = y.reshape(-1), mask.reshape(-1)
        total = jnp.sum(losses(logits.astype(jnp.float32), y) * mask)
        return total / jnp.maximum(mask.sum(), 1), jnp.sum(logits.argmax(-1) == y)

    def step(params, batch):
        found, grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1), grads)
        return jax.tree.map(lambda p, g: p - g, params, grads), found, norm

    return step


def arguments():
    rng = np.random.default_rng(0)
    params = {
        "embed": rng.normal(size=(V, D)),
        "head": rng.normal(size=(D, V)),
        "bias": rng.normal(size=V),
    }
    batch = {
        "x": rng.integers(V, size=(B, S), dtype=np.int32),
        "y": rng.integers(V, size=(B, S), dtype=np.int32),
        "mask": rng.integers(2, size=(B, S)).astype(np.float32),
    }
    return jax.tree.map(lambda x: x.astype(np.float32), params), batch


LOSSES = [by_class, by_one_hot, by_row_number, smoothed]


@pytest.mark.parametrize("losses", LOSSES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("flat", [False, True])
def test_masked_losses(losses, flat):
    for cut in check(step_of(losses, flat=flat), arguments(), (0,), (2, 5)):
        assert cut.rows in (S, B * S)
        (loop,) = cut.loops
        # Nothing of the size of the logits crosses its border.
        sizes = [
            np.prod(cut.program.values[c.value].shape)
            for c in (*loop.entering, *loop.leaving)
            if c.how != "whole"
        ]
        assert max(sizes) < B * S * V
        sums = [c for c in loop.leaving if c.how == "sum"]
        assert {cut.program.values[c.value].shape for c in sums} >= {(V,)}


def accumulated(losses):
    """Micro-batches as people write them, the head and the loss inside of the loop."""

    def loss(params, piece):
        logits = jnp.tanh(params["embed"][piece["x"]]) @ params["head"]
        return jnp.sum(losses(logits, piece["y"]) * piece["mask"])

    def step(params, batch):
        def add(total, piece):
            found = jax.value_and_grad(loss)(params, piece)
            return jax.tree.map(jnp.add, total, found), None

        pieces = jax.tree.map(lambda x: x.reshape(2, B // 2, S), batch)
        start = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        (value, grads), _ = jax.lax.scan(add, start, pieces)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


@pytest.mark.parametrize("losses", [by_class, smoothed], ids=lambda f: f.__name__)
def test_a_users_own_micro_batches(losses):
    for cut in check(accumulated(losses), arguments(), (0,), (3,)):
        assert cut.rows == S and len(cut.loops) == 1


def test_evaluation_takes_one_loop():
    def evaluate(params, batch):
        h = jnp.tanh(params["embed"][batch["x"]])
        return by_class(h @ params["head"], batch["y"]).mean()

    check(evaluate, arguments())


@pytest.mark.parametrize("what", ["logits", "coupled", "none"])
def test_what_is_left_whole(what):
    def loss(params, batch):
        logits = jnp.tanh(params["embed"][batch["x"]]) @ params["head"]
        if what == "none":
            return jnp.mean(params["embed"][batch["x"]]), 0.0
        if what == "coupled":  # rows meet: the loss needs the largest of all logits
            return jnp.mean(jnp.exp(logits - logits.max())), 0.0
        return by_class(logits, batch["y"]).mean(), logits

    def step(params, batch):
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        return jax.tree.map(lambda p, g: p - g, params, grads), value, aux

    traced = trace(step, arguments(), {}, donate_argnums=(0,))
    found = may_chunk(traced.closed_jaxpr, traced.program, 4)
    assert isinstance(found, MicrobatchError)
    assert "long rows" in found.what and found.where and found.numbers and found.fix


def test_layers_are_no_heads():
    """What a perceptron makes is long, too, but all of the network follows."""
    workload = registry.get("mlp-tiny")
    traced = trace(workload.step, workload.abstract_args(), {}, donate_argnums=(0, 1))
    assert isinstance(
        may_chunk(traced.closed_jaxpr, traced.program, 2), MicrobatchError
    )


def large():
    """A GPT whose logits are most of what it holds: 8 x 256 tokens, 50,257 classes."""
    sizes = {"vocab": 50257, "seq_len": 256, "batch": 8, "d_model": 64}
    return registry.get("gpt-tiny", **sizes)


def temporaries(traced):
    opened, consts = open_jaxpr(traced.closed_jaxpr), jaxpr_consts(traced.closed_jaxpr)
    inputs = [traced.program.values[e.value] for e in traced.program.inputs]
    arrays = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in inputs]
    jitted = jax.jit(lambda *xs: jax.core.eval_jaxpr(opened, consts, *xs))
    return jitted.lower(*arrays).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_logits_of_a_gpt_never_exist_whole():
    workload = large()
    args, donate = workload.abstract_args(), workload.donate_argnums
    traced = trace(workload.step, args, {}, donate_argnums=donate)
    logits = 4 * 8 * 256 * 50257
    whole = temporaries(traced)
    assert whole > 1.5 * logits
    parts = temporaries(apply_passes(traced, [chosen(CHUNKS, {"count": 8})]))
    assert parts < 0.4 * logits
    print(f"{whole / 2**20:.0f} MiB whole, {parts / 2**20:.0f} MiB in 8 chunks")


@pytest.mark.parametrize("pieces", [1, 2])
def test_logits_never_exist_whole(pieces):
    """Chunk a step's loss, and that of a step in its user's own micro-batches."""
    params, batch = arguments()
    classes = 200 * V
    params |= {"head": np.zeros((D, classes)), "bias": np.zeros(classes)}
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, "float32"), params)
    args = (
        args,
        {k: jax.ShapeDtypeStruct((B, 64 * S), v.dtype) for k, v in batch.items()},
    )

    def loss(params, piece):
        logits = jnp.tanh(params["embed"][piece["x"]]) @ params["head"]
        return jnp.sum(by_class(logits, piece["y"]) * piece["mask"])

    def step(params, batch):
        if pieces == 1:
            return jax.grad(loss)(params, batch)

        def add(total, piece):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, piece)), None

        each = jax.tree.map(lambda x: x.reshape(pieces, B // pieces, -1), batch)
        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), each)[0]

    traced = trace(step, args, {})
    logits = 4 * (B // pieces) * 64 * S * classes
    parts = temporaries(apply_passes(traced, [chosen(CHUNKS, {"count": 8})]))
    assert temporaries(traced) > logits > 2 * parts
