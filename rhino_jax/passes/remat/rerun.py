"""Ops that run again to recompute dropped values, the saved values they read, and their
results: every op runs again at most once, when a result is first read; and a remat
choice resolved, by region: ops that run again, values that are stacked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from rhino_jax.ir.program import Program
from rhino_jax.passes.remat.choice import RematChoice
from rhino_jax.passes.remat.late import (
    Halves,
    ResidualStack,
    find_stacks,
    halves_of,
)
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
    dropped, first = frozenset(wanted), first or {}

    def maker(value: int) -> int | None:
        line = block.maker.get(value)
        is_saved = value in kept and value not in dropped
        if line is None or is_saved or not may_run_again(program, block.ops[line].op):
            return None
        return line

    chosen, _ = trace_back(dropped, maker, lambda line: block.ops[line].operands)
    lines = sorted(chosen)

    def is_recomputed(v: int) -> bool:
        return v not in kept and block.maker.get(v) in chosen

    def is_kept(v: int) -> bool:
        return not is_recomputed(v) and not program.values[v].is_literal

    need = dict.fromkeys(lines, _NEVER)
    for line in reversed(lines):
        op = block.ops[line]
        need[line] = min([need[line], *(first[v] for v in op.results if v in first)])
        for v in filter(is_recomputed, op.operands):
            need[block.maker[v]] = min(need[block.maker[v]], need[line])
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


@dataclass(frozen=True, slots=True, eq=False)
class LoopPair:
    """Values of a forward loop's body that a backward loop recomputes or reads.

    Attributes:
      loop: position of the forward loop; None: the region around both loops.
      dropped: operand of the backward loop → value of the forward loop's body that was
        stacked there.
      again: ops of the forward loop's body that run again in the backward loop's body.
      replaced: value of the backward loop's body → value that is read in its place.
    """

    loop: int | None
    dropped: Mapping[int, int]
    again: Rerun
    replaced: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Decided:
    """Changes to one region.

    Attributes:
      halves: the region, with its late ops (backward pass and after).
      again: ops that run again for the late ops.
      stacks: forward loop → slots that are no longer stacked.
      added: forward loop → values of its body that are stacked in addition.
      pairs: backward loop → the values that it recomputes.
      offloaded: values that are moved to host memory.
      split: loop that runs as two loops → slices of the first one, whose residuals are
        saved as in the baseline.
      hosted_stacks: stacks whose slices are moved to host memory, step by step.
      is_ordered: as `RematChoice.ordered`.
    """

    halves: Halves
    again: Rerun = NOTHING
    stacks: Mapping[int, Set[int]] = field(default_factory=dict)
    added: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    pairs: Mapping[int, tuple[LoopPair, ...]] = field(default_factory=dict)
    offloaded: frozenset[int] = frozenset()
    hosted_stacks: frozenset[int] = frozenset()
    split: Mapping[int, int] = field(default_factory=dict)
    is_ordered: bool = False

    @property
    def block(self) -> FlatRegion:
        return self.halves.block


def decide(flat: FlatProgram, choice: RematChoice) -> dict[int | None, Decided]:
    """Return the changes to each region, by op id of its loop; None: the program.

    Args:
      flat: the program.
      choice: values to recompute, save or offload.
    """
    regions = changeable_regions(flat)
    return {owner: _decide(flat, block, choice) for owner, block in regions}


def changeable_regions(flat: FlatProgram) -> Iterator[tuple[int | None, FlatRegion]]:
    """Yield the body of a program, with None, and those of all loops that can be
    rewritten, with the loop's op id."""
    todo: list[tuple[int | None, FlatRegion]] = [(None, flat.top)]
    for owner, block in todo:
        yield owner, block
        loops = filter(flat.can_change, block.ops)
        todo += [(line.op.id, line.regions[0]) for line in loops]


