"""The plan of an SPMD pipeline, with the number of micro-batches and the residuals that
its loops save or recompute.

The layers' residuals are live for all micro-batches, and copied to and from their
stacks on every tick: recomputing them may take less time, even with memory to spare.
Passes are chosen on the user's step, before it is split into micro-batches and stages,
and then planned on one stage's program.

An SPMD pipeline is compared with stages that run as tasks. It dispatches one program,
wherever its devices are, and shares everything outside of layers among all stages.
Every stage computes on every tick, though, even without a micro-batch, and the layers'
residuals are copied on each. Both are compared by the simulated step, tasks with their
dispatch time. Tasks are the default: they have their own stages, and any cut. An SPMD
pipeline is planned where a lower bound on its step is clearly below, and taken where
the step is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rhino_jax.errors import (
    InfeasiblePlanError,
    StageError,
)
from rhino_jax.ir.program import Program, Region, RegionKind
from rhino_jax.ir.transform import UN_REMAT, num_microbatches
from rhino_jax.passes.microbatch.cut import MicrobatchChoice
from rhino_jax.pipeline.of_plan import schedule_of
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.pipeline.work import work_of
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.records import Variant
from rhino_jax.plan.stages import STAGE_AXIS
from rhino_jax.planner.decision import (
    MIN_GAIN,
    NOT_POSSIBLE,
    Decision,
    NotFaster,
    noted,
    step_s_of,
)
from rhino_jax.planner.search.remat.candidates import candidates_of
from rhino_jax.planner.search.remat.choice import (
    NOTHING_SAVED,
    ask,
    variants,
)
from rhino_jax.planner.staging.cuts import PER_STAGE, batch_of, counts_of
from rhino_jax.planner.staging.schedules import DISPATCH_S
from rhino_jax.planner.staging.spmd_pipeline.whole import SolvedInOne, StageSearch
from rhino_jax.planner.variant_search import (
    NEAR,
    Search,
    VariantCandidate,
    Variants,
    nothing_fits,
)
from rhino_jax.planner.variants import EFFORT, SHARES, as_pass, with_room
from rhino_jax.units import format_seconds


@dataclass(eq=False, kw_only=True)
class Recompute(Variants):
    """Search remat variants in some number of micro-batches, the user's step first.

    Attributes:
      stage: the search of one stage's program.
      count: the number of micro-batches.
    """

    stage: StageSearch
    count: int

    def __post_init__(self) -> None:
        Variants.__post_init__(self)
        self.after = partial(self.stage.of_stage, self.count)

    def explored(self, known: Sequence[VariantCandidate]) -> VariantCandidate:
        """Return the fastest variant that fits, or the user's step if hardly slower.

        Args:
          known: the best variant of another number of micro-batches, whose passes are
            taken here.
        """
        name, done = (known[0].name, known[0].done) if known else ("baseline", ())
        self.variant(name, done)
        written = self.fastest()
        if self.search.options.may_recompute and not known:
            if written.found.fits:
                self.meshes = [written.found.mesh_axes]
            self._choose(written)
        return self.taken()

    def _choose(self, written: VariantCandidate) -> None:
        """Plan variants that may be better than the user's step."""
        kept = written
        before = tuple(self.stage.search.choices(UN_REMAT))
        if before:
            kept = self.variant("no remat", before) or written
        brief = self.stage.of_step(before).on(written.found.mesh_axes)
        brief = brief.asking(level="fast")
        wide = next(with_room(VariantCandidate(brief, brief.find())), None)
        if wide is None:
            return
        asked = candidates_of(wide.best, may_offload=False).stacked_at(0.0)
        least = next(variants(asked, NOTHING_SAVED), None)
        if least is None or not least.choice.recompute:
            return
        again = self.variant(least.name, (*before, as_pass(least)))
        if again is None or not again.found.fits:
            return
        # The cheapest choice of residuals, if that may be better than the plans so far:
        # two plans give the cost of a stacked byte. A stage runs its part of the
        # layers, on ticks without a micro-batch too.
        stages = self.stage.stages
        share = (self.count + stages - 1) / (self.count * stages)
        saved, least_bytes = asked.all_saved, asked.stacked_bytes(least.answer)
        more = asked.stacked_bytes(saved) - least_bytes
        free_s = kept.step_s
        if not kept.found.fits:  # Its step, were memory no limit.
            free_s = kept.again(level="fast", memory_budget_bytes=float(1 << 62)).step_s
        recomputed_s = least.answer.added_s - saved.added_s
        saved_s = (free_s - again.step_s) / share + recomputed_s
        per_byte_s = saved_s / more if more else 0.0
        if per_byte_s <= 0:
            return
        budget = SHARES[0] * self.stage.search.request.memory_budget_bytes
        room = (budget - again.peak_bytes) / share
        limit = max(0.0, least.answer.peak_bytes + room)
        found = ask(asked.stacked_at(per_byte_s), limit, effort=EFFORT)
        some = next((c for c in found if c.choice != least.choice), None)
        if some is None:
            return
        copied_s = least_bytes * per_byte_s
        more_s = some.answer.added_s - copied_s - least.answer.added_s
        if self.may_win(again.step_s + share * more_s):
            self.variant(some.name, (*before, as_pass(some)))


