"""List the values that a program saves for its backward pass, to rewrite them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from rhino_jax.ir.program import Op, Program
from rhino_jax.passes.remat.late import halves_of
from rhino_jax.passes.remat.regions import FlatRegion, FlatRegions, may_run_again
from rhino_jax.passes.remat.rerun import again
from rhino_jax.passes.remat.residual_stacks import can_be_changed, find_stacks


@dataclass(frozen=True)
class Saved:
    """A value that the backward pass reads.

    Attributes:
      value: its id; of the residuals of a loop, that of the loop's result.
      loop: op id of the loop in whose body it is saved; None at the top.
      forward: of residuals of a loop, op id of that loop; else None.
      bytes: of the whole array.
      lines: number of equations that recompute it; 0 where it cannot be.
    """

    value: int
    loop: int | None
    forward: int | None
    bytes: int
    lines: int


def saved_values(program: Program) -> tuple[Saved, ...]:
    """Return all of a program's, outer blocks first, in the order of their makers."""
    blocks = FlatRegions(program)
    found: list[Saved] = []
    todo: list[tuple[Op | None, FlatRegion]] = [(None, blocks.top)]
    while todo:
        owner, block = todo.pop(0)
        found += _of_block(blocks, block, owner.id if owner else None)
        todo += [
            (line.op, blocks.of(line.op))
            for line in block.lines
            if can_be_changed(blocks, line)
        ]
    return tuple(found)


def _of_block(
    blocks: FlatRegions, block: FlatRegion, loop: int | None
) -> Iterator[Saved]:
    program, halves = blocks.program, halves_of(block)
    stacks = find_stacks(blocks, halves)
    saved = {*halves.late_uses, *halves.bound}
    loops = {s.value for s in stacks}
    for value in (v for v in halves.late_uses if v not in {*halves.bound, *loops}):
        can_run = may_run_again(program, block.lines[block.maker[value]].op)
        count = _count(program, block, [value] if can_run else [], saved - {value})
        yield Saved(value, loop, None, program.values[value].bytes, count)
    for stack in stacks:
        forward = block.lines[stack.loop].op
        others = {s.inside for s in stacks if s.loop == stack.loop} - {stack.inside}
        count = _count(program, blocks.of(forward), [stack.inside], others)
        size = program.values[stack.value].bytes
        yield Saved(stack.value, loop, forward.id, size, count)


def _count(
    program: Program, block: FlatRegion, wanted: list[int], saved: Collection[int]
) -> int:
    return len(again(program, block, wanted, set(saved)).lines)
