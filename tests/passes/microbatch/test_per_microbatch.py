"""Statistics of each micro-batch, where they are asked for by name.

The reference is a loop over micro-batches as people write it: gradients and running
statistics are means over the pieces, each weighted by its rows.
"""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_microbatch import (
    arrays_of,
    cut_of,
    cut_of_traced,
    numbers,
    of_framework,
)

from rhino_jax.errors import MicrobatchError
from rhino_jax.frontend.trace import trace
from rhino_jax.models import registry, wide_resnet
from rhino_jax.passes.microbatch import MicrobatchCut, run_in_microbatches
from tests.cases import covering
from tests.passes.interpreter import interpret
from tests.passes.zoo import arguments_of, random_like, shape


RATE = 0.1


def step_of(loss):
    """SGD on `loss(params, state, batch) -> (loss, new state)`."""

    def step(params, state, batch):
        value_and_grad = jax.value_and_grad(loss, has_aux=True)
        (value, state), grads = value_and_grad(params, state, batch)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), state, value

    return step


def pieces_of(batch, count):
    """Every `full`-th row, and what is left over as a smaller last piece."""
    rows = len(jax.tree.leaves(batch)[0])
    size = -(-rows // count)
    full = rows // size
    slices = [slice(i, size * full, full) for i in range(full)]
    slices += [slice(size * full, rows)] if rows % size else []
    pieces = [jax.tree.map(lambda x, at=at: x[at], batch) for at in slices]
    return [(len(jax.tree.leaves(p)[0]) / rows, p) for p in pieces]


def evaluate(function, *args):
    """Return a function's result without compiling it."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    found = interpret(closed, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shape), found)


def by_hand(loss, params, state, batch, count):
    """One step of `step_of`, accumulated."""
    made = []
    for share, piece in pieces_of(batch, count):
        found = evaluate(jax.value_and_grad(loss, has_aux=True), params, state, piece)
        made.append(jax.tree.map(lambda x, share=share: x * share, found))
    (value, state), grads = jax.tree.map(lambda *xs: sum(xs), *made)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), state, value


def resnet():
    workload = registry.get("wide-resnet-tiny", batch=8)
    config = workload.config
    params, _, state, batch = arguments_of(workload)
    return lambda p, s, b: wide_resnet.loss(config, p, s, b), params, state, batch


def linen():
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for channels in (8, 16):
                x = nn.Conv(channels, (3, 3))(x)
                x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
            return nn.Dense(4)(x.mean((1, 2)))

    net, batch = Net(), images()
    found = net.init(jax.random.key(0), batch["x"])

    def loss(params, state, batch):
        variables = {"params": params, "batch_stats": state}
        out, new = net.apply(variables, batch["x"], mutable=["batch_stats"])
        return jnp.mean((out - batch["y"]) ** 2), new["batch_stats"]

    return loss, found["params"], found["batch_stats"], batch


def nnx():
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(8, use_running_average=False, rngs=rngs)
            self.out = nnx.Linear(8, 4, rngs=rngs)

        def __call__(self, x):
            return self.out(nnx.relu(self.norm(self.conv(x))).mean((1, 2)))

    graph, params, state = nnx.split(Net(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)

    def loss(params, state, batch):
        net = nnx.merge(graph, params, state, copy=True)
        out = net(batch["x"])
        return jnp.mean((out - batch["y"]) ** 2), nnx.state(net, nnx.BatchStat)

    return loss, params, state, images()


def images():
    batch = random_like({"x": shape(8, 8, 8, 3), "y": shape(8, 4)}, scale=1)
    return {"x": 2 + batch["x"], "y": batch["y"]}


def layered():
    """Layers in a loop, recomputed, whose running averages are stacked."""
    width = 16

    def layer(x, p):
        x = x @ p["w"]
        mean, variance = x.mean(0), x.var(0)
        x = jnp.tanh((x - mean) * jax.lax.rsqrt(variance + 1e-3) * p["scale"])
        return x, {"mean": mean, "deviation": jnp.sqrt(variance)}

    def loss(params, state, batch):
        x, new = jax.lax.scan(jax.checkpoint(layer), batch["x"], params)
        state = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state, new)
        return jnp.mean((x - batch["y"]) ** 2), state

    ones = np.ones((3, width), np.float32)
    params = {"w": random_like(shape(3, width, width)), "scale": ones}
    state = {"mean": ones, "deviation": ones}
    batch = random_like({"x": shape(8, width), "y": shape(8, width)}, scale=1)
    return loss, params, state, batch


PLACES = {
    resnet: "batch_norm",
    linen: "BatchNorm",
    nnx: "Net.__call__",
    layered: "layer",
}


@pytest.mark.parametrize(
    ("case", "count"),
    covering(
        [(case, count) for case in (layered, linen, nnx, resnet) for count in (2, 3)],
        [(layered, 2), (layered, 3), (nnx, 2)],
    ),
    ids=lambda x: getattr(x, "__name__", None),
)
def test_numbers_are_those_of_a_loop_written_by_hand(case, count):
    loss, params, state, batch = case()
    args = params, state, batch
    traced = trace(step_of(loss), args, {}, donate_argnums=(0, 1))
    choice = {"count": count, "per_microbatch": [PLACES[case]]}
    closed, program = traced.closed_jaxpr, traced.program
    new, _ = run_in_microbatches(closed, program, json.dumps(choice))
    expected = jax.tree.leaves(by_hand(loss, *args, count))
    arrays = arrays_of(args, traced)
    whole = interpret(traced.closed_jaxpr, arrays)
    differs = []
    for end, b, a, w in zip(
        program.outputs, interpret(new, arrays), expected, whole, strict=True
    ):
        a, b, w = map(numbers, (a, b, w))
        atol = 1e-4 * np.abs(a).max() + 3e-7
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=atol, err_msg=end.path)
        differs.append(np.abs(w - a).max() > 10 * atol)
    assert any(differs), "the statistics are those of the whole batch"


@pytest.mark.parametrize("place", ["BatchNorm", "CNN/BatchNorm_*", "CNN.__call__"])
def test_batch_norm_of_linen_takes_one_loop(place):
    traced, _ = of_framework("linen_cnn", "sgd")
    found = cut_of_traced(traced, per_microbatch=(place,))
    assert isinstance(found, MicrobatchCut) and len(found.loops) == 1
    sources = {found.program.ops[op].source.scopes for op in found.own}
    assert sources == {"CNN/BatchNorm_0", "CNN/BatchNorm_1"}


def test_only_what_is_named_is_taken_so():
    traced, _ = of_framework("linen_cnn", "sgd")
    found = cut_of_traced(traced, per_microbatch=("BatchNorm_1",))
    assert isinstance(found, MicrobatchCut) and len(found.loops) > 1
    assert {found.program.ops[op].source.scopes for op in found.own} == {
        "CNN/BatchNorm_1"
    }


@pytest.mark.slow
def test_clipping_by_the_global_norm_sees_whole_gradients():
    traced, _ = of_framework("linen_cnn", "clip")
    found = cut_of_traced(traced, per_microbatch=("BatchNorm",))
    assert isinstance(found, MicrobatchCut) and len(found.loops) == 1
    assert all("BatchNorm" in found.program.ops[op].source.scopes for op in found.own)


def test_many_loops_name_what_to_ask_for():
    traced, _ = of_framework("linen_cnn", "sgd")
    found = cut_of_traced(traced)
    assert isinstance(found, MicrobatchCut) and found.places == ("BatchNorm",)
    found = cut_of_traced(traced, most_loops=3)
    assert isinstance(found, MicrobatchError)
    assert "per_microbatch='BatchNorm'" in found.fix


def test_what_has_no_mean_is_refused():
    def loss(params, state, batch):
        h = batch["x"] @ params
        top = jnp.argmax((h - h.mean(0)).sum(0) + h.mean(0) ** 2)
        return jnp.mean(h), top

    args = jnp.ones((16, 16)), jnp.int32(0), {"x": jnp.ones((8, 16))}
    found = cut_of(step_of(loss), args, donate=(0,), per_microbatch=("loss",))
    assert isinstance(found, MicrobatchError)
    assert "no mean" in found.what and "int32" in found.numbers
