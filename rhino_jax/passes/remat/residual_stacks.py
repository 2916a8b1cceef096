"""Residuals that forward loops stack for loops of the backward pass."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from rhino_jax.ir.program import RegionCall, RegionKind
from rhino_jax.passes.remat.late import Halves
from rhino_jax.passes.remat.regions import (
    FlatRegion,
    FlatRegions,
    RegionOp,
    holds_arrays,
    may_run_again,
)


@dataclass(frozen=True, slots=True)
class ResidualStack:
    """A stacked result of a forward loop that only backward loops read, slice by slice.

    Attributes:
      value: its id.
      loop: position of the forward loop in the region.
      slot: index among the loop's stacked results.
      inside: id of the value in the loop's body that is stacked.
      readers: (position of a backward loop, index of the operand that it reads it as).
    """

    value: int
    loop: int
    slot: int
    inside: int
    readers: tuple[tuple[int, int], ...]


def call_of(line: RegionOp) -> RegionCall:
    """Return the region call of an op that has one."""
    assert line.op.call is not None
    return line.op.call


def num_carried(line: RegionOp) -> tuple[int, int]:
    """Return how many consts a loop has, and how many consts and carries together."""
    call = call_of(line)
    return call.num_consts, call.num_consts + call.num_carry


def is_scan(line: RegionOp) -> bool:
    """Whether an op is a scan."""
    return line.op.call is not None and line.op.call.kind is RegionKind.SCAN


def can_be_changed(blocks: FlatRegions, line: RegionOp) -> bool:
    """Whether a loop can be rewritten with other stacks."""
    return (
        is_scan(line)
        and may_run_again(blocks.program, line.op)
        and not holds_arrays(blocks.program, call_of(line).regions[0])
    )


def find_stacks(blocks: FlatRegions, halves: Halves) -> tuple[ResidualStack, ...]:
    """Return all residual stacks of a region."""
    block = halves.block
    reads: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for k, line in enumerate(block.lines):
        for position, v in enumerate(line.reads):
            reads[v].append((k, position))
    found: list[ResidualStack] = []
    for k, line in enumerate(block.lines):
        if halves.is_late[k] or not can_be_changed(blocks, line):
            continue
        body, num_carry = blocks.of(line.op), call_of(line).num_carry
        for slot, value in enumerate(line.makes[num_carry:]):
            readers = reads[value]
            inside = body.outputs[num_carry + slot]
            if (
                readers
                and value not in halves.bound
                and all(
                    halves.is_late[at]
                    and _reads_slices(blocks, block, line, at, position)
                    for at, position in readers
                )
            ):
                found.append(ResidualStack(value, k, slot, inside, tuple(readers)))
    return tuple(found)


def _reads_slices(
    blocks: FlatRegions, block: FlatRegion, forward: RegionOp, at: int, position: int
) -> bool:
    line = block.lines[at]
    return (
        can_be_changed(blocks, line)
        and call_of(line).trip_count == call_of(forward).trip_count
        and position >= num_carried(line)[1]
    )
