"""List the values that a program saves for its backward pass, to rewrite them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from rhino_jax.ir.program import Op, Program
from rhino_jax.passes.remat.late import find_stacks, halves_of
from rhino_jax.passes.remat.rerun import again
from rhino_jax.rewrite.flat import FlatProgram, FlatRegion, may_run_again
from rhino_jax.rewrite.flatten import flatten


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
    """Return all of a program's, outer ones first, in the order of their makers."""
    flat = flatten(program)
    found: list[Saved] = []
    todo: list[tuple[Op | None, FlatRegion]] = [(None, flat.top)]
    while todo:
        owner, block = todo.pop(0)
        found += _of_block(flat, block, owner.id if owner else None)
        todo += [
            (line.op, line.regions[0]) for line in block.ops if flat.can_change(line)
        ]
    return tuple(found)


def _of_block(
    flat: FlatProgram, block: FlatRegion, loop: int | None
) -> Iterator[Saved]:
    program, halves = flat.program, halves_of(block)
    stacks = find_stacks(flat, halves)
    saved = {*halves.late_uses, *block.outputs}
    loops = {s.value for s in stacks}
    for value in (v for v in halves.late_uses if v not in {*block.outputs, *loops}):
        can_run = may_run_again(program, block.ops[block.maker[value]].op)
        count = _count(program, block, [value] if can_run else [], saved - {value})
        yield Saved(value, loop, None, program.values[value].bytes, count)
    for stack in stacks:
        forward = block.ops[stack.loop]
        others = {s.inside for s in stacks if s.loop == stack.loop} - {stack.inside}
        count = _count(program, forward.regions[0], [stack.inside], others)
        size = program.values[stack.value].bytes
        yield Saved(stack.value, loop, forward.op.id, size, count)


def _count(
    program: Program, block: FlatRegion, wanted: list[int], saved: Collection[int]
) -> int:
    return len(again(program, block, wanted, set(saved)).lines)
