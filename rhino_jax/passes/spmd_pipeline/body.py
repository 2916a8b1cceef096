"""Phases of a micro-batch: scans over layers, ops before, between and after them, and
carries of the loop over micro-batches, with how they accumulate.

Layers are spread over stages, L/S on each, and so is every stack `[L, …]` of theirs:
weights, residuals of the forward pass, gradients.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rhino_jax._compat import open_jaxpr
from rhino_jax.frontend.regions import sub_jaxprs
from rhino_jax.frontend.registry import traits_of
from rhino_jax.ir.traits import OpKind
from rhino_jax.passes.spmd_pipeline.along import (
    StackedRegion,
    passes_on,
    reads_along,
    traced_back,
)
from rhino_jax.rewrite.flat import FlatOp, FlatRegion


@dataclass(frozen=True, slots=True)
class Sum:
    """An output that micro-batches accumulate, a carry of the loop over them.

    Attributes:
      part: value of one micro-batch that is accumulated; None: the carry is passed
        through.
      how: its reducer, as "sum"; "unchanged": all micro-batches output the same value.
      steps: positions of the ops that accumulate it.
    """

    part: int | None
    how: str
    steps: tuple[int, ...]


def sum_of(region: FlatRegion, carry: int, value: int) -> Sum:
    """Return how a carry accumulates.

    Args:
      region: ops of a micro-batch.
      carry: id of the carry, an input.
      value: id of the output that is the carry of the next micro-batch.
    """
    if value == carry or value in region.consts:
        return Sum(None, "unchanged", ())
    result, steps = _passed(region, value)
    if (at := region.maker.get(result)) is not None:
        traits, operands = region.ops[at].op.traits, region.ops[at].operands
        is_pair = traits.is_elementwise and len(operands) == 2
        for k in traits.accumulates if is_pair else ():
            mine, back = _passed(region, operands[k])
            if mine == carry:
                return Sum(operands[1 - k], traits.reducer, (*steps, at, *back))
    return Sum(value, "unchanged", ())


def _passed(region: FlatRegion, value: int) -> tuple[int, list[int]]:
    """Trace a value back through converts and sharding constraints.

    Returns:
      The value that it comes from, and positions of these ops.
    """
    steps = []
    while (at := region.maker.get(value)) is not None and passes_on(region.ops[at].op):
        steps.append(at)
        (value,) = region.ops[at].operands
    return value, steps


class EquationPhase(enum.Enum):
    """Phase in which an op runs.

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
class MicrobatchBody(StackedRegion):
    """A micro-batch's ops, each with its phase.

    Attributes:
      loop: the loop over micro-batches.
      loops: positions of the scans over layers, in order.
      sums: for every carry how it accumulates.
      varies: values that differ from one micro-batch to another.
      levels: for every value how many of the scans have to be done before it is
        available.
      places: for every op its phase.
    """

    loop: FlatOp
    loops: Sequence[int]
    sums: Sequence[Sum]
    varies: set[int]
    levels: dict[int, int]
    places: list[EquationPhase] = field(default_factory=list)

    def at(self, place: EquationPhase, level: int) -> tuple[int, ...]:
        """Return the ops of a phase that run after so many scans."""
        return tuple(
            i
            for i, p in enumerate(self.places)
            if p is place and self.level(i) == level
        )

    def level(self, op: int) -> int:
        """Return the number of scans that are done before an op runs."""
        return max((self.levels[v] for v in self.region.reads[op]), default=0)

    @property
    def reads_stacks(self) -> list[bool]:
        """For every const and carry of the loop, whether a stage has its part of it."""
        consts = [v in self.stacks for v in self.loop.call.consts(self.region.inputs)]
        return consts + [self.is_stacked_sum(s) for s in self.sums]

    def is_stacked_sum(self, found: Sum) -> bool:
        """Whether every stage accumulates the values of its own layers."""
        return found.part in self.stacks and found.part in self.varies

    def sums_at(self, level: int, *, is_stacked: bool) -> list[int]:
        """Return the carries that accumulate values available after so many scans.

        Args:
          level: the number of scans.
          is_stacked: whether of a stage's own layers, or of whole values.
        """
        return [
            k
            for k, s in enumerate(self.sums)
            if s.part is not None
            and self.is_stacked_sum(s) == is_stacked
            and level == (self.levels[s.part] if s.part in self.varies else 0)
        ]

    @property
    def in_sums(self) -> set[int]:
        """Positions of the ops that accumulate outputs."""
        return {i for s in self.sums for i in s.steps}


