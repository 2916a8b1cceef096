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
    ScheduleError,
    StageError,
)
from rhino_jax.ir.program import Program
from rhino_jax.passes.staged.stacks import LayerStack, Unstacked
from rhino_jax.passes.unroll import MAX_TRIPS, has_pairs
from rhino_jax.pipeline.of_plan import idle_stages
from rhino_jax.pipeline.schedules.family import FAMILIES
from rhino_jax.pipeline.schedules.sequence_slices import FEW, TOKEN_SLICES, slices_in
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.pipeline.work import FORWARD_ONLY, work_of
from rhino_jax.plan.plan import PlanData
from rhino_jax.planner.decision import (
    MIN_GAIN,
    NOT_POSSIBLE,
    Decision,
    NotFaster,
    noted,
    step_s_of,
)
from rhino_jax.planner.meshes import AUTO, MeshAxes
from rhino_jax.planner.staging import schedules
from rhino_jax.planner.staging.cuts import (
    CutStep,
    StagingRequest,
    add_fewer,
    candidates_of,
    counts_of,
    cuts_of,
    worth_comparing,
)
from rhino_jax.planner.staging.fitted import fit_stages
from rhino_jax.planner.staging.loops import all_layers, forms_of
from rhino_jax.planner.variant_search import Search
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
def plan_stages(search: Search, shares: tuple[int, ...]) -> PlanData:
    """Return the plan of a step in some number of stages.

    Args:
      search: the search of the user's step.
      shares: number of places of each submesh along the stage axis.
    Raises:
      StageError, MicrobatchError, InfeasiblePlanError, ScheduleError, PinError.
      NotFaster: no step is short enough.
    """
    started = time.monotonic()
    options = search.options
    schedule, slices = slices_in(options.schedule)
    if schedule not in (AUTO, *schedules.RUN, FORWARD_ONLY):
        raise ScheduleError(
            f"stages do not run by the schedule {schedule!r}.",
            where="`schedule=`",
            numbers=f"run: {', '.join(schedules.RUN)}",
            fix='take one of these, or "auto".',
        )
    traced = search.running
    if hosted := [e for e in traced.program.inputs if traced.program.is_on_host(e)]:
        raise StageError(
            "arguments are in the host's memory, which stages do not move them from.",
            where=hosted[0].path,
            numbers=f"{len(hosted)} arrays",
            fix="leave them on the devices, or plan with stages=1.",
        )
    split = partial(Unstacked.of, traced.closed_jaxpr, traced.program)
    copies_stacks = search.target.device.copies_stacks
    may_unroll = options.loops == AUTO and copies_stacks and has_pairs(traced.program)
    search = search.asking(progress=None)  # Stages are searched one by one.
    if may_unroll:  # Unrolled, a step may be short enough that is not in loops.
        search = replace(search, enough_s=math.inf)
    if schedules.has_several(schedule):
        search = replace(search, kept={})
    whole = StagingRequest(search, split(()), shares, schedule, started, slices)
    for layers in all_layers(whole) if min(shares) > 1 else ():
        if layers.length % sum(shares) == 0:  # Whole because of the submeshes' sizes.
            raise StageError(
                "layers are in one loop, and every group of devices is several times"
                " what all sizes divide by: stacks of weights lie in equal parts of"
                " that size.",
                where=traced.program.inputs[min(layers.slots)].path,
                numbers="groups of " + " + ".join(map(str, shares)) + " such parts",
                fix="let the smallest group be of the size that the others divide by,"
                " as in [4, 2, 2], or write layers one by one.",
            )
    count, rounds = options.microbatches, [[options.microbatches]]
    if count == AUTO:
        rows = whole.batch.rows
        rounds = [*counts_of(rows, len(shares))] if rows > 1 else [[1]]
        if rows > 1 and schedule == TOKEN_SLICES:
            rounds = [[n for n in FEW if rows % n == 0]]
    check_least(whole, rounds[0][0])
    all_forms, meshes = forms_of(whole, rounds)
    # Splits whose parts are on the same stages as in another plan, if there are any.
    reused, earlier = list[tuple[LayerStack, ...]](), search.kept
    for form in all_forms:
        count_of = {i: len(stack.sizes) for stack in form for i in stack.slots}
        if all(count_of.get(i, 1) == n for i, (_, n) in earlier.items()):
            firsts = ({earlier[i][0] for i in s.slots & earlier.keys()} for s in form)
            pairs = zip(form, firsts, strict=True)
            reused.append(
                tuple(replace(s, first=min(at)) if at else s for s, at in pairs)
            )
    forms = reused or all_forms
    if any(forms) and schedules.has_several(schedule):
        stack = next(iter(form for form in forms if form))[0]
        raise StageError(
            f"{schedule!r} runs several chunks in every stage, and layers are in one"
            " loop: a stack of weights lies over stages in a row, one part on each.",
            where=traced.program.inputs[min(stack.slots)].path,
            numbers=f"{len(stack.sizes)} parts of {stack.sizes[0]} layers",
            fix='write layers one by one, or take "1f1b" or "zero-bubble".',
        )
    asked = [replace(whole, of_step=split(form)) if form else whole for form in forms]
    try:
        plan = _fastest(asked, whole, meshes, rounds, may_be_fewer=count == AUTO)
    except ScheduleError as error:
        if schedule != AUTO or rounds != [[1]]:
            raise
        raise whole.one_micro_batch(error) from None
    if may_unroll:
        plan = _or_unrolled(plan, whole, meshes)
    has_loops = any(leaf.num_stages > 1 for leaf in plan.inputs)
    return noted(plan, *_idle(plan, has_loops=has_loops))


