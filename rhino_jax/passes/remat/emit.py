"""The remat pass: run a program op by op with its remat changes applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rhino_jax.ir.program import Program
from rhino_jax.ir.transform import RECOMPUTE, Transform
from rhino_jax.passes.program_pass import ProgramPass, Trial, TrialKind
from rhino_jax.passes.remat.choice import RematChoice
from rhino_jax.passes.remat.frame import (
    Frame,
    LoopRange,
    Read,
    SlicedStacks,
    Table,
    from_host,
    to_host,
    waits_on_host,
)
from rhino_jax.passes.remat.rerun import (
    Decided,
    LoopPair,
    decide,
    leaves,
    recomputed_values,
)
from rhino_jax.rewrite.emit import scan_like
from rhino_jax.rewrite.flat import FlatOp, FlatProgram
from rhino_jax.rewrite.flatten import flatten
from rhino_jax.rewrite.retraced import retraced


def emit(flat: FlatProgram, table: Table, inputs: Sequence[Any]) -> list[Any]:
    """Run the program on the arrays of its inputs and return its results."""
    frame = Frame(flat, table, table[None])
    frame.early.update(zip(frame.block.inputs, inputs, strict=True))
    run(frame)
    return frame.outputs()


def run(frame: Frame) -> None:
    """Run all ops of a region.

    Args:
      frame: the run; it holds the region's inputs and receives all results.
    """
    for k, line in enumerate(frame.block.ops):
        is_late = frame.decided.halves.is_late[k]
        frame.reading = line if is_late else None
        read: Read = frame.read_late if is_late else frame.read
        if line.is_scan and changes_loop(frame.table, frame.decided, k):
            with line.context():
                results = loop(frame, k, line, read)
        else:
            operands = [read(v) for v in line.operands]
            results = line.bind(operands)
        frame.made(line, results, is_late)


def changes_loop(table: Table, decided: Decided, k: int) -> bool:
    """Whether a loop stacks other values, or something in its body changes.

    Args:
      table: all changes to the program.
      decided: changes to the region of the loop.
      k: position of the loop in the region.
    """
    line = decided.block.ops[k]
    own = decided.split, decided.stacks, decided.added, decided.pairs
    if any(k in changed for changed in own):
        return True
    if not decided.hosted_stacks.isdisjoint((*line.operands, *line.results)):
        return True
    inner = table.get(line.op.id)
    return inner is not None and changes(table, inner)


def changes(table: Table, decided: Decided) -> bool:
    """Whether anything changes in a region, or in a loop inside of it."""
    if decided.again.lines or decided.offloaded:
        return True
    return any(
        is_recomputed(line) or (line.is_scan and changes_loop(table, decided, k))
        for k, line in enumerate(decided.block.ops)
    )


def is_recomputed(line: FlatOp) -> bool:
    """Whether an op was inlined from a region of `jax.checkpoint`."""
    return any(each.call.is_remat for each in line.within)


def loop(frame: Frame, k: int, line: FlatOp, read: Read) -> list[Any]:
    """Run a loop with changed stacks.

    Args:
      frame: the run of the region around it.
      k: position of the loop in the region.
      line: the loop.
      read: value id → array, as the loop reads it.
    Returns:
      Its results; None for stacks that were dropped, or are in `Frame.parts`.
    """
    call, decided = line.call, frame.decided
    carries = [read(v) for v in call.carries(line.operands)]
    split = decided.split.get(k)
    if split is None:
        carries, stacks = steps(frame, k, read, carries, None)
        return [*carries, *stacks]
    parts = LoopRange(0, 0, split), LoopRange(1, split, call.trip_count)
    found: dict[int, list[Any]] = {}
    is_reverse = line.eqn.params["reverse"]
    for part in parts[::-1] if is_reverse else parts:
        carries, found[part.number] = steps(frame, k, read, carries, part)
    both = zip(found[0], found[1], strict=True)
    frame.parts.update(zip(call.stacked(line.results), both, strict=True))
    return [*carries, *[None] * len(found[0])]


def steps(
    frame: Frame, k: int, read: Read, carries: list[Any], part: LoopRange | None
) -> tuple[list[Any], list[Any]]:
    """Run a loop, or a range of its steps; return its carries, and its stacks, None for
    those that are dropped.

    The first range of a loop that is split stacks everything and recomputes nothing.

    Args:
      frame: the run of the region around it.
      k: position of the loop in the region.
      read: value id → array, as the loop reads it.
      carries: arrays of the carries at the start.
      part: range of its steps; None: all.
    """
    line, decided = frame.block.ops[k], frame.decided
    call = line.call
    is_first = part is not None and part.number == 0
    own = Decided(decided.halves) if is_first else decided
    pairs, left_out = own.pairs.get(k, ()), own.stacks.get(k, frozenset())
    added = own.added.get(k, ())
    gone = {position for pair in pairs for position in pair.dropped}
    slots = [p for p in range(call.first_slice, len(line.operands)) if p not in gone]
    consts = [read(v) for v in call.consts(line.operands)]
    slices = SlicedStacks(part)
    for p in slots:
        slices.add(*frame.stack(line.operands[p], part, read))
    hosted = decided.hosted_stacks

    def needed(pair: LoopPair) -> dict[int, tuple[bool, Any]]:
        """Collect the values of a forward loop's body that this loop reads as saved.

        Stacks that it does not read slice by slice are added to `slices`.

        Returns:
          Value of the body → (whether it is a slice, position in `slices` or else the
            array).
        """
        if pair.loop is None:
            return {v: (False, frame.read_late(v)) for v in leaves(pair)}
        forward = frame.block.ops[pair.loop]
        inputs, reads = forward.regions[0].inputs, forward.operands
        own, left = forward.call, decided.stacks.get(pair.loop, frozenset())
        made = zip(forward.regions[0].outputs, forward.results, strict=True)
        stacked = enumerate(own.stacked([*made]))
        stacks = {v: x for s, (v, x) in stacked if s not in left}
        stacks |= zip(own.sliced(inputs), own.sliced(reads), strict=True)
        outer = dict(zip(own.consts(inputs), own.consts(reads), strict=True))
        found: dict[int, tuple[bool, Any]] = {}
        for v in leaves(pair):
            if v in outer:
                found[v] = False, frame.read_late(outer[v])
                continue
            stack = (
                frame.stack(stacks[v], part, frame.read_late)
                if v in stacks
                else (frame.stacks[pair.loop, v], part is not None)
            )
            found[v] = True, slices.add(*stack)
        return found

    def bind(inner: Frame, pair: LoopPair, have: Mapping[int, Any]) -> None:
        """Bind this loop's reads to saved values, or to their recomputation; `have`:
        value of the forward loop's body → array."""
        for value, other in pair.replaced.items():
            inner.sources[value] = partial(have.__getitem__, other)
        if pair.loop is None or not pair.dropped:
            return
        body = frame.block.ops[pair.loop].regions[0]
        # XLA merges no ops of two loops (no CSE): recomputed values need no barrier.
        again = recomputed_values(inner.flat, body, pair.again, have.__getitem__, list)
        for position, value in pair.dropped.items():
            is_again = value in pair.again.values
            source = partial(again if is_again else have.__getitem__, value)
            inner.sources[inner.block.inputs[position]] = source

    needs = [*map(needed, pairs)]

    def step(carry: Any, scanned: Any) -> Any:
        inner = Frame(frame.flat, frame.table, frame.table[line.op.id])
        inputs, xs = inner.block.inputs, slices.at_step(scanned)
        if hosted:
            xs = [from_host(x) if waits_on_host(x) else x for x in xs]
        inner.early.update(zip(inputs, [*consts, *carry], strict=False))
        inner.early.update((inputs[p], x) for p, x in zip(slots, xs, strict=False))
        for pair, found in zip(pairs, needs, strict=True):
            have = {v: xs[x] if is_slice else x for v, (is_slice, x) in found.items()}
            bind(inner, pair, have)
        run(inner)
        outs = inner.outputs()
        ys = [
            to_host(y) if line.results[call.num_carry + s] in hosted else y
            for s, y in enumerate(call.stacked(outs))
            if s not in left_out
        ]
        return outs[: call.num_carry], [*ys, *(inner.read(v) for v in added)]

    length = None if part is None else part.stop - part.start
    carry, ys = scan_like(line.eqn, step, carries, slices.scanned(), length)
    rest, count = iter(ys), len(call.stacked(line.results))
    stacks = [None if s in left_out else next(rest) for s in range(count)]
    frame.stacks.update(((k, v), y) for v, y in zip(added, rest, strict=True))
    return list(carry), stacks


def recomputed(closed_jaxpr: Any, program: Program, choice: str) -> Any:
    """Retrace a function with the chosen values recomputed or offloaded.

    Args:
      closed_jaxpr: the function.
      program: imported from it.
      choice: a `RematChoice` as text.
    """
    flat = flatten(program, closed_jaxpr)
    decided = decide(flat, RematChoice.parse(choice))
    return retraced(closed_jaxpr, lambda *arrays: emit(flat, decided, arrays))


def _extent(remat: Transform) -> str:
    """Return how many values a choice of remat recomputes or offloads."""
    counts = ((key, len(remat.chosen.get(key, ()))) for key in ("recompute", "offload"))
    words = {"recompute": "recomputed", "offload": "offloaded"}
    found = ", ".join(f"{n} {words[key]}" for key, n in counts if n)
    return f" ({found})" if found else ""


PASS = ProgramPass(
    RECOMPUTE, recomputed, trial=Trial(TrialKind.SELECTED, _extent, "recompute")
)
