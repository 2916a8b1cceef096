"""A program of stored inputs gives what the program as written gives."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rhino_jax.frontend.trace import Traced, trace
from rhino_jax.ir.transform import (
    BLOCKS,
    InterleavedOrder,
    Stored,
    Transform,
    as_text,
    from_text,
    stored_in_blocks,
)
from rhino_jax.passes.apply import apply_passes
from rhino_jax.passes.interleaved import all_stored, all_written
from rhino_jax.passes.interleaved.sites import split_inputs
from tests.cases import covering
from tests.passes.interleaved.fused import (
    OPTIMIZERS,
    Shape,
    args_of,
    logits_of,
    params_of,
    random_params,
    random_tokens,
    train_step_of,
)
from tests.passes.interpreter import interpret
from tests.passes.zoo import compiled


Evaluate = Callable[[Any, Sequence[Any]], list[Any]]


def in_blocks(traced: Traced, stored: Stored) -> Traced:
    return apply_passes(traced, [Transform(BLOCKS, 0, 0, as_text(stored))])


def run(
    traced: Traced, arrays: Sequence[Any], evaluate: Evaluate = interpret
) -> list[Any]:
    return evaluate(traced.closed_jaxpr, arrays)


def run_stored(
    traced: Traced,
    stored: Stored,
    arrays: Sequence[Any],
    evaluate: Evaluate = interpret,
) -> list[Any]:
    """Return the results as written, of inputs as written, by a program that stores
    them in blocks."""
    dims = stored_in_blocks([Transform(BLOCKS, 0, 0, as_text(stored))])
    given = [all_stored(x, dims.get(i, ())) for i, x in enumerate(arrays)]
    outs = evaluate(in_blocks(traced, stored).closed_jaxpr, given)
    return [
        all_written(x, dims.get(-1 if o.state_of is None else o.state_of, ()))
        for x, o in zip(outs, traced.program.outputs, strict=True)
    ]


def paths_of(traced: Traced, stored: Stored) -> set[str]:
    return {traced.program.inputs[slot].path for slot, _ in stored}


def assert_same(outs: Sequence[Any], expected: Sequence[Any]) -> None:
    for x, y in zip(outs, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


SHAPES = {
    "split": Shape(),
    "reshape": Shape("reshape"),
    "grouped": Shape("grouped", kv_heads=4),
    "scanned": Shape(layers=2, is_scanned=True),
    "recomputed": Shape("reshape", is_remat=True),
    "scanned, recomputed": Shape(layers=2, is_scanned=True, is_remat=True),
}


@functools.cache
def traced_step(shape: str, optimizer: str) -> Traced:
    model, update = SHAPES[shape], OPTIMIZERS[optimizer]()
    step = train_step_of(model, update)
    return trace(step, args_of(model, update, 2, 8), {}, donate_argnums=(0, 1))


@pytest.mark.parametrize(
    ("shape", "optimizer", "evaluate"),
    covering(
        [
            *((shape, "clipped adamw", interpret) for shape in SHAPES),
            ("split", "adamw", interpret),
            ("grouped", "adafactor", interpret),
            ("scanned", "adafactor", interpret),
            ("scanned, recomputed", "clipped adamw", compiled),
            ("grouped", "adafactor", compiled),
        ],
        9,
    ),
)
def test_a_step_is_that_of_the_program_as_written(
    shape: str, optimizer: str, evaluate: Evaluate
) -> None:
    model, update = SHAPES[shape], OPTIMIZERS[optimizer]()
    traced = traced_step(shape, optimizer)
    stored = split_inputs(traced.closed_jaxpr, traced.program, 4)
    held = paths_of(traced, stored)
    layers = 1 if model.is_scanned else model.layers
    weights = [p for p in held if p.startswith("params")]
    assert len(weights) == 3 * layers, weights
    if optimizer != "adafactor":
        assert len(held) == 9 * layers  # and both moments of each
    params = random_params(model)
    # The state of these optimizers starts at zero.
    state = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(update.init, params)
    )
    arrays = jax.tree.leaves((params, state, random_tokens(model, 2, 8)))
    for _ in range(2):
        outs = run_stored(traced, stored, arrays, evaluate)
        assert_same(outs, run(traced, arrays, evaluate))
        arrays = [*outs[:-1], arrays[-1]]  # the loss is last, and so are the tokens


@pytest.mark.parametrize("shape", SHAPES)
def test_no_value_is_put_in_another_order(shape: str) -> None:
    """Only dims of `(3, h, k)` are: every device does so with what it has."""
    model, traced = SHAPES[shape], traced_step(shape, "clipped adamw")
    stored = split_inputs(traced.closed_jaxpr, traced.program, 4)
    before, after = (
        Counter(op.name for op in t.program.ops)
        for t in (traced, in_blocks(traced, stored))
    )
    gained = after - before
    assert set(gained) <= {"reshape", "transpose"}
    # q, k, v forth and back once a layer; as often again where they are recomputed.
    layers = 1 if model.is_scanned else model.layers
    at_most = layers * (3 if model.is_remat else 2) if model.how == "reshape" else 0
    assert gained["transpose"] <= at_most
    assert not before - after


def test_weights_of_a_program_without_state_are_found() -> None:
    model = Shape("grouped", kv_heads=4)
    tokens = random_tokens(model, 2, 8)
    fn = lambda params, tokens: logits_of(model, params, tokens)  # noqa: E731
    traced = trace(fn, (params_of(model), tokens), {})
    stored = split_inputs(traced.closed_jaxpr, traced.program, 2)
    assert len(paths_of(traced, stored)) == 3 * model.layers
    parts = {b.parts for b in stored.values()}
    assert parts == {(64, 32, 32), (64, 64)}
    arrays = jax.tree.leaves((random_params(model), tokens))
    assert_same(run_stored(traced, stored, arrays), run(traced, arrays))


def test_parts_that_blocks_do_not_divide_are_left_as_written() -> None:
    model = Shape(heads=6, kv_heads=6, wide=10)
    traced = trace(
        lambda params, tokens: logits_of(model, params, tokens),
        (params_of(model), random_tokens(model, 2, 8)),
        {},
    )
    # Six heads of eight columns are 48; ten columns are not divided by four.
    stored = split_inputs(traced.closed_jaxpr, traced.program, 4)
    assert {b.parts for b in stored.values()} == {(48, 48, 48)}
    assert not split_inputs(traced.closed_jaxpr, traced.program, 7)


W = np.arange(4 * 24, dtype=np.float32).reshape(4, 24) / 50
BLOCKS_OF_W = {(0, 1): InterleavedOrder((8, 8, 8), 4)}

AS_WRITTEN = {
    "a slice across parts": lambda w: (w[:, 3:11] * 2).sum(0),
    "every other column": lambda w: w[:, ::2],
    "positions": lambda w: w * jnp.arange(24.0),
    "a running sum": lambda w: jnp.cumsum(w, 1) + w,
    "a sort": lambda w: jnp.sort(w, 1),
    "where the largest is": lambda w: (jnp.argmax(w, 1), w.max(1)),
    "reversed": lambda w: jnp.flip(w, 1) - w,
    "a minor dim": lambda w: w.reshape(-1)[5:40],
    "random numbers": lambda w: w + jax.random.normal(jax.random.key(0), (4, 24)),
    "a constant": lambda w: w * np.arange(24.0, dtype=np.float32),
    "rows looked up": lambda w: w[jnp.array([2, 1])] + w[jnp.array([0, 3])],
    "columns looked up": lambda w: w[:, jnp.array([2, 1, 20])],
    "a gram matrix": lambda w: (w @ w.T, w.T @ w),
    "padded": lambda w: jnp.pad(w, ((0, 0), (1, 2))).sum(0),
    "turned": lambda w: w.T.reshape(3, 8, 4)[1] + w[:, 8:16].T,
    "in a branch": lambda w: jax.lax.cond(
        w[0, 0] > 1, lambda w: w[:, :8], lambda w: w[:, 5:13], w
    ),
    "in a loop": lambda w: jax.lax.fori_loop(
        0, 3, lambda i, w: w * jnp.arange(24.0) + w[:, 3:4] + i, w
    ),
    "scanned over columns": lambda w: jax.lax.scan(
        lambda c, x: (c + x, c * x), jnp.zeros(4), w.T
    ),
    "a constant of a body": lambda w: jax.lax.scan(
        lambda c, x: (c * np.arange(24.0, dtype=np.float32) + x, c), w[0], w
    ),
    "a convolution": lambda w: jax.lax.conv(
        jnp.ones((1, 4, 5)), w[None].transpose(2, 1, 0), (1,), "SAME"
    ),
}


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_what_needs_the_order_has_the_one_that_is_written(name: str) -> None:
    traced = trace(AS_WRITTEN[name], (W,), {})
    expected = interpret(traced.closed_jaxpr, [W])
    dims = stored_in_blocks([Transform(BLOCKS, 0, 0, as_text(BLOCKS_OF_W))])
    again = in_blocks(traced, BLOCKS_OF_W)
    assert len(again.consts) == len(traced.consts)
    assert_same(run(again, [all_stored(W, dims[0])]), expected)


def test_both_dims_of_a_weight_may_be_in_blocks() -> None:
    square = np.arange(24 * 24, dtype=np.float32).reshape(24, 24) / 99

    def fn(w: jax.Array, x: jax.Array) -> Any:
        a, b, c = jnp.split(x @ w, 3, -1)
        d, e, f = jnp.split(w @ x.T, 3, 0)
        return a * b + c, d + e * f

    x = np.linspace(0, 1, 5 * 24, dtype=np.float32).reshape(5, 24)
    traced = trace(fn, (square, x), {})
    blocks = InterleavedOrder((8, 8, 8), 2)
    stored = {(0, 0): blocks, (0, 1): blocks}
    assert_same(run_stored(traced, stored, (square, x)), run(traced, (square, x)))


def test_blocks_of_two_kinds_on_one_dim_are_no_site() -> None:
    def fn(w: jax.Array, v: jax.Array) -> Any:
        a, b = jnp.split(w, 2, 1)
        c, d, e = jnp.split(w + v, 3, 1)
        return a + b, c + d + e

    traced = trace(fn, (W, W), {})
    # Cut at 8, 12 and 16: four parts, all of which blocks of four divide.
    stored = split_inputs(traced.closed_jaxpr, traced.program, 4)
    parts = {b.parts for b in stored.values()}
    assert len(parts) <= 1
    if stored:
        assert_same(run_stored(traced, stored, (W, W)), run(traced, (W, W)))


@pytest.mark.parametrize(
    "blocks",
    [
        InterleavedOrder((8, 8, 8), 4),
        InterleavedOrder((12, 6, 6), 3),
        InterleavedOrder((24,), 2),
    ],
)
@pytest.mark.parametrize("library", [np, jnp])
def test_an_order_has_an_inverse(blocks: InterleavedOrder, library: Any) -> None:
    x = library.asarray(W)
    there = all_stored(x, [(1, blocks)])
    assert isinstance(there, type(x))
    assert there.shape == x.shape
    np.testing.assert_array_equal(all_written(there, [(1, blocks)]), W)
    share = [part // blocks.count for part in blocks.parts]
    first = np.concatenate(
        [
            W[:, start : start + n]
            for start, n in zip(
                np.cumsum([0, *blocks.parts[:-1]]).tolist(), share, strict=True
            )
        ],
        1,
    )
    # A device's contiguous piece is its share of every part.
    np.testing.assert_array_equal(there[:, : sum(share)], first)


def test_a_choice_is_text() -> None:
    stored = {
        (3, 1): InterleavedOrder((8, 4, 4), 2),
        (0, 0): InterleavedOrder((6, 6), 3),
    }
    assert from_text(as_text(stored)) == stored
    assert as_text({}) == ""