def plan_in_one_program(
    search: Search,
    places: Sequence[int],
    bound_s: Callable[[int], float] = lambda count: 0.0,
) -> PlanData:
    """Return the plan of a step whose layers are sharded over the stage axis.

    Args:
      search: the search of the user's step, with the seconds that it has to beat.
      places: number of places of each stage along the stage axis.
      bound_s: number of micro-batches → lower bound on the step in seconds.
    Raises:
      StageError, MicrobatchError, InfeasiblePlanError, PinError.
      NotFaster: it fits, and is not fast enough.
    """
    stages, enough_s = len(places), search.enough_s
    if {*places} != {1}:
        raise StageError(
            "stages of one program have equal numbers of devices, each one place of the"
            f" mesh along `{STAGE_AXIS}`.",
            where="`stages=`",
            numbers=f"{' + '.join(map(str, places))} places",
            fix=f"take stages={sum(places)}, all of one place, or another schedule, as"
            " schedule='1f1b'.",
        )
    started = time.monotonic()
    stage = StageSearch(search, stages)
    tried: list[VariantCandidate] = []

    def step_s(of: VariantCandidate) -> float:
        """Return the step of all stages in seconds; infinite where it does not fit."""
        return SolvedInOne(stage, of.search, of.found).step_s(of.found)

    def make(count: int) -> VariantCandidate:
        recompute = Recompute(search=search, stage=stage, count=count)
        # The best remat hardly depends on the number of micro-batches.
        found = recompute.explored([*by_count.plans.values()][:1])
        tried.extend(recompute.tried)
        return found

    def may_do(count: int) -> bool:
        """Whether `count` micro-batches may be fast enough: more than were tried only
        have fewer idle ticks."""
        idle = stages - 1
        fit = [(n, t) for n, t in by_count.plans.items() if t.found.fits]
        return bound_s(count) < enough_s and (
            not fit
            or any(
                step_s(t) * (1 + idle / count) / (1 + idle / n) < enough_s
                for n, t in fit
            )
        )

    by_count: Decision[int, VariantCandidate]
    by_count = Decision(make, (), lambda t: (step_s(t), t.peak_bytes))
    microbatches, rounds = search.options.microbatches, list[list[int]]()
    if isinstance(microbatches, int):
        rounds = [[microbatches]]
    else:
        traced, per_microbatch = search.running, search.options.per_microbatch
        most_loops = MicrobatchChoice(2).most_loops  # As for micro-batches on one mesh.
        own = traced.closed_jaxpr, traced.program, per_microbatch
        rows = batch_of(*own, most_loops).rows
        rounds = [*counts_of(rows, stages, stages)]
        if not rounds:
            raise StageError(
                f"no number of micro-batches is a multiple of {stages} stages, which"
                " share what is in no layer.",
                where="`stages=`",
                numbers=f"a batch of {rows} rows",
                fix=f"take a batch of a multiple of {stages} rows, or another"
                " schedule.",
            )
    for counts in rounds:
        for count in filter(may_do, counts):
            by_count.plan(count)
        if any(t.found.fits for t in by_count.plans.values()):
            break
    if by_count.best is None:
        raise NotFaster(math.inf)
    fastest, count = by_count.fastest(), by_count.best
    if not fastest.found.fits:
        intro = f"in one program of {stages} stages nothing fits: "
        named = [replace(t, name=_name(t)) for t in tried]
        raise nothing_fits(named, intro)
    least_s = step_s(fastest)
    if least_s * (1 - NEAR) >= enough_s:
        raise NotFaster(least_s, count)
    found = fastest.found
    if search.request.level != "fast":
        found = fastest.search.again(found)
    plan = SolvedInOne(stage, fastest.search, found).plan()
    if plan.predicted.step_time_s >= enough_s:
        raise NotFaster(plan.predicted.step_time_s, count)
    report = replace(plan.search, seconds=time.monotonic() - started)
    variants = tuple(
        Variant(_name(t), step_s(t), t.peak_bytes, t is fastest, t is not fastest)
        for t in tried
    )
    return replace(plan, search=report, variants=variants if len(variants) > 1 else ())


