"""From a search to a plan: on one mesh, or in pipeline stages; the number of these, and
the forms of calls (`rhino.choose`), each planned as a whole.

Stages save the time that one mesh spends on collectives over slow links: they send
activations there instead of gradients or weights, and idle while the pipeline fills. Or
they save memory, where one mesh has too little.

Calls are chosen one by one, each alone against the first forms, then the best of each
together: the plans are as many as there are further forms, and two.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from rhino_jax.errors import (
    InfeasiblePlanError,
    PinError,
    StageError,
)
from rhino_jax.hardware.layout import lay_out
from rhino_jax.hardware.target import Target
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.records import Variant
from rhino_jax.plan.stages import IN_ONE_PROGRAM, STAGE_AXIS
from rhino_jax.planner.corrected import corrected_plan
from rhino_jax.planner.cuts import as_requested, best_cut
from rhino_jax.planner.decision import (
    AS_WRITTEN,
    AUTO,
    MIN_GAIN,
    NOT_POSSIBLE,
    Decision,
    noted,
    row_of,
)
from rhino_jax.planner.meshes import candidates, where_pins_hold
from rhino_jax.planner.search.passes import TRACE, Dump
from rhino_jax.planner.staging.plan import plan_stages
from rhino_jax.planner.staging.spmd_pipeline.planned import (
    or_in_one_program,
    plan_in_one_program,
)
from rhino_jax.planner.variant_search import Search
from rhino_jax.units import format_seconds
from rhino_jax.utils.progress import shown


if TYPE_CHECKING:
    from rhino_jax.planner.options import PlanOptions
from rhino_jax.attention.sites import sites_of, usable_forms
from rhino_jax.frontend.forms.calls import reason_of
from rhino_jax.ir.transform import FORMS, chosen


MAX_BATCHES = 8
"""Micro-batches per stage with which a pipeline is filled best: the largest number that
is compared (`planner.staging.cuts.PER_STAGE`)."""

FIRST_COUNT = 8
"""Number of stages that is tried first, where there are more domains than that:
Megatron-LM (Narayanan et al. 2021, table 1) trains 39B parameters in 2, 145B in 8 of
them."""

MIN_UNEVEN = 0.85
"""Ratio of mean to longest busy time of equal submeshes from which on unequal ones are
not tried: 32 equal layers on four submeshes had 0.88."""

Places = tuple[int, ...]
"""For each stage, its number of places along the stage axis."""


def slow_seconds(plan: PlanData, target: Target) -> tuple[float, str]:
    """Return an upper bound on the seconds that a step spends on collectives over other
    than the fastest links, and the name of the slowest of these links; 0 where all
    devices share the fastest."""
    if len(target.tiers) < 2:
        return 0.0, ""
    fast = target.tiers[0].name
    axes = {
        axis.name: {part.tier for part in axis.parts} - {fast}
        for axis in lay_out(target, plan.mesh_axes).axes
    }
    total, names = 0.0, set[str]()
    for collective in plan.collectives:
        slow = set[str]().union(*(axes[name] for name in collective.axes))
        if slow:
            total += collective.seconds
            names |= slow
    order = [tier.name for tier in target.tiers]
    return total, max(names, key=order.index, default="")


def least_step_s(plan: PlanData, flops: float, slow_s: float, stages: int) -> float:
    """Return a lower bound on a step in some number of stages: nothing is sent over
    slow links, nothing is computed twice to avoid that, and the pipeline fills as fast
    as with late weight gradients: in a third of the time of 1F1B (Qi et al. 2023, table
    1).

    Args:
      plan: the plan on one mesh.
      flops: FLOPs of a step of the program.
      slow_s: seconds that the plan spends on slow links.
      stages: the number of stages.
    """
    fill = 1 + (stages - 1) / (3 * MAX_BATCHES * stages)
    compute_s, step_s = plan.predicted.compute_s, plan.predicted.step_time_s
    sent_s = max(0.0, step_s - slow_s - compute_s)
    return (compute_s / times_done(plan, flops) + sent_s) * fill


def times_done(plan: PlanData, flops: float) -> float:
    """Return how many times the devices together compute the FLOPs of a step; more than
    1 where all compute what they would otherwise have to send."""
    done = plan.predicted.flops_per_device * math.prod(n for _, n in plan.mesh_axes)
    return max(1.0, done / flops) if flops else 1.0


def counts_of(target: Target, devices: int, fits: bool) -> list[int]:
    """Return candidate numbers of stages: submeshes of whole domains of the fastest
    links; where one mesh does not fit, small powers of two."""
    domain = target.tiers[0].size if target.tiers else None
    domains = devices // domain if domain else 1
    if domains < 2:
        return [] if fits else [n for n in (2, 4, 8) if devices % n == 0]
    return [n for n in range(2, domains + 1) if domains % n == 0]


def evenness(plan: PlanData) -> tuple[float, int]:
    """Return mean over longest busy time of the submeshes, and the busiest one."""
    assert plan.pipeline is not None
    busy = plan.pipeline.busy_s
    most = max(busy)
    return sum(busy) / (len(busy) * most) if most else 1.0, busy.index(most)


def merged(plan: PlanData, enough_s: float) -> list[Places]:
    """Return unequal submeshes with which a step may take less than `enough_s`: the
    busiest submesh of a plan with equal ones takes a neighbour's devices too.

    With equal busy times, a step by the same schedule would be shorter by that ratio
    (`evenness`): where that is not enough, the list is empty.
    """
    count, (even, at) = plan.num_stages, evenness(plan)
    # TPU collectives run in groups whose size divides the number of all devices.
    if count < 4 or count % 2 or even >= MIN_UNEVEN:
        return []
    if plan.predicted.step_time_s * even >= enough_s:
        return []
    firsts = [i for i in (at - 1, at) if 0 <= i < count - 1]
    return [(1,) * i + (2,) + (1,) * (count - 2 - i) for i in firsts]


def climb(sizes: Decision[Places, PlanData], counts: list[int]) -> None:
    """Try more and fewer stages than at first, as long as steps get shorter; bounds on
    those that are not fast enough, by as much as stages must gain."""
    equal = [(1,) * count for count in counts]
    at = max(i for i, n in enumerate(counts) if n <= max(FIRST_COUNT, counts[0]))
    for after in (equal[at + 1 :], reversed(equal[:at])):
        last = sizes.seconds(equal[at])
        for places in after:
            took = sizes.seconds(places)
            is_bound = places in sizes.left and math.isfinite(took)
            least = (1 - MIN_GAIN) * last if is_bound else last
            if took >= least and math.isfinite(took + last):
                break
            last = took


def with_stages(
    on_one: PlanData | InfeasiblePlanError,
    search: Search,
    plan_in: Callable[[Places, float], PlanData],
) -> PlanData:
    """Return the plan on one mesh, or one in stages that is predicted clearly faster.

    Args:
      on_one: the plan on one mesh, or the error where there is none.
      search: the search of the program.
      plan_in: plans stages of given sizes, with a step shorter than some seconds.
    Raises:
      InfeasiblePlanError: `on_one`, where stages do not help.
    """
    target, enough = search.target, math.inf
    sizes: Decision[Places, PlanData]
    sizes = Decision(lambda of: plan_in(of, enough), NOT_POSSIBLE)
    if isinstance(on_one, InfeasiblePlanError):
        for count in counts_of(target, search.devices, fits=False):
            if sizes.plan((1,) * count) is not None:
                break
        if not sizes.plans:
            raise on_one
        why = "stages were compared, since nothing fits on one mesh"
        others: tuple[Variant, ...] = ()
    else:
        slow_s, tier = slow_seconds(on_one, target)
        flops = search.traced.program.flops_of()
        step_s = on_one.predicted.step_time_s
        enough = (1 - MIN_GAIN) * step_s
        counts = [
            n
            for n in counts_of(target, search.devices, fits=True)
            if least_step_s(on_one, flops, slow_s, n) < enough
        ]
        if not counts:
            return on_one
        climb(sizes, counts)
        why = f"stages were compared: in {format_seconds(step_s)} a step on one mesh"
        if slow_s:
            took = format_seconds(slow_s)
            why += f", collectives over `{tier}` take up to {took}"
        if (times := times_done(on_one, flops)) > 1 + MIN_GAIN:
            why += f", devices do the work {times:.1f} times, to send less"
        others = on_one.variants or (row_of("one mesh", on_one, is_chosen=True),)
    # Unequal submeshes that may be clearly faster than the best equal ones.
    equal, clear_s = [*sizes.plans.values()], math.inf
    if equal:
        clear_s = (1 - MIN_GAIN) * sizes.fastest().predicted.step_time_s
    unequal = (
        (p.predicted.step_time_s * evenness(p)[0], merged(p, clear_s)) for p in equal
    )
    for places in min((way for way in unequal if way[1]), default=(0.0, []))[1]:
        sizes.plan(places)
    in_order = sorted({**sizes.plans, **sizes.left}, key=lambda of: (len(of), of))
    lines = ", ".join(f"{_groups(places)}: {sizes.text(places)}" for places in in_order)
    taken = on_one
    if sizes.plans:
        plan = sizes.fastest()
        if plan.predicted.step_time_s < enough:
            taken = plan
            others = tuple(replace(row, is_chosen=False) for row in others)
        name = f"{plan.num_stages} stages, {plan.microbatches} micro-batches"
        name += ", one program" if plan.is_one_program else ""
        others = (*others, row_of(name, plan, is_chosen=taken is plan))
    assert isinstance(taken, PlanData)
    return noted(replace(taken, variants=others), f"{why} ({lines}).")


def _groups(places: Places) -> str:
    """Return the number of submeshes, or their shares of all devices, as text."""
    is_equal = len({*places}) == 1
    shares = " + ".join(f"{n}/{sum(places)}" for n in places)
    return str(len(places)) if is_equal else f"{len(places)} of {shares}"


def search_for(
    search: Search, places: tuple[int, ...], plan_options: PlanOptions
) -> PlanData:
    """Search on one mesh, in pipeline stages, or both, and report the time of the whole
    comparison.

    Args:
      search: the search of the user's function.
      places: number of places of each stage along the stage axis; a single stage where
        the user gave no number: then more stages are compared where they may be faster.
      plan_options: say where passes are dumped and progress is shown.
    Raises:
      InfeasiblePlanError, MicrobatchError, StageError, ScheduleError.
    """
    started = time.monotonic()
    if plan_options.dump is not None:
        watch = Dump(plan_options.dump, search.what)
        watch(TRACE, search.traced)
        search = search.asking(watch=watch)
    with shown(plan_options.progress) as report:
        plan = in_best_forms(
            search.asking(progress=report), lambda each: _plan(each, places)
        )
    notes, known = plan.notes, search.request.corrections
    asked = search.options.schedule
    if len(places) == 1 and asked != AUTO and plan.num_stages == 1:
        notes += (f"schedule={asked!r} has no effect: the plan has one stage.",)
    if known.programs and not (search.refine == AUTO and plan.refined):
        notes += (
            f"costs are corrected by {known}, from earlier plans of this"
            " program with refine='auto'.",
        )
        plan = replace(plan, corrections=known)
    # The chosen variant was compared by the step time and peak of a brief search.
    variants = tuple(
        row_of(v.name, plan, is_chosen=True) if v.is_chosen else v
        for v in plan.variants
    )
    report_of = replace(plan.search, seconds=time.monotonic() - started)
    return replace(plan, search=report_of, notes=notes, variants=variants)


def _plan(search: Search, places: tuple[int, ...]) -> PlanData:
    asked = search.options
    if len(places) > 1:
        if search.storage and search.storage != AS_WRITTEN:
            raise StageError(
                "several stages store no fused weights in blocks.",
                where="`storage=` and `stages=`",
                numbers=f"{len(places)} stages",
                fix=f"plan with storage={AS_WRITTEN!r}, or with stages=1.",
            )
        try:
            return _in_stages(search, places)
        except (StageError, PinError, InfeasiblePlanError) as error:
            if not search.kept:
                raise
            why = error.what.rstrip(".")
        # Another plan's cuts are not possible any more.
        return noted(
            _in_stages(replace(search, kept={}), places),
            "split into stages again, since the earlier stages are not possible:"
            f" {why}.",
        )
    if asked.schedule == IN_ONE_PROGRAM:
        raise StageError(
            f"{search.what}: schedule={IN_ONE_PROGRAM!r} is of several"
            " stages, and nobody said how many.",
            where="`schedule=` and `stages=`",
            numbers="one stage",
            fix=f"give stages=2, say, or a mesh with an axis `{STAGE_AXIS}`.",
        )
    may_have_stages = (
        asked.stages == AUTO
        and search.mesh is None
        and search.storage == AS_WRITTEN
        and asked.microbatches != 1
        and not search.refine
    )
    if search.refine == AUTO:
        return corrected_plan(search, best_cut)
    if not may_have_stages:
        return best_cut(search)
    on_one: PlanData | InfeasiblePlanError
    try:
        on_one = best_cut(search)
    except InfeasiblePlanError as error:
        # Stages cannot lower the evenly divided peak.
        if (error.divided_peak_bytes or 0) > search.request.memory_budget_bytes:
            raise
        on_one = error

    def plan_in(groups: tuple[int, ...], enough_s: float) -> PlanData:
        every = candidates(search.traced, search.target, search.devices, groups)
        own, pins = where_pins_hold(every, search.pinned, search.traced.program)
        more = search.asking(
            pins=pins.inputs, output_pins=pins.outputs, value_pins=pins.values
        )
        return _in_stages(replace(more, meshes=own, enough_s=enough_s), groups)

    return with_stages(on_one, search, plan_in)


def _in_stages(search: Search, places: tuple[int, ...]) -> PlanData:
    search, asked = as_requested(search), search.options
    if asked.schedule == IN_ONE_PROGRAM:
        for key, stage in search.stage_pins.items():
            raise PinError(
                f"pin {key!r}: stages of one program have equal parts of every loop"
                " over layers, and share the rest.",
                where=repr(key),
                numbers=f"pinned to stage {stage}",
                fix="drop the pin, or take another schedule, as schedule='1f1b'.",
            )
        return plan_in_one_program(search, places)
    is_free = asked.schedule == AUTO and not search.stage_pins and not search.kept
    if not is_free or {*places} != {1}:
        return plan_stages(search, places)
    as_tasks: PlanData | InfeasiblePlanError
    try:
        as_tasks = plan_stages(search, places)
    except InfeasiblePlanError as error:
        as_tasks = error
    return or_in_one_program(as_tasks, search, places)


MAX_PLANS = 16
"""Maximum number of programs that are planned to choose forms."""

Choice = tuple[tuple[str, str], ...]
"""(key of a call site, form) of every call site."""


def in_best_forms(search: Search, plan: Callable[[Search], PlanData]) -> PlanData:
    """Return the plan with the forms whose step is predicted shortest.

    The first forms stay where others gain less than `MIN_GAIN` together.

    Args:
      search: the search of the user's program.
      plan: plans a search.
    Raises:
      TraceError: a call has no form that runs on the hardware.
      PinError: a pinned form does not run there.
      Exception: of the first forms, where no choice can be planned.
    """
    pins, target = search.form_pins, search.target
    hardware = target.name, target.device.platform
    is_free = search.options.attention == AUTO
    calls = [
        (site, *usable_forms(site, *hardware, pins.get(site.key), search.what))
        for site in sites_of(
            search.traced.forms, pins, hardware[1] if is_free else None
        )
        if is_free or site.first != AS_WRITTEN or site.key in pins
    ]
    calls = [call for call in calls if {call[0].first, *call[1]} != {AS_WRITTEN}]
    if not calls:
        return plan(search)
    first = tuple((site.key, usable[0]) for site, usable, _ in calls)

    def make(choice: Choice) -> PlanData:
        others = {
            site.key: form
            for (site, *_), (_, form) in zip(calls, choice, strict=True)
            if form != site.first
        }
        return plan(search.after([chosen(FORMS, others)]) if others else search)

    deadline = search.request.deadline
    decision = Decision(make, (Exception,), deadline=deadline, most=MAX_PLANS)
    _planned(decision, first)
    best = dict(first)
    for site, usable, _ in calls:
        key = site.key
        tried = {form: _with(first, key, form) for form in usable}
        for choice in tried.values():
            _planned(decision, choice)
        best[key] = min(tried, key=lambda form: _rank(decision, tried[form]))
    _planned(decision, tuple(best.items()))
    if not decision.plans:
        raise decision.left[first]
    found = decision.taken()
    (taken,) = (choice for choice, one in decision.plans.items() if one is found)
    # What each other form would have cost.
    notes: list[str] = []
    names: list[str] = []
    rows: list[Variant] = []
    for (site, usable, left), (key, form) in zip(calls, taken, strict=True):
        place, told = str(site.source), []
        for other in usable:
            choice = _with(first, key, other)
            if (one := decision.plans.get(choice)) is not None:
                told.append(f"{other} {decision.text(choice)}")
                if other != form:
                    rows.append(row_of(f"{place} as {other}", one))
            elif (error := decision.left.get(choice)) is not None:
                told.append(f"{other}: {reason_of(error)}")
            else:
                told.append(f"{other}: not planned, for lack of time")
        if site.first != AS_WRITTEN:
            told += [f"{other}: {why}" for other, why in left.items()]
        names.append(f"{place} as {form}")
        notes.append(f"{place} runs as {form!r} ({'; '.join(told)}).")
    own = found.variants
    if rows and not own:
        own = (row_of(", ".join(names), found, is_chosen=True),)
    return replace(noted(found, *notes), variants=(*own, *rows))


def _planned(decision: Decision[Choice, PlanData], choice: Choice) -> None:
    """Plan a choice; of the plans so far, only the fastest keeps its problem, which is
    large."""
    decision.plan(choice)
    best = decision.best
    for other, plan in decision.plans.items():
        if other != best and plan.origin is not None:
            decision.plans[other] = replace(plan, origin=None)


def _with(choice: Choice, key: str, form: str) -> Choice:
    return tuple((k, form if k == key else f) for k, f in choice)


def _rank(decision: Decision[Choice, PlanData], choice: Choice) -> tuple[float, float]:
    """Return seconds and peak, to compare choices of which none may fit."""
    if choice in decision.plans:
        return decision.seconds(choice), 0.0
    peak = getattr(decision.left.get(choice), "smallest_peak_bytes", None)
    return math.inf, math.inf if peak is None else peak
