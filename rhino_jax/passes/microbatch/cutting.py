"""Analysis: whether a program can run in micro-batches, and its schedule.

Nothing is emitted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rhino_jax.analysis.roles import data_inputs
from rhino_jax.errors import CoupledBatchError, MicrobatchError
from rhino_jax.ir.axes import follow
from rhino_jax.ir.places import at_place
from rhino_jax.ir.program import Op, Program
from rhino_jax.passes.microbatch.cut import MicrobatchChoice, MicrobatchCut
from rhino_jax.passes.microbatch.demand import Demand
from rhino_jax.passes.microbatch.emit import Split
from rhino_jax.passes.microbatch.flow.analysis import (
    BatchCoupling,
    Divided,
    FlowResult,
    OpenedRemat,
    analyse,
    analyse_one,
)
from rhino_jax.passes.microbatch.flow.ops import DimSizes
from rhino_jax.passes.microbatch.flow.states import (
    Inputs,
    Partial,
    RowsState,
    WholeState,
    candidates,
    is_of_rows,
    is_outside,
    moved,
)
from rhino_jax.passes.split_scan import split_scan
from rhino_jax.rewrite.flat import FlatOp
from rhino_jax.rewrite.flatten import all_calls, flatten
from rhino_jax.rewrite.numbers import ValueNumbers
from rhino_jax.rewrite.retraced import reimported


WITHOUT_LOOP = (
    "if the loop accumulates gradients over micro-batches, write the step without it:"
    " give `microbatches=` and the loss of the whole batch, whose gradients are then"
    " accumulated in the same way"
)
"""Advice for a program that loops over micro-batches to accumulate gradients itself."""

MAX_LOOPS_OF_OTHERS = 3
"""Maximum number of loops over a dim that is not the likeliest batch: what meets more
often is a feature or a place, as the rows of an image are."""

MAX_CHANGES = 30
"""Maximum number of regions inlined and scans split."""


def find_cut(
    closed: Any, program: Program, choice: MicrobatchChoice, *, is_even: bool = False
) -> tuple[MicrobatchCut, FlowResult]:
    """Find the schedule of a program in micro-batches.

    Args:
      closed: closed jaxpr of the program.
      program: the program imported from it.
      choice: options of the pass.
      is_even: whether all micro-batches must have the same number of rows.
    Returns:
      The schedule, and the analysis that it is derived from.
    Raises:
      MicrobatchError: the program cannot run in `choice.count` micro-batches; the
        message names the op and what it needs.
    """
    first: MicrobatchError | None = None
    for rows, inputs in candidates(flatten(program, closed, all_calls()), choice.least):
        try:
            if is_even:
                _check_even(program, choice.count, rows)
            return _cut(closed, program, choice, rows, inputs)
        except MicrobatchError as error:
            if first is None:
                first, most = error, choice.most_loops
                few = min(MAX_LOOPS_OF_OTHERS, most or MAX_LOOPS_OF_OTHERS)
                choice = replace(choice, most_loops=few)
    data = [program.inputs[i] for i in data_inputs(program)]
    is_one = data and all(program.values[e.value].shape[0] == 1 for e in data)
    if is_one and choice.count > 1:
        raise MicrobatchError(
            f"`{program.name}` has a batch of 1: there is nothing to cut.",
            where=data[0].path,
            numbers=f"the first dim of all {len(data)} arrays of data is 1",
            fix="give two rows or more, or let the batch be the first dim.",
        )
    if first is not None:
        raise first
    raise MicrobatchError(
        f"`{program.name}` has no batch to cut: none of its inputs are data.",
        where=f"`{program.name}`",
        numbers=f"{len(program.inputs)} inputs, each fed back or a scalar",
        fix="pass the batch as an argument that is not donated.",
    )


def _cut(
    closed: Any, program: Program, choice: MicrobatchChoice, rows: int, inputs: Inputs
) -> tuple[MicrobatchCut, FlowResult]:
    if not choice.least <= choice.count <= rows:
        raise MicrobatchError(
            f"`{program.name}` cannot run in {choice.count} micro-batches.",
            where=f"`{program.name}`",
            numbers=f"batch of {rows}",
            fix=f"choose from {choice.least} to {rows}.",
        )
    largest = max(program.values[v].bytes for v in inputs)
    sizes = DimSizes(rows, int(choice.cheap * largest), int(choice.kept * largest))
    places = [*map(at_place, choice.per_microbatch)]

    def takes_own(item: FlatOp) -> bool:
        return any(is_there(item.op.source) for is_there in places)

    opened: set[int] = set()
    same: dict[int, int] = {}
    needs: Op | None = None
    for _ in range(MAX_CHANGES):
        flat = flatten(program, closed, all_calls(opened), same)
        try:
            if rows == 1:
                found = analyse_one(flat, inputs, sizes)
                break
            found = analyse(flat, inputs, sizes, takes_own)
            again = recomputed_sums(found, opened)
            if again == same:
                break
            same = again
        except OpenedRemat as error:
            opened.update(_alike(program, error.op))
        except Divided as error:
            needs = error.item.op
            if not error.item.results:  # no loop that comes later can run it
                raise MicrobatchError(
                    f"`{needs.name}` needs, in every trip of a loop, a sum over the"
                    f" batch, which `{program.name}` has in micro-batches only after"
                    " the loop.",
                    where=str(needs.source),
                    numbers="no result depends on it",
                    fix="return what it should see from the loop, or plan with"
                    " `microbatches=1`.",
                ) from None
            closed = split_scan(closed, flat, error.scan, error.values)
            program = reimported(closed, program)
            opened, same, inputs = set(), {}, moved(inputs, flat, program)
    else:
        raise MicrobatchError(
            f"`{program.name}` has sums over the batch in too many of its loops.",
            where=str(needs.source) if needs else f"`{program.name}`",
            numbers=f"{MAX_CHANGES} loops and recomputed regions taken apart",
            fix="plan with `microbatches=1`.",
        )
    _check_batch(found)
    demand = Demand.of(found)
    cut = cut_of(demand, choice.count)
    cut = replace(cut, inputs=tuple(sorted(inputs)), opened=tuple(sorted(opened)))
    _check_own(cut)
    _check(choice, cut, demand)
    return cut, found


def _alike(program: Program, region: int) -> set[int]:
    """Return the ids of the `jax.checkpoint` regions with the same sequence of
    primitives as one: a rewrite that one layer needs, its other layers need as well."""

    def names(op: Op) -> list[str]:
        assert op.call is not None
        return [program.ops[o].name for r in op.call.regions for o in r.ops]

    one = program.ops[region]
    alike = (program.ops[o] for o in program.body.ops if program.ops[o].call)
    return {
        region,
        *(op.id for op in alike if op.name == one.name and names(op) == names(one)),
    }


def cut_of(demand: Demand, count: int) -> MicrobatchCut:
    """Build the schedule from the demand of values.

    Args:
      demand: which ops run in which loop.
      count: number of micro-batches.
    """
    found, program = demand.found, demand.found.flat.program
    rows = found.sizes.rows
    flops = {op.id: program.flops_of(op) for op in program.ops}
    loops, outside = demand.loops, demand.outside()
    runs, waits = Counter(op for loop in loops for op in loop.ops), _waits(demand)
    sums = {
        v
        for v, s in found.states.items()
        if isinstance(s, Partial) and s.reducer == "sum"
    }
    return MicrobatchCut(
        rows=rows,
        count=Split.of(rows, count).count,
        inputs=(),
        outside=outside,
        loops=loops,
        opened=(),
        flops=sum(flops[op] for op in program.body.ops),
        again_flops=sum((n - 1) * flops[op] for op, n in runs.items()),
        meeting_flops=meeting_flops(found, outside, flops),
        own=tuple(sorted(found.own)),
        why=tuple(map(str, waits)),
        # What waits for sums may take those of each micro-batch.
        places=_places([m for m in waits if sums.issuperset(m.values)]),
        program=program,
    )


def _check_even(program: Program, count: int, rows: int) -> None:
    if rows % count == 0:
        return
    counts = [n for n in range(2, rows + 1) if rows % n == 0]
    fewer = [n for n in counts if n < count][-1:]
    more = [n for n in counts if n > count][:1]
    these = " or ".join(map(str, fewer + more))
    padded = rows + -rows % count
    raise MicrobatchError(
        f"`{program.name}` has no {count} equal micro-batches: stages need those.",
        where="`microbatches=`",
        numbers=f"batch of {rows}",
        fix=f"take {these} micro-batches, or pad the batch to {padded} rows, whose loss"
        " counts none of those added.",
    )


def _check_batch(found: FlowResult) -> None:
    """Refuse a batch dim that is contracted with a parameter: it is a feature dim."""
    rows, program = found.sizes.rows, found.flat.program
    for item in found.flat.top.ops:
        if not item.op.traits.is_contraction:
            continue
        uses = found.ran[item.op.id].uses
        for value, use in zip(item.operands, uses, strict=True):
            state = found.states[value]
            if not (isinstance(use, RowsState) and isinstance(state, WholeState)):
                continue
            if found.flat.is_parameter(value, use.span):
                raise MicrobatchError(
                    f"`{program.name}` has no batch of {rows}: a dim of its data of"
                    " that size is contracted with a parameter.",
                    where=str(item.op.source),
                    numbers=f"`{item.op.name}` of operands "
                    f"{[program.values[v].shape for v in item.operands]}",
                    fix="let the batch be the first dim of all data.",
                )


def _waits(demand: Demand) -> list[BatchCoupling]:
    """Return for each loop but the first an op coupling the batch that delays it."""
    in_loops = {op for loop in demand.loops for op in loop.ops}
    waits: dict[int, BatchCoupling] = {}
    for meeting in demand.found.meetings:
        is_full = any(v in demand.time for v in meeting.item.results)
        is_run = meeting.item.op.id in in_loops
        if is_run or (is_full and meeting.is_costly):
            waits.setdefault(meeting.phase, meeting)
    return [waits[p] for p in sorted(waits) if 0 < p < len(demand.loops)]


def _check(choice: MicrobatchChoice, cut: MicrobatchCut, demand: Demand) -> None:
    program, found, loops = cut.program, demand.found, len(cut.loops)
    in_loops = sum(len(loop.ops) for loop in cut.loops)
    if not in_loops:
        coupled = _of_rows(found) or found.meetings
        is_own = any(program.holds_backward(m.item.op) for m in coupled)
        raise MicrobatchError(
            f"nothing of `{program.name}` can be cut along a batch of {cut.rows}.",
            where=_where(coupled) or f"`{program.name}`",
            numbers=_couplings(coupled),
            fix=f"{WITHOUT_LOOP}; or `microbatches=1`."
            if is_own
            else "plan with `microbatches=1`.",
        )
    again = cut.again_flops / cut.flops if cut.flops else 0.0
    growth = max(in_loops / len(found.flat.top.ops), 1 + again)
    most = choice.most_loops
    numbers = ""
    if most is not None and loops > most:
        numbers = f"at most {most}"
    elif growth > choice.most_growth:
        numbers = (
            f"{growth:.1f} times the program, at most {choice.most_growth:g} times"
        )
    if numbers:
        fix = "take out what couples the rows of a batch, or plan with"
        fix += " `microbatches=1`."
        if cut.places:
            fix += (
                " For statistics of each micro-batch, as of BatchNorm in training, ask"
                f" for them: per_microbatch={cut.places[0]!r}."
            )
        waits = _waits(demand)
        raise CoupledBatchError(
            f"`{program.name}` would need {loops} loops over micro-batches:"
            " its rows meet again and again.",
            where="; ".join(dict.fromkeys(str(m.item.op.source) for m in waits)),
            numbers=f"{loops} loops, {numbers}; {_couplings(waits)}",
            fix=fix,
            places=cut.places,
        )
    if cut.meeting_flops > choice.most_meeting * cut.flops:
        costly = [m for m in _of_rows(found) if m.is_costly] or _of_rows(found)
        raise CoupledBatchError(
            f"`{program.name}` does too much on its whole batch at once to be cut.",
            where=_where(costly),
            numbers=f"{cut.meeting_flops / cut.flops:.0%} of the FLOPs, at most"
            f" {choice.most_meeting:.0%}; {_couplings(costly)}",
            fix="take out what couples the rows of a batch, or `microbatches=1`.",
            places=_places(costly),
        )


def _of_rows(found: FlowResult) -> list[BatchCoupling]:
    """Return the couplings whose ops need all rows, not sums over them.

    An update that is not linear in a gradient is one.
    """
    return [
        m
        for m in found.meetings
        if any(isinstance(found.states[v], RowsState) for v in m.values)
    ]


def _check_own(cut: MicrobatchCut) -> None:
    """Refuse values that are no floats and so have no mean over micro-batches."""
    for crossing in (c for loop in cut.loops for c in loop.leaving):
        value = cut.program.values[crossing.value]
        if crossing.how == "mean" and "float" not in value.dtype:
            op = next(o for o in cut.program.ops if value.id in o.results)
            raise MicrobatchError(
                f"`{op.name}` depends on sums of each micro-batch, and has no mean.",
                where=str(op.source),
                numbers=f"{value.dtype}{list(value.shape)}",
                fix="name fewer places in per_microbatch=, or `microbatches=1`.",
            )


def _where(meetings: list[BatchCoupling]) -> str:
    return f"{meetings[0].item.op.source}" if meetings else ""


def _places(meetings: list[BatchCoupling]) -> tuple[str, ...]:
    """Return the places of ops that couple the batch, as `per_microbatch=` takes them.

    A place is the op's module, else its function, else its source line. Scopes of
    private functions, such as those of `jnp.var`, are left out.
    """
    found: dict[str, None] = {}
    for source in (m.item.op.source for m in meetings):
        scopes = [s for s in source.scopes.split("/") if not s.startswith("_")]
        module = re.sub(r"_\d+$", "", scopes[-1] if scopes else "")
        found[module or source.function.rpartition(".")[2] or str(source)] = None
    return tuple(found)


def _couplings(meetings: list[BatchCoupling]) -> str:
    return "; ".join([*dict.fromkeys(map(str, meetings))][:3])


def recomputed_sums(found: FlowResult, opened: Collection[int]) -> dict[int, int]:
    """Return sums over rows that equal earlier ones: value id → the first equal value.

    A recomputed region is inlined where an op in it needs the whole batch. If its sums
    were recomputed, the forward pass up to them would have to run a second time in a
    loop of its own: they are read from the first run instead. Sizes of groups are
    recomputed with the rows that they count; what is computed from them is not.

    Args:
      found: the analysis of a program.
      opened: ids of the recomputed regions that are inlined in it.
    """
    if not opened:
        return {}
    of = ValueNumbers(found.flat, is_deep=False).of
    made = [v for item in found.flat.top.ops for v in item.results]
    first = {of[v]: v for v in reversed(made)}
    return {
        value: first[of[value]]
        for item in found.flat.top.ops
        if any(is_of_rows(found.states[v]) for v in item.operands)
        for value in item.results
        if isinstance(state := found.states[value], Partial)
        and state.counts is None
        and first[of[value]] != value
    }


def meeting_flops(
    found: FlowResult, outside: Sequence[Sequence[int]], flops: Mapping[int, float]
) -> float:
    """Return the FLOPs of ops that run on the whole batch, except those that are cheap.

    Args:
      found: the analysis.
      outside: ids of the ops that run outside of loops.
      flops: FLOPs of each op by id.
    """
    run, states = {op for ops in outside for op in ops}, found.states
    # Values, those known in full as well → their batch dim.
    at = {v: s.span for v, s in states.items() if isinstance(s, RowsState)}
    total = 0.0
    for item in found.flat.top.ops:
        is_run = all(is_outside(states[v]) for v in item.results)
        cuts = [(i, at[v]) for i, v in enumerate(item.operands) if v in at]
        if item.op.id not in run or not is_run or not cuts:
            continue
        total += flops[item.op.id]
        rule = item.op.rule
        if rule is None:
            continue
        for i, span in cuts:
            for value, layout in zip(item.results, rule.results, strict=True):
                made = follow(rule, rule.operands[i], span, layout)
                if made is not None:
                    at[value] = made
    return total
