"""Plans whose costs are corrected by their own compiled programs: `refine="auto"`.

The plan is compiled, the compute of every op and the exposed communication are compared
with their estimates, these are corrected, and the program is planned again; until the
plan is one that was compiled, or is expected to gain less than `MIN_EXPECTED_GAIN` over
the fastest of these at the same costs. The fastest that was compiled and fits is the
answer.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rhino_jax.cost.corrections import (
    NO_CORRECTIONS,
    CostCorrections,
    CostFactors,
    OpKey,
    OpTimes,
    op_key,
)
from rhino_jax.errors import HardwareError, InfeasiblePlanError
from rhino_jax.model.build import sharding_of
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.records import CUT_BY_CLOCK
from rhino_jax.planner.decision import noted
from rhino_jax.planner.experts import all_recipes
from rhino_jax.planner.search.found import SearchResult, repriced
from rhino_jax.planner.search.records import PlanCandidate
from rhino_jax.planner.variant_search import Search, Solved, VariantCandidate
from rhino_jax.units import format_seconds
from rhino_jax.verify.hlo.records import Reading
from rhino_jax.verify.matching.division import op_times
from rhino_jax.verify.refine import (
    COMPILER_ERRORS,
    PlanProgram,
    Seen,
    compiled_candidate,
    failure_note,
    fastest_of,
    programs_of,
    tighter_budget,
)


MAX_COMPILED = 2
"""Programs that are compiled at most."""

MIN_EXPECTED_GAIN = 0.01
"""Share of the step of the fastest compiled plan, predicted with the same corrections,
that another must be expected to gain to be compiled."""

_SMALL = 1e-3
"""Share of a step that is added to estimated and compiled seconds of an op before they
are compared: smaller ops decide nothing, and their errors are not trusted. Ten times
as much for communication, of which collectives start and end at other ops' seconds."""

_LIMITS = 0.1, 10.0
"""Smallest and largest correction of an op, or of communication."""


_ROUNDS = 4
"""Rounds in which all factors are scaled to the compiled compute within limits."""


def corrected_plan(search: Search, plan_by: Callable[[Search], PlanData]) -> PlanData:
    """Return the fastest compiled plan, planned with corrected costs.

    Args:
      search: the search; its request has the corrections that are known already.
      plan_by: plans a search, with all choices of passes and meshes; the plan's
        `origin` is its `Solved`.
    Raises:
      InfeasiblePlanError: nothing fits.
    """
    search, budget = replace(search, refine=0), search.request.whole_budget_bytes
    program_of = programs_of(search.traced, search.what, search.target)
    seen, own, notes = Seen(), list[CostCorrections](), list[str]()
    plan = first = plan_by(search)
    while True:
        known = search.request.corrections
        name = f"corrected by {known}" if known.programs else "as estimated"
        candidate = search.placed(PlanCandidate(name, plan))
        try:
            program = program_of(candidate.plan)
        except HardwareError as error:
            notes.append(f"refine='auto' compiled nothing: {error.what}")
            break
        except COMPILER_ERRORS as error:
            notes.append(failure_note(f"the plan {candidate.name}", error))
            break
        if program.is_cached:
            break
        figures = compiled_candidate(candidate, program.reading, budget)
        seen.append((candidate, figures))
        own.append(NO_CORRECTIONS)
        if math.isfinite(figures.compiled_s):
            own[-1] = measured(plan.origin.found, plan, program)
            search = search.asking(corrections=known.and_of(own[-1]))
        if len(seen) == MAX_COMPILED:
            break
        if time.monotonic() > search.request.deadline:
            notes.append(f"{CUT_BY_CLOCK} was over when one plan was compiled.")
            break
        asked = search
        if not figures.is_fitting:
            asked = search.asking(memory_budget_bytes=tighter_budget(seen, budget))
        try:
            plan = plan_by(asked)
        except InfeasiblePlanError:
            break
        fitting = [x for x in seen if x[1].is_fitting]
        now_s = math.inf
        if fitting:  # The step of the fastest, with the search's corrections.
            best, figures = min(fitting, key=lambda x: x[1].compiled_s)
            found = repriced(best.plan.origin.found, asked.request)
            now_s = figures.compiled_s if found is None else found.step_s
        if plan.predicted.step_time_s > (1 - MIN_EXPECTED_GAIN) * now_s:
            break
    if not seen:
        return noted(first, *notes)
    best, more = fastest_of(seen)
    (compiled, mine), *_ = (
        (figures, known)
        for (candidate, figures), known in zip(seen, own, strict=True)
        if candidate is best
    )
    # The plan that is taken is predicted as it compiled.
    known = mine.preferred_to(search.request.corrections)
    before, after = (_repriced(best.plan.origin, c) for c in (NO_CORRECTIONS, known))
    # Where options differ, the plan is predicted as it was planned.
    plan, without = replace(best.plan, corrections=known), ""
    if before is not None:
        without = f" was predicted at {format_seconds(before.found.step_s)} before, and"
    if after is not None:
        made = after.search.plan(after.found)
        changed = ("predicted", "collectives", "search", "line_times", "timeline")
        plan = replace(
            plan,
            **{name: getattr(made, name) for name in (*changed, "stages")},
            lines={**plan.lines, **made.lines},
            recipes=all_recipes(after.recipes),
            origin=after,
        )
    step = format_seconds(plan.predicted.step_time_s)
    note = (
        f"costs are corrected by {known}: the step{without} is {step} now. It compiles"
        f" to {format_seconds(compiled.compiled_s)}."
    )
    return replace(
        plan,
        memory_budget_bytes=budget,
        refined=tuple(found for _, found in seen),
        notes=(note, *plan.notes, *more, *notes),
    )