def _name(of: VariantCandidate) -> str:
    """Return the name of a variant with its number of micro-batches."""
    count = f"{num_microbatches(of.search.transforms)} micro-batches"
    return f"{count}, {of.name}" if of.done else count


def or_in_one_program(
    as_tasks: PlanData | InfeasiblePlanError, search: Search, places: Sequence[int]
) -> PlanData:
    """Return the plan whose stages run as tasks; or an SPMD pipeline, where tasks do
    not fit or take clearly longer.

    Args:
      as_tasks: the plan as tasks, or the error where there is none.
      search: the search of the user's step.
      places: number of places of each stage along the stage axis, all equal.
    Raises:
      InfeasiblePlanError: `as_tasks`, where an SPMD pipeline does not fit either.
    """
    stages, microbatches = len(places), search.options.microbatches
    share = share_of_layers(search.running.program, stages)
    most = max(PER_STAGE[0]) * stages
    if isinstance(microbatches, int):
        share, most = share if microbatches % stages == 0 else 0.0, microbatches
    tasks = as_tasks if isinstance(as_tasks, PlanData) else None
    told, enough_s = "as tasks nothing fits", math.inf

    def bound_s(count: int) -> float:
        return least_s(tasks, share, count) if tasks else 0.0

    if tasks:
        own_s, tasks_s = step_s_of(tasks), dispatched_s(tasks)
        enough_s = (1 - MIN_GAIN) * tasks_s
        told = f"as tasks {format_seconds(own_s)} and {format_seconds(tasks_s - own_s)}"
        told += f" of starts, {format_seconds(DISPATCH_S)} each"
    plan, slower = None, ""
    if share and bound_s(most) < enough_s:
        try:
            asked = replace(search, enough_s=enough_s)
            plan = plan_in_one_program(asked, places, bound_s)
        except NotFaster as refused:
            if math.isfinite(refused.step_s):
                slower = format_seconds(refused.step_s)
                slower += f" in {refused.count} micro-batches"
        except NOT_POSSIBLE:
            pass
    if plan is not None:
        if tasks:
            told = f"{format_seconds(step_s_of(plan))} a step; {told}"
        return noted(plan, f"stages are one program: {told}.")
    if isinstance(as_tasks, InfeasiblePlanError):
        raise as_tasks
    if not slower:
        return as_tasks
    return noted(as_tasks, f"stages were compared: {told}; one program {slower}.")


def share_of_layers(program: Program, stages: int) -> float:
    """Return the share of a step's FLOPs that is in loops which `stages` divides."""

    def within(region: Region) -> float:
        total = 0.0
        for op in (program.ops[o] for o in region.ops):
            if (call := op.call) is None:
                continue
            is_loop = call.kind is RegionKind.SCAN and call.trip_count > 1
            if is_loop and call.trip_count % stages == 0:
                total += program.flops_of(op)
            else:
                total += call.trip_count * sum(map(within, call.regions))
        return total

    every = program.flops_of()
    return within(program.body) / every if every else 0.0


def least_s(as_tasks: PlanData, share: float, count: int) -> float:
    """Return a lower bound on the step of an SPMD pipeline in seconds: stages have
    equal parts of the tasks' work, the layers' on all ticks, and nothing is copied,
    sent or computed twice.

    Args:
      as_tasks: the plan whose stages run as tasks.
      share: share of the step that is in layers.
      count: maximum number of micro-batches.
    """
    pipeline = as_tasks.pipeline
    assert pipeline is not None
    busy = pipeline.busy_s
    ticks = (count + len(busy) - 1) / count
    return sum(busy) / len(busy) * (share * ticks + 1 - share)


def dispatched_s(as_tasks: PlanData) -> float:
    """Return the step of tasks in seconds, with their dispatch (`DISPATCH_S`)."""
    pipeline = as_tasks.pipeline
    assert pipeline is not None
    work = replace(work_of(pipeline), dispatch_s=DISPATCH_S)
    return simulate(schedule_of(pipeline, work)).step_time_s
