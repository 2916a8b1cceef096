"""The plan of several stages.

A step that needs more memory than all devices have, even with nothing replicated, is
refused before any of the many searches (`check_least`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from rhino_jax.errors import (
    InfeasiblePlanError,
    PinError,
    ScheduleError,
    StageError,
)
from rhino_jax.ir.program import Program
from rhino_jax.passes.staged.stacks import LayerStack, Unstacked
from rhino_jax.passes.unroll import MAX_TRIPS, has_pairs
from rhino_jax.pipeline.of_plan import idle_stages
from rhino_jax.pipeline.schedules.sequence_slices import FEW, TOKEN_SLICES, slices_in
from rhino_jax.plan.plan import PlanData
from rhino_jax.planner.decision import Decision, NotFaster
from rhino_jax.planner.meshes import AUTO, MeshAxes
from rhino_jax.planner.staging import schedules
from rhino_jax.planner.staging.cuts import (
    CutStep,
    StagingRequest,
    candidates_of,
    counts_of,
    cuts_of,
    one_micro_batch,
    with_fewer,
    worth_comparing,
)
from rhino_jax.planner.staging.fitted import fit_stages
from rhino_jax.planner.staging.loops import all_layers, forms_of, reusing
from rhino_jax.planner.variant_search import MIN_GAIN, Search
from rhino_jax.units import format_bytes, format_seconds
from rhino_jax.utils.gc import no_garbage_collection


MAX_FORMS = 2
"""Maximum number of loop splits that are compared in all numbers of micro-batches."""


def check_least(asked: StagingRequest, micro_batches: int) -> None:
    """Refuse a step whose arguments and accumulated gradients exceed the memory of all
    devices. Both are live while micro-batches run.

    Args:
      asked: the step to plan.
      micro_batches: any number of micro-batches.
    Raises:
      InfeasiblePlanError: no stages have room for it.
      MicrobatchError: the batch cannot be split so.
    """
    program, search = asked.of_step.program, asked.search
    devices = search.devices
    budget = search.request.memory_budget_bytes
    arguments = _arguments(program)
    held = sum(arguments.values())
    # Accumulated gradients are as large as their parameters, and hardly larger.
    if 2 * held <= budget * devices:
        return
    apart = asked.apart(micro_batches)
    sums = [apart.sum_type(k) for k in range(len(apart.leaving))]
    summed = sum(x.size * x.dtype.itemsize for x in sums)
    needed = held + summed
    if needed <= budget * devices:
        return
    each, groups = math.ceil(needed / devices), len(asked.shares)
    least = search.request.budget_for(each)
    largest = max(arguments, key=lambda path: arguments[path])
    raise InfeasiblePlanError(
        f"`{program.name}` fits in no {groups} stages: at least one of them needs"
        f" {format_bytes(each)} on each of its devices, wherever it is cut.",
        where=f"{search.request.budget_text}; largest argument"
        f" {largest}, {format_bytes(arguments[largest])}",
        numbers=f"{format_bytes(held)} of arguments and {format_bytes(summed)} of sums"
        f" over micro-batches, of which {devices} devices hold"
        f" {format_bytes(int(budget) * devices)}",
        fix=f"take {math.ceil(needed / budget)} devices or more, or raise"
        f" memory_budget_bytes to {least} ({format_bytes(least)}), and beyond that for"
        " activations; more micro-batches or stages do not help.",
    )


def _arguments(program: Program) -> dict[str, int]:
    """Return path → bytes of the arguments that the step reads or returns."""
    read = {v for op in program.body.ops for v in program.ops[op].operands}
    read |= {*program.body.outputs}
    return {
        entry.path: program.values[entry.value].bytes
        for entry in program.inputs
        if entry.value in read
    }


@no_garbage_collection()
def plan_stages(
    search: Search, shares: tuple[int, ...], enough_s: float = math.inf
) -> PlanData:
    """Return the plan of a step in some number of stages.

    Args:
      search: the search of the user's step.
      shares: number of places of each submesh along the stage axis.
      enough_s: seconds that the step has to be shorter than.
    Raises:
      StageError, MicrobatchError, InfeasiblePlanError, ScheduleError, PinError.
      NotFaster: no step is short enough.
    """
    started = time.monotonic()
    options = search.options
    schedule, slices = slices_in(options.schedule)
    schedules.check_runs(schedule)
    traced = search.running
    split = partial(Unstacked.of, traced.closed_jaxpr, traced.program)
    copies_stacks = search.target.device.copies_stacks
    may_unroll = options.loops == AUTO and copies_stacks and has_pairs(traced.program)
    if schedules.has_several(schedule):
        search = replace(search, kept={})
    whole = StagingRequest(
        search,
        split(()),
        shares,
        schedule,
        started,
        slices,
        # Unrolled, a step may be short enough that is not in loops.
        enough_s=math.inf if may_unroll else enough_s,
    )
    if min(shares) > 1:
        _check_group_of_one(whole)
    rounds = _counts(whole)
    check_least(whole, rounds[0][0])
    all_forms, meshes = forms_of(whole, rounds)
    forms = reusing(all_forms, search.kept)
    if any(forms) and schedules.has_several(schedule):
        raise _stacks_are_whole(traced.program, forms, schedule)
    asked = [replace(whole, of_step=split(form)) if form else whole for form in forms]
    try:
        is_free = options.microbatches == AUTO
        plan = _fastest(asked, whole, meshes, rounds, may_be_fewer=is_free)
    except ScheduleError as error:
        if schedule != AUTO or rounds != [[1]]:
            raise
        name, rows = traced.program.name, whole.batch.rows
        raise one_micro_batch(name, len(shares), rows, error) from None
    if may_unroll:
        plan = _or_unrolled(plan, whole, meshes)
    has_loops = any(leaf.num_stages > 1 for leaf in plan.inputs)
    return replace(plan, notes=(*plan.notes, *_idle(plan, has_loops=has_loops)))


def _or_unrolled(
    plan: PlanData, whole: StagingRequest, meshes: Sequence[MeshAxes]
) -> PlanData:
    """Return a plan, or that of the same step with loops over layers unrolled in every
    stage, where that is predicted clearly faster.

    Args:
      plan: the plan of the step in loops; `whole`: the step with whole loops.
      meshes: candidate meshes.
    """
    step, counts = plan.origin.of_step.unrolled(MAX_TRIPS), [[plan.microbatches]]
    unrolled = replace(whole, of_step=step)
    try:
        found = _fastest([unrolled], unrolled, meshes, counts)
    except (StageError, PinError, ScheduleError, InfeasiblePlanError):
        return plan
    if _seconds(found) >= (1 - MIN_GAIN) * _seconds(plan):
        return plan
    said = (
        "loops over layers are unrolled in every stage:"
        f" {format_seconds(_seconds(found))} a step,"
        f" {format_seconds(_seconds(plan))} in loops."
    )
    return replace(found, notes=(*found.notes, said))


def _idle(plan: PlanData, *, has_loops: bool) -> Iterator[str]:
    """Yield a note on stages that have almost no work."""
    idle = [] if plan.pipeline is None else idle_stages(plan.pipeline)
    if plan.pipeline is None or not idle:
        return
    rates = [hop.bytes_per_s for hop in plan.pipeline.hops]
    why = (
        "a loop over layers is cut into equal parts, one on each of some stages in a"
        " row; layers written one by one are cut anywhere."
        if has_loops or not rates
        else f"at {format_bytes(min(rates))}/s from a device to the next stage, what"
        " would cross takes longer than the work that it would take over; fewer stages,"
        " more micro-batches or the axis `stage` over faster links."
    )
    yield f"almost nothing to do for stage {', '.join(map(str, idle))}: {why}"


def _fastest(
    forms: Sequence[StagingRequest],
    whole: StagingRequest,
    meshes: Sequence[MeshAxes],
    rounds: Sequence[Sequence[int]],
    *,
    may_be_fewer: bool = False,
) -> PlanData:
    """Return the fastest plan over the candidate numbers of micro-batches.

    Args:
      forms: the step, with its loops split in several ways.
      whole: the step with whole loops, to be tried where none of these can be cut.
      meshes: candidate meshes for the first number of micro-batches.
      rounds: numbers of micro-batches, each list for where none of those before fits.
      may_be_fewer: whether fewer than those of the first list may be taken.
    """

    def best_of(i: int) -> PlanData:
        fewer = may_be_fewer and not i
        return _best_of(forms, whole, meshes, rounds[i], may_be_fewer=fewer)

    tried = Decision(best_of, (InfeasiblePlanError,))
    for i in range(len(rounds)):
        plan = tried.plan(i)
        if plan is not None and not _is_recomputed(plan):
            break
    return tried.fastest()


def _counts(asked: StagingRequest) -> list[list[int]]:
    """Return the candidate numbers of micro-batches; see `counts_of`."""
    count = asked.search.options.microbatches
    most = asked.batch.rows if count == AUTO else count
    if count != AUTO or most == 1:
        return [[most]]
    if asked.schedule == TOKEN_SLICES:
        return [[n for n in FEW if most % n == 0]]
    return [*counts_of(most, len(asked.shares))]


def _cuts(
    forms: Sequence[StagingRequest],
    whole: StagingRequest,
    meshes: Sequence[MeshAxes],
    counts: Sequence[int],
) -> list[CutStep]:
    """Cut the step for all numbers of micro-batches; with its loops split in all ways
    for the first of them, and in the best few for the others.

    Raises:
      StageError, InfeasiblePlanError, PinError: no way to split loops agrees with the
        order of stages.
      NotFaster: no number of micro-batches is fast enough.
    """
    slower: list[NotFaster] = []
    found: list[CutStep] = []
    for count in counts:
        took: list[tuple[float, int]] = []
        for k, asked in enumerate((*forms, whole)):
            is_last = k == len(forms)
            if is_last and took:
                break
            try:
                cuts = cuts_of(asked, meshes, count)
            except NotFaster as refused:
                slower.append(refused)
                break
            except (StageError, InfeasiblePlanError, PinError):
                # Parts may contradict the order of stages: where one loop follows
                # another, or where a whole stack is pinned.
                if is_last:
                    raise
                continue
            meshes = worth_comparing(cuts[-1].shapes, cuts[-1].apart, max(counts))
            found += cuts
            took.append((min(c.chosen.step_time_s for c in cuts), k))
        if took:
            forms = [(*forms, whole)[k] for _, k in sorted(took)[:MAX_FORMS]]
    if not found:
        raise min(slower, key=lambda refused: refused.step_s)
    return found


def _best_of(
    forms: Sequence[StagingRequest],
    whole: StagingRequest,
    meshes: Sequence[MeshAxes],
    counts: Sequence[int],
    *,
    may_be_fewer: bool = False,
) -> PlanData:
    """Return the best plan over some numbers of micro-batches.

    Raises:
      InfeasiblePlanError: not all submeshes fit with any of them.
    """
    cuts, schedule = _cuts(forms, whole, meshes, counts), whole.schedule
    if may_be_fewer:
        cuts += with_fewer(cuts, min(counts))
    every = candidates_of(cuts, schedule)

    def fitted(candidate: schedules.EstimatedSchedule) -> PlanData:
        plan = fit_stages(cuts[candidate.cut], candidate)
        if schedule != AUTO or not cuts[candidate.cut].has_backward:
            return plan
        assert plan.pipeline is not None
        if not schedules.is_worth_it(plan.pipeline, _seconds(plan)):
            raise NotFaster(_seconds(plan))
        said = schedules.note_on(every, [c.work for c in cuts], plan.schedule)
        return replace(plan, notes=(*plan.notes, said))

    # More micro-batches, or fewer in flight, need less memory.
    tried = Decision(fitted, (InfeasiblePlanError, ScheduleError))
    for candidate in schedules.shortlist(every, schedule):
        best = tried.best
        if (
            best is None
            or _may_be_faster(tried.plans[best], best, candidate)
            or _may_be_recomputed(cuts[candidate.cut], candidate, best)
        ):
            tried.plan(candidate)
    return tried.fastest()


def _may_be_faster(
    plan: PlanData,
    planned: schedules.EstimatedSchedule,
    candidate: schedules.EstimatedSchedule,
) -> bool:
    """Whether a schedule may be faster than a plan by another one: if that one
    recomputes; or if this one, which does not fit otherwise, recomputes. Estimates are
    compared with each other, since they are off by about the same: a plan fuses what
    they add up."""
    if _is_recomputed(plan):
        return candidate.step_time_s < planned.step_time_s
    return candidate.recomputed_s < planned.step_time_s


def _may_be_recomputed(
    cut_step: CutStep,
    candidate: schedules.EstimatedSchedule,
    planned: schedules.EstimatedSchedule,
) -> bool:
    """Whether a schedule that fits may be faster than one with split backward passes,
    which saves all stacked residuals: if these were not written and read."""
    asked = cut_step.asked
    program = asked.of_step.program
    has_loops = any(program.ops[op].name == "scan" for op in program.body.ops)
    if (
        candidate.is_split
        or not planned.is_split
        or not (asked.search.options.may_recompute and has_loops)
    ):
        return False
    device = asked.search.target.device
    per_s = device.hbm_bytes_per_s * device.memory_efficiency
    left = max(c.costs[0].activation_bytes for c in cut_step.work.chunks)
    gain_s = cut_step.work.micro_batches * device.stack_passes * left / per_s
    return candidate.step_time_s - gain_s < (1 - MIN_GAIN) * planned.step_time_s


def _is_recomputed(plan: PlanData) -> bool:
    """Whether saving all residuals might be faster; not where values are recomputed
    because that is faster."""
    pipeline = plan.pipeline
    assert pipeline is not None
    busy = zip(pipeline.remat, pipeline.busy_s, strict=False)
    gains = (
        made.added_s * pipeline.micro_batches < -MIN_GAIN * seconds
        for made, seconds in busy
        if made.choice
    )
    return bool(pipeline.recomputed) or not all(gains)


def _seconds(plan: PlanData) -> float:
    return plan.predicted.step_time_s


def _stacks_are_whole(
    program: Program, forms: Sequence[tuple[LayerStack, ...]], schedule: str
) -> StageError:
    stack = next(iter(form for form in forms if form))[0]
    return StageError(
        f"{schedule!r} runs several chunks in every stage, and layers are in one loop:"
        " a stack of weights lies over stages in a row, one part on each.",
        where=program.inputs[min(stack.slots)].path,
        numbers=f"{len(stack.sizes)} parts of {stack.sizes[0]} layers",
        fix='write layers one by one, or take "1f1b" or "zero-bubble".',
    )


def _check_group_of_one(asked: StagingRequest) -> None:
    """Refuse submeshes that prevent loops from being split.

    Raises:
      StageError: loops are whole only because of the sizes of the submeshes.
    """
    program, shares = asked.of_step.program, asked.shares
    for layers in all_layers(asked):
        if layers.length % sum(shares):
            continue
        raise StageError(
            "layers are in one loop, and every group of devices is several times what"
            " all sizes divide by: stacks of weights lie in equal parts of that size.",
            where=program.inputs[min(layers.slots)].path,
            numbers="groups of " + " + ".join(map(str, shares)) + " such parts",
            fix="let the smallest group be of the size that the others divide by, as in"
            " [4, 2, 2], or write layers one by one.",
        )
