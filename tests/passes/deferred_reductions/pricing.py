"""Prices without a plan: every sum is over a mesh axis, and costs what it is large."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from rhino_jax.frontend.trace import Traced, trace
from rhino_jax.ir.program import Op, Program
from rhino_jax.ir.transform import Transform
from rhino_jax.passes.apply import apply_passes
from rhino_jax.passes.deferred_reductions import Site, as_text, sites
from tests.passes.interpreter import interpret


@dataclass(frozen=True)
class BytePrices:
    """Every summed factor that is even is cut by one axis of `pieces` devices."""

    program: Program
    pieces: int = 4

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.pieces,)

    @cached_property
    def cuts(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        return {op.id: self._cut(op) for op in self.program.ops if op.rule}

    def _cut(self, op: Op) -> tuple[tuple[int, ...], ...]:
        assert op.rule is not None
        cut: list[tuple[int, ...]] = [() for _ in op.rule.factors]
        for f, factor in enumerate(op.rule.factors):
            if factor.reducer == "sum" and factor.size % self.pieces == 0:
                cut[f] = (0,)
                break
        return tuple(cut)

    def close(self, value: int, axes: tuple[int, ...]) -> tuple[float, float]:
        size = float(self.program.values[value].bytes)
        return size, size

    def held_s(self, op: Op, axes: tuple[int, ...]) -> float:
        return 0.0


def delayed_everywhere(
    fn: Any, args: Any, pieces: int = 4
) -> tuple[Traced, Traced, list[Site]]:
    """A function, the same with sums left open wherever that saves bytes, and where."""
    traced = trace(fn, args, {})
    found = sites(traced.program, BytePrices(traced.program, pieces), 0.5)
    # Of another program, so that nobody asks how many ops it made of this one.
    chosen = Transform("deferred reductions", 0, 0, as_text(s.group for s in found))
    again = apply_passes(traced, [chosen])
    return traced, again, found


def ran(traced: Traced, args: Any) -> list[np.ndarray]:
    """Results, as arrays."""
    return interpret(traced.closed_jaxpr, jax.tree.leaves(args))


def normal(shapes: Iterable[tuple[int, ...]]) -> list[np.ndarray]:
    """Return float32 arrays of random numbers, always the same."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def sums(traced: Traced) -> list[tuple[str, int]]:
    """(name, runs in a step) of the ops that sum over a dim of pieces in front."""
    return [
        (op.name, count)
        for op, count in traced.program.walk()
        if op.name == "reduce_sum"
        and op.rule
        and op.rule.operands[0][0][0] == 0
        and op.rule.factors[0].reducer == "sum"
    ]
