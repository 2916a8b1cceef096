"""Which lines run again for values that were dropped, and what these read."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from rhino_jax.ir.program import Program
from rhino_jax.transform.recompute.lines import Block, may_run_again


@dataclass(frozen=True, slots=True, eq=False)
class Again:
    """What runs again.

    Attributes:
      lines: positions in the block, in order.
      group: line → its group: lines of which one reads what another makes.
      inputs: group → what its lines read that is kept, in order of first reading.
      values: what the lines make.
    """

    lines: tuple[int, ...]
    group: dict[int, int]
    inputs: dict[int, tuple[int, ...]]
    values: frozenset[int]


NOTHING = Again((), {}, {}, frozenset())


def again(
    program: Program, block: Block, wanted: Iterable[int], kept: Collection[int]
) -> Again:
    """What has to run so that these values are there again.

    Args:
      program: the program.
      block: the block that made them.
      wanted: the values.
      kept: values that are still there; so are the block's inputs.
    """
    lines: set[int] = set()
    todo = [v for v in wanted if _makes_again(program, block, v)]
    while todo:
        line = block.maker[todo.pop()]
        if line in lines:
            continue
        lines.add(line)
        todo += [
            v
            for v in block.lines[line].reads
            if v not in kept and _makes_again(program, block, v)
        ]
    return _grouped(program, block, sorted(lines), kept)


def _makes_again(program: Program, block: Block, value: int) -> bool:
    line = block.maker.get(value)
    return line is not None and may_run_again(program, block.lines[line].op)


def _grouped(
    program: Program, block: Block, lines: list[int], kept: Collection[int]
) -> Again:
    chosen = set(lines)
    group = {line: line for line in lines}

    def root(line: int) -> int:
        while group[line] != line:
            group[line] = line = group[group[line]]
        return line

    def is_remade(v: int) -> bool:
        return v not in kept and block.maker.get(v) in chosen

    # Masks and the like, made of nothing, join no groups.
    is_of_nothing: dict[int, bool] = {}
    for line in lines:
        is_of_nothing[line] = all(
            is_of_nothing[block.maker[v]] if is_remade(v) else _is_literal(program, v)
            for v in block.lines[line].reads
        )
        for v in block.lines[line].reads:
            if is_remade(v) and not is_of_nothing[block.maker[v]]:
                group[root(line)] = root(block.maker[v])
    inputs: dict[int, dict[int, None]] = {root(line): {} for line in lines}
    for line in lines:
        for v in block.lines[line].reads:
            if not is_remade(v) and not _is_literal(program, v):
                inputs[root(line)][v] = None
    return Again(
        tuple(lines),
        {line: root(line) for line in lines},
        {g: tuple(read) for g, read in inputs.items()},
        frozenset(
            v for line in lines for v in block.lines[line].makes if v not in kept
        ),
    )


def _is_literal(program: Program, value: int) -> bool:
    return program.values[value].is_literal
