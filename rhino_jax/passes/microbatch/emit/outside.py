"""Emit the ops outside of loops, and the loops over micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rhino_jax.passes.microbatch.cut import LoopCrossing, MicrobatchCut, MicrobatchLoop
from rhino_jax.passes.microbatch.emit.accumulated import (
    combined,
    start,
    sum_dtype,
)
from rhino_jax.passes.microbatch.emit.piece import PieceEmitter
from rhino_jax.passes.microbatch.emit.pieces import Piece, Split, together, view
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

    def run(*arrays: Any) -> list[Any]:
        outside = _Outside(found, cut, accumulate, scope)
        top = found.flat.top
        outside.env.update(zip(top.inputs, arrays, strict=True))
        for at, ops in enumerate(cut.outside):
            found.flat.run(frozenset(ops), outside.env)
            if at < len(cut.loops):
                outside.loop(cut.loops[at])
        return [outside.read(v) for v in top.outputs]

    return run


@dataclass(slots=True)
class _Outside:
    """Emitter of the ops outside of loops.

    Attributes:
      found: the analysis.
      cut: which ops run in which loop.
      accumulate: dtype in which sums of narrower floats are accumulated.
      scope: `jax.named_scope` of the loops.
      env: value id → array of the value in full.
    """

    found: FlowResult
    cut: MicrobatchCut
    accumulate: str
    scope: str
    env: dict[int, Any] = field(default_factory=dict)

    def read(self, value: int) -> Any:
        """Return the array of a value."""
        return self.found.flat.read(value, self.env)

    def loop(self, loop: MicrobatchLoop) -> None:
        """Emit a loop over micro-batches, and record the values that leave it."""
        if not loop.leaving:
            return
        split = Split.of(self.cut.rows, self.cut.count)
        views = {}
        for c in loop.entering:
            if c.how == "sliced":
                with self.line(c):
                    views[c.value, c.span] = view(self.read(c.value), c.span, split)

        def piece(index: Any) -> list[Any]:
            inside = PieceEmitter(self.found, Piece(split, index), self.read, views)
            return inside.top(loop)

        leaving = loop.leaving
        kept = [c for c in leaving if not self.is_stacked(c)]

        def step(carry: list[Any], index: Any) -> tuple[list[Any], list[Any]]:
            made = piece(index)
            stacks = [x for x, c in zip(made, leaving, strict=True) if c not in kept]
            parts = [x for x, c in zip(made, leaving, strict=True) if c in kept]
            pairs = zip(kept, carry, parts, strict=True)
            return [self.combined(*pair) for pair in pairs], stacks

        starts = [self.start(c) for c in kept]
        with jax.named_scope(self.scope):
            carry, stacks = lax.scan(step, starts, lax.iota(np.int32, split.full))
        rest: list[Any] = [None] * len(leaving)
        if split.rest:
            rest = piece(None)
        done = iter(carry), iter(stacks)
        for crossing, last in zip(leaving, rest, strict=True):
            if crossing.how == "stacked":
                with self.line(crossing):
                    whole = together(next(done[1]), last, crossing.span, split)
            elif crossing not in kept:
                whole = next(done[1])[0]
            else:
                whole = next(done[0])
                if last is not None:
                    whole = self.combined(crossing, whole, last)
                whole = self.finished(crossing, whole)
            self.env[crossing.value] = whole

    def line(self, crossing: LoopCrossing) -> contextlib.AbstractContextManager[None]:
        """Return a context with the name stack and source line of a value's op."""
        maker = self.found.flat.maker.get(crossing.value)
        return contextlib.nullcontext() if maker is None else maker.context()

    def is_stacked(self, crossing: LoopCrossing) -> bool:
        """Whether a loop stacks a leaving value: PRNG keys too, which have no zero."""
        dtype = self.found.flat.program.values[crossing.value].dtype
        return crossing.how == "stacked" or dtype.startswith("key<")

    def start(self, crossing: LoopCrossing) -> Any:
        """Return the initial accumulator of a leaving value."""
        value = self.found.flat.program.values[crossing.value]
        dtype = sum_dtype(crossing, jnp.dtype(value.dtype), self.accumulate)
        with self.line(crossing):
            return start(crossing, value.shape, dtype)

    def combined(self, crossing: LoopCrossing, so_far: Any, part: Any) -> Any:
        """Return the accumulator of a leaving value after one more micro-batch."""
        with self.line(crossing):
            return combined(crossing.how, so_far, part)

    def finished(self, crossing: LoopCrossing, x: Any) -> Any:
        """Convert an accumulator to the dtype of its value."""
        dtype = self.found.flat.program.values[crossing.value].dtype
        with self.line(crossing):
            return lax.convert_element_type(x, jnp.dtype(dtype))
