"""Ops that run again to recompute dropped values, the saved values they read, and their
results: every op runs again at most once, when a result is first read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rhino_jax.ir.program import Program
from rhino_jax.rewrite.flat import FlatProgram, FlatRegion, may_run_again, trace_back


@dataclass(frozen=True, slots=True, eq=False)
class Rerun:
    """Ops that run again.

    Attributes:
      lines: positions in the region, in order.
      group: op → its group: ops whose results are needed at about the same time. The
        saved values that a group reads enter it together, behind one barrier.
      inputs: group → saved values that its ops read, in order of first use.
      values: results of the ops.
    """

    lines: tuple[int, ...]
    group: dict[int, int]
    inputs: dict[int, tuple[int, ...]]
    values: frozenset[int]


TOGETHER = 64
"""Largest distance, in ops, between the first uses of recomputed ops of one group: half
of the backward pass of a transformer layer."""

_NEVER = 1 << 62

NOTHING = Rerun((), {}, {}, frozenset())


def again(
    program: Program,
    block: FlatRegion,
    wanted: Iterable[int],
    kept: Collection[int],
    first: Mapping[int, int] | None = None,
) -> Rerun:
    """Return the ops that have to run again to recompute values.

    Args:
      program: the program.
      block: the region that computes the values.
      wanted: ids of the values to recompute.
      kept: ids of values that are saved; the region's inputs always are.
      first: value → position of the first op that reads it recomputed.
    """
    dropped = frozenset(wanted)

    def maker(value: int) -> int | None:
        line = block.maker.get(value)
        is_saved = value in kept and value not in dropped
        if line is None or is_saved or not may_run_again(program, block.ops[line].op):
            return None
        return line

    lines, _ = trace_back(dropped, maker, lambda line: block.ops[line].operands)
    return _grouped(program, block, sorted(lines), kept, first or {})


def _grouped(
    program: Program,
    block: FlatRegion,
    lines: list[int],
    kept: Collection[int],
    first: Mapping[int, int],
) -> Rerun:
    chosen = set(lines)

    def is_recomputed(v: int) -> bool:
        return v not in kept and block.maker.get(v) in chosen

    def is_kept(v: int) -> bool:
        return not is_recomputed(v) and not program.values[v].is_literal

    need: dict[int, int] = {}
    for line in reversed(lines):
        makes, reads = block.ops[line].results, block.ops[line].operands
        mine = min([first[v] for v in makes if v in first], default=_NEVER)
        need[line] = mine = min(mine, need.get(line, _NEVER))
        for v in reads:
            if is_recomputed(v):
                maker = block.maker[v]
                need[maker] = min(mine, need.get(maker, _NEVER))
    group: dict[int, int] = {}
    inputs: dict[int, dict[int, None]] = {}
    now = start = -1
    for line in sorted(lines, key=lambda k: (need[k], k)):
        read = [v for v in block.ops[line].operands if is_kept(v)]
        is_new = any(v not in inputs.get(now, ()) for v in read)
        is_later = any(block.maker.get(v, -1) >= start for v in read)
        if is_later or (is_new and need[line] - start > TOGETHER):
            now, start = line, need[line]
            inputs[now] = {}
        group[line] = now
        inputs.setdefault(now, {}).update(dict.fromkeys(read))
    return Rerun(
        tuple(lines),
        group,
        {g: tuple(read) for g, read in inputs.items()},
        frozenset(
            v for line in lines for v in block.ops[line].results if v not in kept
        ),
    )


def recomputed_values(
    flat: FlatProgram,
    block: FlatRegion,
    again: Rerun,
    read: Callable[[int], Any],
    barred: Callable[[Sequence[Any]], Sequence[Any]],
) -> Callable[[int], Any]:
    """Return a function of the id of a value that is recomputed on first read, together
    with the values that it depends on.

    Args:
      flat: the program.
      block: the region whose ops run again.
      again: which of its ops.
      read: value id → array of a saved value.
      barred: arrays → the same arrays behind a barrier, so that they are not available
        before they are needed.
    """
    made: dict[int, Any] = {}
    entered: dict[int, dict[int, Any]] = {}

    def run(position: int) -> None:
        line, group = block.ops[position], again.group[position]
        if group not in entered:
            inputs = again.inputs[group]
            # A group without inputs needs no barrier.
            arrays = [read(v) for v in inputs]
            found = barred(arrays) if arrays else ()
            entered[group] = dict(zip(inputs, found, strict=True))
        known = {**made, **entered[group]}
        operands = [flat.consts.get(v, known.get(v)) for v in line.operands]
        made.update(zip(line.results, line.bind(operands), strict=True))

    def value(wanted: int) -> Any:
        if wanted not in made:
            left = again.values - made.keys()
            lines, _ = trace_back(
                [wanted],
                lambda v: block.maker[v] if v in left else None,
                lambda line: block.ops[line].operands,
            )
            for line in sorted(lines):
                run(line)
        return made[wanted]

    return value