def body_of(each: FlatOp) -> MicrobatchBody:
    """Assign phases to the ops of a micro-batch.

    Args:
      each: the loop over micro-batches.
    """
    (region,), call = each.regions, each.call
    pairs = zip(call.carries(region.inputs), region.outputs, strict=False)
    loops = layer_loops(region, call.num_consts)
    scans = [region.ops[i] for i in loops]
    read = {v for scan in scans for v in scan.call.sliced(scan.operands)}
    stacks, _ = traced_back(region, read, scans)
    body = MicrobatchBody(
        region,
        stacks.intersection(call.consts(region.inputs)),
        {},
        each,
        loops,
        [sum_of(region, *pair) for pair in pairs],
        {*call.sliced(region.inputs)},
        dict.fromkeys(region.inputs, 0),
    )
    in_sums, stacks, varying = body.in_sums, body.stacks, body.varies

    def place_of(i: int, level: int, varies: bool) -> EquationPhase:
        """Return the phase of an op that is no scan over layers and no sum."""
        item, reads = region.ops[i], region.reads[i]
        otherwise = EquationPhase.ROWS if varies else EquationPhase.ONCE
        if stacks.isdisjoint(reads):
            return otherwise
        rows = varying.intersection(reads) - stacks
        is_late = any(body.levels[v] == level for v in rows)
        if varies and (level == 0 or is_late):
            return otherwise
        found = reads_along(item, stacks)
        if found is None or (found.reducer and not varies):
            return otherwise
        body.stacked[item] = found
        stacks.update(found.stacks_in(item.results))
        return EquationPhase.TAIL if varies else EquationPhase.ONCE

    for i, (reads, makes) in enumerate(zip(region.reads, region.makes, strict=True)):
        level, place = body.level(i), EquationPhase.SUM
        if i in loops:
            place, level = EquationPhase.LOOP, loops.index(i) + 1
            varying.update(makes)
            stacks.update(region.ops[i].call.stacked(makes))
        elif i not in in_sums:
            varies = not varying.isdisjoint(reads)
            varying.update(makes if varies else ())
            place = place_of(i, level, varies)
        body.places.append(place)
        body.levels.update(dict.fromkeys(makes, level))
    return body


def layer_loops(region: FlatRegion, consts: int) -> list[int]:
    """Return positions of scans with matmuls or convolutions that go through stacks.

    The stacks are weights, or results of such a scan before. They need no names among
    the step's inputs (as `staged.layers.layers_of` gives them, which sees no
    micro-batches): every stage has an equal part of each stack, so that nothing depends
    on which of them are of the same layers.

    Args:
      region: ops of a micro-batch.
      consts: how many of its inputs, the first ones, are the same for all
        micro-batches.
    """
    varies = set(region.inputs[consts:])
    stacks: set[int] = set()
    found = []
    for i, (each, reads) in enumerate(zip(region.ops, region.reads, strict=True)):
        if each.is_scan and _has_products(each.eqn):
            rows = set(each.call.sliced(each.operands)) - region.consts.keys()
            if rows - varies or rows & stacks:
                found.append(i)
                stacks.update(each.call.stacked(each.results))
                varies.update(each.results)
                continue
        traits = each.op.traits
        is_drawn = traits.kind is OpKind.GENERATOR and traits.is_expensive
        if varies & set(reads) or is_drawn:
            varies.update(each.results)
    return found


def _has_products(eqn: Any) -> bool:
    jaxprs = map(open_jaxpr, sub_jaxprs(eqn))
    return any(
        traits_of(inner.primitive.name).is_contraction or _has_products(inner)
        for jaxpr in jaxprs
        for inner in jaxpr.eqns
    )
