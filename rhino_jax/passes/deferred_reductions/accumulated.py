"""Gradient accumulation: sums worth deferring to the end of a loop under any plan.

A plan that reduces in every iteration avoids sharding the summed dims, and so never
shows that deferring would pay. Here every such sum is assumed to be over one mesh axis
of all devices; by which mesh axes it is sharded is the planner's choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rhino_jax.ir.program import Op, Program
from rhino_jax.passes.deferred_reductions.reach import carried, visible
from rhino_jax.passes.deferred_reductions.sites import Axes, Site, sites


@dataclass(frozen=True)
class _Supposed:
    """Costs if every sum is over all given mesh axes, and costs its bytes.

    It implements `sites.SitePrices`.

    Attributes:
      program: the program.
      pieces: sizes of the mesh axes.
    """

    program: Program
    pieces: Sequence[int]

    @property
    def sizes(self) -> Sequence[int]:
        return self.pieces

    @cached_property
    def cuts(self) -> Mapping[int, tuple[tuple[int, ...], ...]]:
        return {op.id: self._cut(op) for op in self.program.ops if op.rule}

    def _cut(self, op: Op) -> tuple[tuple[int, ...], ...]:
        assert op.rule is not None
        count = math.prod(self.pieces)
        found: list[tuple[int, ...]] = [()] * len(op.rule.factors)
        for f, factor in enumerate(op.rule.factors):
            if factor.reducer == "sum" and factor.size % count == 0:
                found[f] = tuple(range(len(self.pieces)))
                break
        return tuple(found)

    def close(self, value: int, axes: Axes) -> tuple[float, float]:
        size = float(self.program.values[value].bytes)
        return size, size

    def held_s(self, op: Op, axes: Axes) -> float:
        return 0.0


def accumulated(program: Program, pieces: Sequence[int]) -> list[Site]:
    """Return the sums of loops that can be deferred to the end of the loop.

    Args:
      program: the program.
      pieces: sizes of the mesh axes that the sums are supposed to be over.
    """
    runs = visible(program)
    found = sites(program, _Supposed(program, pieces), 0.0)
    makers = {v: op for op in runs for v in program.ops[op].results}
    mixed = frozenset(_mixed(program, runs))
    return [
        site
        for site in found
        if mixed.isdisjoint(site.group.open)
        and any(v in makers for v in site.closed)
        and max(runs[op] for op in site.ops)
        > min(runs[makers[v]] for v in site.closed if v in makers)
    ]


def _mixed(program: Program, runs: Mapping[int, int]) -> Iterator[int]:
    """Yield carries that their loop does not only add to, by value id inside the body.

    The state of a recurrence is one: its gradient is as linear, but read in every
    iteration.
    """
    readers: dict[int, list[Op]] = {}
    for op in program.ops:
        for v in op.operands:
            readers.setdefault(v, []).append(op)
    for op_id in runs:
        op = program.ops[op_id]
        for entering, leaving, _ in carried(op) if op.call else ():
            adds = readers.get(entering, [])
            is_sum = len(adds) == 1 and adds[0].traits.reducer == "sum"
            if not is_sum or adds[0].results[0] != leaving:
                yield entering
