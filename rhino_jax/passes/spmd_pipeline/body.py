"""Phases of a micro-batch: scans over layers, and equations before, between and after.

Layers are spread over stages, L/S on each, and so is every stack `[L, …]` of theirs:
weights, residuals of the forward pass, gradients.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from rhino_jax._compat import scan_counts
from rhino_jax.ir.factor import Rule
from rhino_jax.ir.program import Program
from rhino_jax.passes.spmd_pipeline.along import (
    Stacked,
    makes_along,
    reads_along,
)
from rhino_jax.passes.spmd_pipeline.layers import layer_loops, sliced
from rhino_jax.passes.spmd_pipeline.sums import Sum, sum_of
from rhino_jax.rewrite.equations import Equations


class EquationPhase(enum.Enum):
    """Phase in which an equation runs.

    ONCE: it is the same for all micro-batches. ROWS: for a stage's own micro-batches.
    LOOP: a pipelined scan over layers. TAIL: on a stage's layers, right after the scan
    that computed what it reads. SUM: accumulates an output of micro-batches.
    """

    ONCE = "once"
    ROWS = "rows"
    LOOP = "loop"
    TAIL = "tail"
    SUM = "sum"


@dataclass(frozen=True, eq=False)
class MicrobatchBody:
    """A micro-batch's equations, each with its phase.

    Attributes:
      lines: the equations.
      consts, carries: how many of the inputs are these; then come slices.
      loops: positions of the scans over layers, in order.
      places: for every equation its phase.
      levels: for every value how many of the scans have to be done before it is
        available.
      varies: values that differ from one micro-batch to another.
      stacks: values of which a stage has its part of dim 0.
      stacked: equations on such values, by position.
      sums: for every carry how it accumulates.
    """

    lines: Equations
    consts: int
    carries: int
    loops: tuple[int, ...]
    places: tuple[EquationPhase, ...]
    levels: Mapping[int, int]
    varies: frozenset[int]
    stacks: frozenset[int]
    stacked: Mapping[int, Stacked]
    sums: tuple[Sum, ...]

    def at(self, place: EquationPhase, level: int) -> tuple[int, ...]:
        """Return the equations of a phase that run after so many scans."""
        return tuple(
            i
            for i, p in enumerate(self.places)
            if p is place and self.level(i) == level
        )

    def level(self, equation: int) -> int:
        """Return the number of scans that are done before an equation runs."""
        return max((self.levels[v] for v in self.lines.reads[equation]), default=0)

    def is_stacked_sum(self, found: Sum) -> bool:
        """Whether every stage accumulates the values of its own layers."""
        return found.part in self.stacks and found.part in self.varies

    def loop_values(self, loop: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the carries and the stacks that a scan computes."""
        at = self.loops[loop]
        makes = self.lines.makes[at]
        _, carries = scan_counts(self.lines.eqns[at].params)
        return makes[:carries], makes[carries:]


def body_of(
    lines: Equations, program: Program, consts: int, carries: int
) -> MicrobatchBody:
    """Assign phases to the equations of a micro-batch.

    Args:
      lines: its equations, calls inlined.
      program: imported from the same jaxpr.
      consts, carries: number of these inputs of the loop over micro-batches.
    """
    rules = [program.ops[op].rule for op in program.body.ops]
    sums = tuple(sum_of(lines, consts + k, k) for k in range(carries))
    walk = _BodyWalk(lines, rules, consts, carries, sums)
    walk.run()
    return MicrobatchBody(
        lines=lines,
        consts=consts,
        carries=carries,
        loops=tuple(walk.loops),
        places=tuple(walk.places),
        levels=walk.levels,
        varies=frozenset(walk.varies),
        stacks=frozenset(walk.stacks),
        stacked=walk.stacked,
        sums=sums,
    )


class _BodyWalk:
    """One walk over the equations."""

    def __init__(
        self,
        lines: Equations,
        rules: list[Rule | None],
        consts: int,
        carries: int,
        sums: tuple[Sum, ...],
    ) -> None:
        self.lines, self.rules = lines, rules
        self.loops = layer_loops(lines, consts)
        self.in_sums = {i for s in sums for i in s.steps}
        self.levels = dict.fromkeys((*lines.inputs, *lines.consts), 0)
        self.varies = set(lines.inputs[consts + carries :])
        self.stacks = self._given(consts)
        self.stacked: dict[int, Stacked] = {}
        self.places: list[EquationPhase] = []

    def _given(self, consts: int) -> set[int]:
        """Return constants that scans read as stacks, directly or through equations."""
        lines = self.lines
        wanted = {v for i in self.loops for v in sliced(lines, i)}
        for i in reversed(range(len(lines.eqns))):
            if i in self.loops or not wanted.intersection(lines.makes[i]):
                continue
            found = makes_along(lines, self.rules[i], i)
            if found is not None:
                wanted.update(found.stacks_of(lines.operands[i]))
        return wanted & set(lines.inputs[:consts])

    def run(self) -> None:
        lines = self.lines
        for i, (reads, makes) in enumerate(zip(lines.reads, lines.makes, strict=True)):
            level = max((self.levels[v] for v in reads), default=0)
            if i in self.in_sums:
                self.places.append(EquationPhase.SUM)
                self.levels.update(dict.fromkeys(makes, level))
                continue
            if i in self.loops:
                self.places.append(EquationPhase.LOOP)
                done = self.loops.index(i) + 1
                self.levels.update(dict.fromkeys(makes, done))
                self.varies.update(makes)
                _, carries = scan_counts(lines.eqns[i].params)
                self.stacks.update(makes[carries:])
                continue
            self.levels.update(dict.fromkeys(makes, level))
            varies = bool(self.varies.intersection(reads))
            if varies:
                self.varies.update(makes)
            self.places.append(self._place(i, level, varies))

    def _place(self, i: int, level: int, varies: bool) -> EquationPhase:
        reads, makes = self.lines.reads[i], self.lines.makes[i]
        otherwise = EquationPhase.ROWS if varies else EquationPhase.ONCE
        if not self.stacks.intersection(reads):
            return otherwise
        late = {
            v
            for v in reads
            if v in self.varies and v not in self.stacks and self.levels[v] == level
        }
        if varies and (level == 0 or late):
            return otherwise
        found = reads_along(self.lines, self.rules[i], i, self.stacks)
        if found is None or (found.reducer and not varies):
            return otherwise
        self.stacked[i] = found
        self.stacks.update(
            v for v, d in zip(makes, found.results, strict=True) if d == 0
        )
        return EquationPhase.TAIL if varies else EquationPhase.ONCE
