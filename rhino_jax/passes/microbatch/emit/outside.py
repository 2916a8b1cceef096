"""Emit the ops outside of loops, and the loops over micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rhino_jax.passes.microbatch.cut import LoopCrossing, MicrobatchCut, MicrobatchLoop
from rhino_jax.passes.microbatch.emit.piece import PieceEmitter
from rhino_jax.passes.microbatch.emit.pieces import (
    Piece,
    Split,
    combined,
    start,
    sum_dtype,
    together,
    view,
)
from rhino_jax.passes.microbatch.flow.analysis import FlowResult


def emitted(
    found: FlowResult, cut: MicrobatchCut, accumulate: str, scope: str = "micro-batches"
) -> Callable[..., list[Any]]:
    """Return a function of the program's inputs and constants, to be traced.

    Args:
      found: the analysis.
      cut: which ops run in which loop.
      accumulate: dtype in which sums of narrower floats are accumulated.
      scope: `jax.named_scope` of the loops.
    """
    flat, split = found.flat, Split.of(cut.rows, cut.count)
    values = flat.program.values

    def run(*arrays: Any) -> list[Any]:
        env = dict(zip(flat.top.inputs, arrays, strict=True))
        for at, ops in enumerate(cut.outside):
            flat.run(frozenset(ops), env)
            if at < len(cut.loops) and cut.loops[at].leaving:
                loop(cut.loops[at], env)
        return [flat.read(v, env) for v in flat.top.outputs]

    def loop(each: MicrobatchLoop, env: dict[int, Any]) -> None:
        """Emit a loop over micro-batches, and record the values that leave it."""

        def read(value: int) -> Any:
            return flat.read(value, env)

        views = {}
        for c in each.entering:
            if c.how == "sliced":
                with line(c):
                    views[c.value, c.span] = view(read(c.value), c.span, split)

        def piece(index: Any) -> list[Any]:
            return PieceEmitter(found, Piece(split, index), read, views).top(each)

        kept = [c for c in each.leaving if not is_stacked(c)]

        def step(carry: list[Any], index: Any) -> tuple[list[Any], list[Any]]:
            made = [*zip(each.leaving, piece(index), strict=True)]
            parts = [x for c, x in made if c in kept]
            return [*map(added, kept, carry, parts)], [
                x for c, x in made if c not in kept
            ]

        starts = [*map(start_of, kept)]
        with jax.named_scope(scope):
            carry, stacks = lax.scan(step, starts, lax.iota(np.int32, split.full))
        rest = piece(None) if split.rest else [None] * len(each.leaving)
        sums, rows = iter(carry), iter(stacks)
        for c, last in zip(each.leaving, rest, strict=True):
            if c.how == "stacked":
                with line(c):
                    whole = together(next(rows), last, c.span, split)
            elif c not in kept:
                whole = next(rows)[0]
            else:
                whole = next(sums)
                if last is not None:
                    whole = added(c, whole, last)
                with line(c):
                    dtype = jnp.dtype(values[c.value].dtype)
                    whole = lax.convert_element_type(whole, dtype)
            env[c.value] = whole

    def line(crossing: LoopCrossing) -> contextlib.AbstractContextManager[None]:
        """Return a context with the name stack and source line of a value's op."""
        maker = flat.maker.get(crossing.value)
        return contextlib.nullcontext() if maker is None else maker.context()

    def is_stacked(crossing: LoopCrossing) -> bool:
        """Whether a loop stacks a leaving value: PRNG keys too, which have no zero."""
        is_key = values[crossing.value].dtype.startswith("key<")
        return crossing.how == "stacked" or is_key

    def start_of(crossing: LoopCrossing) -> Any:
        """Return the initial accumulator of a leaving value."""
        value = values[crossing.value]
        dtype = sum_dtype(crossing, jnp.dtype(value.dtype), accumulate)
        with line(crossing):
            return start(crossing, value.shape, dtype)

    def added(crossing: LoopCrossing, so_far: Any, part: Any) -> Any:
        """Return the accumulator of a leaving value after one more micro-batch."""
        with line(crossing):
            return combined(crossing.how, so_far, part)

    return run