def _or_unrolled(
    plan: PlanData, whole: StagingRequest, meshes: Sequence[MeshAxes]
) -> PlanData:
    """Return a plan, or that of the same step with loops over layers unrolled in every
    stage, where that is predicted clearly faster.

    Args:
      plan: the plan of the step in loops; `whole`: the step with whole loops.
      meshes: candidate meshes.
    """
    step = plan.origin.of_step.unrolled(MAX_TRIPS)
    unrolled = replace(whole, of_step=step)

    def make(is_unrolled: bool) -> PlanData:
        if not is_unrolled:
            return plan
        return _fastest([unrolled], unrolled, meshes, [[plan.microbatches]])

    tried = Decision(make, NOT_POSSIBLE)
    texts = [tried.text(is_unrolled) for is_unrolled in (False, True)]
    if (found := tried.taken()) is plan:
        return plan
    return noted(
        found,
        f"loops over layers are unrolled in every stage: {texts[1]} a step,"
        f" {texts[0]} in loops.",
    )


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
    Raises:
      InfeasiblePlanError: not all submeshes fit with any of them.
    """

    def best_of(counts: tuple[int, ...]) -> PlanData:
        cuts, schedule = _cuts(forms, whole, meshes, counts), whole.schedule
        if may_be_fewer and counts == tuple(rounds[0]):
            add_fewer(cuts, min(counts))
        every = candidates_of(cuts, schedule)

        def fitted(candidate: schedules.EstimatedSchedule) -> PlanData:
            plan = fit_stages(cuts[candidate.cut], candidate)
            if schedule != AUTO or not cuts[candidate.cut].has_backward:
                return plan
            assert plan.pipeline is not None
            # Another schedule than 1F1B, with one chunk per submesh, has to be faster
            # than the default when the costs of tasks are known, too.
            if not (
                plan.pipeline.schedule in schedules.WHOLE or plan.pipeline.group_of
            ):
                work, step_s = work_of(plan.pipeline), step_s_of(plan)
                usual = FAMILIES[schedules.usual(work)].build(work)
                if step_s >= (1 - MIN_GAIN) * simulate(usual).step_time_s:
                    raise NotFaster(step_s)
            by_name: dict[str, schedules.EstimatedSchedule] = {}
            for c in sorted(every, key=lambda c: (not c.fits, c.step_time_s)):
                by_name.setdefault(c.name, c)
            texts = (
                f"{name} {format_seconds(c.step_time_s)}"
                f" (m = {cuts[c.cut].work.micro_batches}"
                f"{'' if c.fits else ', does not fit'})"
                for name, c in by_name.items()
            )
            return noted(
                plan,
                f"schedules by estimated step: {', '.join(texts)}; taken:"
                f" {plan.schedule}.",
            )

        # More micro-batches, or fewer in flight, need less memory.
        tried = Decision(fitted, (InfeasiblePlanError, ScheduleError))
        # For "auto" the best of all, then the default of every cut, which holds least.
        shortlist = every[:1] + [c for c in every if c.is_usual]
        for candidate in every if schedule != AUTO else dict.fromkeys(shortlist):
            if (best := tried.best) is None or _may_be_faster(
                cuts[candidate.cut], candidate, best, tried.plans[best]
            ):
                tried.plan(candidate)
        return tried.fastest()

    tried = Decision(best_of, (InfeasiblePlanError,))
    for counts in rounds:
        plan = tried.plan(tuple(counts))
        if plan is not None and not _is_recomputed(plan):
            break
    return tried.fastest()


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
            except NOT_POSSIBLE:
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


def _may_be_faster(
    cut_step: CutStep,
    candidate: schedules.EstimatedSchedule,
    planned: schedules.EstimatedSchedule,
    plan: PlanData,
) -> bool:
    """Whether a schedule may be faster than a plan by another one.

    It may if that one recomputes; or if this one, which does not fit otherwise,
    recomputes. Or if it fits, and that one's backward passes are split, which saves all
    stacked residuals: if these were not written and read. Estimates are compared with
    each other, since they are off by about the same: a plan fuses what they add up.
    """
    own_s = candidate.step_time_s
    if not _is_recomputed(plan):
        own_s = candidate.recomputed_s
    if own_s < planned.step_time_s:
        return True
    asked, work = cut_step.asked, cut_step.work
    program, device = asked.of_step.program, asked.search.target.device
    has_loops = any(program.ops[op].name == "scan" for op in program.body.ops)
    if (
        candidate.is_split
        or not planned.is_split
        or not (asked.search.options.may_recompute and has_loops)
    ):
        return False
    per_s = device.hbm_bytes_per_s * device.memory_efficiency
    left = max(c.costs[0].activation_bytes for c in work.chunks)
    gain_s = work.micro_batches * device.stack_passes * left / per_s
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