def measured(
    found: SearchResult, plan: PlanData, program: PlanProgram
) -> CostCorrections:
    """Return the corrections by which a plan's prediction is what its program takes.

    Args:
      found: the result that the plan was read from.
      plan: the plan.
      program: its compiled program, which fits.
    """
    best, compiled = found.best, program.reading.compiled
    factors = CostFactors.of(found.request.corrections)
    estimated: dict[tuple[OpKey, str], float] = defaultdict(float)
    corrected_s = 0.0
    for node in best.model.graph.nodes:
        if node.op is not None and (seconds := best.compute_s(node)):
            key = op_key(node.op.source, node.op.name)
            sharding = sharding_of(best.strategy(node.id))
            estimated[key, sharding] += seconds / factors.of_op(key, sharding)
            corrected_s += seconds
    planned: dict[OpKey, float] = defaultdict(float)
    for (key, _), seconds in estimated.items():
        planned[key] += seconds
    taken, rest_s = op_times(program.reading.kernels, planned)
    # Costs of no instruction are those of instructions without a name.
    unseen_s = sum(s for key, s in planned.items() if key not in taken)
    small_s = _SMALL * compiled.step_time_s
    ratio = {
        key: _within(
            (taken.get(key, s / unseen_s * rest_s if unseen_s else 0.0) + small_s)
            / (s + small_s)
        )
        for key, s in planned.items()
    }
    # Copies between layouts on one device belong to no op.
    copies_s = max(0.0, plan.predicted.compute_s - corrected_s)
    scale = 1.0
    for _ in range(_ROUNDS if planned else 0):
        sum_s = sum(_within(scale * ratio[key]) * s for key, s in planned.items())
        scale *= max(0.0, compiled.compute_s - copies_s) / sum_s
    return CostCorrections(
        1,
        tuple(
            OpTimes(*key, sharding, s, _within(scale * ratio[key]) * s)
            for (key, sharding), s in estimated.items()
        ),
        _communication(found, plan, program.reading, copies_s),
    )


def _within(factor: float) -> float:
    return float(np.clip(factor, *_LIMITS))


def _communication(
    found: SearchResult, plan: PlanData, reading: Reading, copies_s: float
) -> float:
    """Return the factor on collectives by which as much of them is exposed as in the
    compiled program.

    With T seconds of all collectives, of which H can hide behind B seconds of compute,
    and copies between layouts, C, with them, at a factor f those exposed take the
    larger of f (T - H) - C and f T - B.
    """
    best, compiled = found.best, reading.compiled
    overlap, labels = best.mesh_problem.overlap, best.labels
    known = found.request.corrections.communication
    total_s = sum(c.seconds for c in plan.collectives) / known
    if not total_s:
        return 1.0
    hidable_s = 0.0 if overlap.hides_nothing else overlap.hidable.objective(labels)
    copies_s = min(copies_s, hidable_s)
    waits_s = total_s - (hidable_s - copies_s) / known
    exposed_s = compiled.communication_s
    factor = (exposed_s + overlap.share * compiled.compute_s) / total_s
    if waits_s > 0:
        factor = min(factor, (exposed_s + copies_s) / waits_s)
    larger_s = max(exposed_s, waits_s - copies_s)
    trust = larger_s / (larger_s + 10 * _SMALL * compiled.step_time_s)
    return _within(factor) ** trust


def _repriced(solved: Solved, corrections: CostCorrections) -> Solved | None:
    known: list[VariantCandidate] = []
    for one in dict.fromkeys([solved.own, solved.recipes]):
        search = one.search.asking(corrections=corrections)
        found = repriced(one.found, search.request)
        if found is None:
            return None
        known.append(replace(one, search=search, found=found))
    return Solved(known[0], known[-1])
