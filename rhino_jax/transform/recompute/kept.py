"""What programs keep for their backward pass, and what it costs to make it again."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rhino_jax.ir.program import Op, Program
from rhino_jax.transform.recompute.again import Again, again
from rhino_jax.transform.recompute.late import Halves, halves_of
from rhino_jax.transform.recompute.lines import Block, Blocks, may_run_again
from rhino_jax.transform.recompute.stacks import (
    Stack,
    call_of,
    can_be_changed,
    find_stacks,
)


@dataclass(frozen=True, slots=True)
class Kept:
    """A value that the backward pass reads.

    Attributes:
      value: its id; of a stack, that of the loop's result.
      inside: of a stack, the id of what is stacked in the loop's body; else `value`.
      loop: op id of the loop in whose body it is kept, on every run anew; None at the
        top.
      forward: of a stack, op id of the loop that stacks it; else None.
      bytes: of the whole array, of a stack of all its slices.
      made, first, last: positions in the block's lines: where it is made, and where
        late lines read it first and last.
      flops, moved_bytes: of the lines that make it again while all else that is kept
        stays; bytes are those that they read and write.
      needs: kept values, and inputs of the block, that these lines read; of a stack,
        ids of the loop's body.
      lines: how many they are; 0 where it can not be made again.
    """

    value: int
    inside: int
    loop: int | None
    forward: int | None
    bytes: int
    made: int
    first: int
    last: int
    flops: float
    moved_bytes: float
    needs: tuple[int, ...]
    lines: int


def find_kept(program: Program) -> tuple[Kept, ...]:
    """All of a program, outer blocks first, in the order in which they are made."""
    blocks = Blocks(program)
    found: list[Kept] = []
    todo: list[tuple[Op | None, Block]] = [(None, blocks.top)]
    while todo:
        owner, block = todo.pop(0)
        loop = owner.id if owner else None
        halves = halves_of(block)
        stacks = find_stacks(blocks, halves)
        found += _of_lines(program, halves, loop, {s.value for s in stacks})
        found += [_of_stack(blocks, block, loop, s, stacks) for s in stacks]
        todo += [
            (line.op, blocks.of(line.op))
            for line in block.lines
            if can_be_changed(blocks, line)
        ]
    return tuple(found)


def _of_lines(
    program: Program, halves: Halves, loop: int | None, stacked: Collection[int]
) -> list[Kept]:
    block, found = halves.block, []
    kept = {*halves.late_uses, *halves.bound}
    for value, uses in halves.late_uses.items():
        if value in halves.bound or value in stacked:
            continue
        maker = block.lines[block.maker[value]]
        is_possible = may_run_again(program, maker.op)
        remade = again(program, block, [value] if is_possible else [], kept - {value})
        flops, moved = work_of(program, block, remade)
        found.append(
            Kept(
                value, value, loop, None, program.values[value].bytes,
                block.maker[value], uses[0], uses[-1],
                flops, moved, _inputs(remade), len(remade.lines),
            )
        )  # fmt: skip
    return found


def _of_stack(
    blocks: Blocks,
    block: Block,
    loop: int | None,
    stack: Stack,
    stacks: Collection[Stack],
) -> Kept:
    program = blocks.program
    forward = block.lines[stack.loop]
    body = blocks.of(forward.op)
    others = {s.inside for s in stacks if s.loop == stack.loop} - {stack.inside}
    remade = again(program, body, [stack.inside], others)
    flops, moved = work_of(program, body, remade)
    readers = [at for at, _ in stack.readers]
    trips = call_of(forward).trip_count * len(set(readers))
    return Kept(
        stack.value, stack.inside, loop, forward.op.id,
        program.values[stack.value].bytes, stack.loop, min(readers), max(readers),
        flops * trips, moved * trips, _inputs(remade), len(remade.lines),
    )  # fmt: skip


def _inputs(remade: Again) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for read in remade.inputs.values():
        found.update(dict.fromkeys(read))
    return tuple(found)


def work_of(program: Program, block: Block, remade: Again) -> tuple[float, float]:
    """FLOPs, and bytes read and written, of what runs again, once."""
    flops, moved = 0.0, 0.0
    for k in remade.lines:
        line = block.lines[k]
        flops += flops_of(program, line.op)
        moved += sum(program.values[v].bytes for v in (*line.reads, *line.makes))
    return flops, moved


def flops_of(program: Program, op: Op) -> float:
    """FLOPs of an op, its regions included."""
    if op.call is None:
        return op.flops
    inner = sum(
        flops_of(program, program.ops[k]) for r in op.call.regions for k in r.ops
    )
    return op.flops + inner * op.call.trip_count