def _decide(flat: FlatProgram, block: FlatRegion, choice: RematChoice) -> Decided:
    halves = halves_of(block)
    dropped = {block.named(v) for v in choice.recompute}
    explicit = {block.named(v) for v in choice.keep}
    all_stacks = find_stacks(flat, halves)
    for loop, count in choice.first:
        trips = flat.program.ops[loop].call
        assert trips is not None and 0 < count < trips.trip_count, (loop, count)
    stacks = [s for s in all_stacks if s.value in dropped]
    stacked = {s.value for s in all_stacks}
    wanted = [v for v in halves.late_uses if v in dropped and v not in stacked]
    kept = ({*halves.late_uses, *block.outputs} - set(wanted)) | explicit
    first = {v: uses[0] for v, uses in halves.late_uses.items()}
    remat = again(flat.program, block, wanted, kept, first)
    slots: dict[int, set[int]] = defaultdict(set)
    for stack in stacks:
        slots[stack.loop].add(stack.slot)
    pairs = _pairs(flat, block, stacks, explicit)
    added = stacked_anew(block, pairs)
    sent = {block.named(v) for v in choice.offload} - dropped
    return Decided(
        halves,
        remat,
        slots,
        added,
        pairs,
        frozenset((sent & set(halves.late_uses)) - remat.values - stacked),
        frozenset(sent & stacked),
        _split(block, pairs, dict(choice.first)),
        choice.ordered,
    )


def _split(
    block: FlatRegion,
    pairs: Mapping[int, tuple[LoopPair, ...]],
    first: Mapping[int, int],
) -> dict[int, int]:
    """Return the loops that run as two, forward and backward → slices of the first."""
    found: dict[int, int] = {}
    for at, several in pairs.items():
        loops = [pair.loop for pair in several if pair.loop is not None]
        counts = {first.get(block.ops[loop].op.id, 0) for loop in loops}
        assert len(counts) == 1, "loops that one loop goes back through part alike"
        (count,) = counts
        if count:
            found.update(dict.fromkeys([at, *loops], count))
    return found


def _pairs(
    flat: FlatProgram,
    block: FlatRegion,
    stacks: list[ResidualStack],
    explicit: set[int],
) -> dict[int, tuple[LoopPair, ...]]:
    dropped: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for stack in stacks:
        for at, position in stack.readers:
            dropped[at, stack.loop][position] = stack.inside
    gone = {stack.value for stack in stacks}
    found: dict[int, list[LoopPair]] = defaultdict(list)
    for (at, loop), operands in dropped.items():
        forward = block.ops[loop]
        body = forward.regions[0]
        backward, stacked = block.ops[at], forward.call.stacked
        slices = set(backward.call.sliced(backward.operands)) - gone
        made = zip(stacked(forward.results), stacked(body.outputs), strict=True)
        still = {inside for value, inside in made if value in slices}
        kept = still | {body.named(v) for v in explicit}
        remat = again(flat.program, body, operands.values(), kept)
        found[at].append(LoopPair(loop, operands, remat))
    return {at: tuple(several) for at, several in found.items()}


def leaves(pair: LoopPair) -> tuple[int, ...]:
    """Return values of the forward body that the backward loop reads as saved."""
    dropped = (v for v in pair.dropped.values() if v not in pair.again.values)
    read = chain(*pair.again.inputs.values(), dropped, pair.replaced.values())
    return tuple(dict.fromkeys(read))


def stacked_anew(
    block: FlatRegion, pairs: Mapping[int, Iterable[LoopPair]]
) -> dict[int, tuple[int, ...]]:
    """Return forward loop → those of `leaves` that no operand or stack of it holds."""
    found: dict[int, dict[int, None]] = defaultdict(dict)
    for pair in chain(*pairs.values()):
        if pair.loop is None:
            continue
        forward = block.ops[pair.loop]
        body, call = forward.regions[0], forward.call
        held = {*call.consts(body.inputs), *call.sliced(body.inputs)}
        held |= {*call.stacked(body.outputs)} - {*pair.dropped.values()}
        new = dict.fromkeys(v for v in leaves(pair) if v not in held)
        found[pair.loop].update(new)
    return {loop: tuple(values) for loop, values in found.items() if values}
