"""Answers about a plan from the problem that gave it: reasons, recipes, worth.

A value in a plan in stages is explained by its stage, and its layout on each stage:
each layout is fixed, and the submeshes that it concerns are planned again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from jax.sharding import PartitionSpec

from rhino_jax.errors import PinError, RhinoError, StageError, nearest
from rhino_jax.explain.explaining import View, explain, explain_place, laid_out_nowhere
from rhino_jax.explain.place import (
    HeldLayout,
    PlacedValues,
    find_place,
    solve_most_promising,
    specs_without_pins,
    steps_held,
)
from rhino_jax.explain.where import Where
from rhino_jax.explain.why import Why
from rhino_jax.explain.words import (
    CostTerms,
    Elsewhere,
    Line,
    cost_of,
    how_long,
)
from rhino_jax.ir.printer import format_array
from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import Spec, entry_axes
from rhino_jax.passes.staged.step import ValueKey, ValueKind
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.resolved_pins import ValuePin
from rhino_jax.plan.stages import STAGE_AXIS
from rhino_jax.planner.experts import in_parts
from rhino_jax.planner.origin import PlanOrigin
from rhino_jax.planner.search.folding import solved_by, with_recipes
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.read_back.assemble import assemble
from rhino_jax.planner.search.records import MeshProblem, Request
from rhino_jax.planner.staging.fitted import Laid, SolvedStages
from rhino_jax.planner.staging.groups import GroupLayouts
from rhino_jax.planner.staging.planned import PlannedGroup
from rhino_jax.planner.staging.spmd_pipeline.whole import SolvedInOne
from rhino_jax.planner.variant_search import Search
from rhino_jax.recipes.recipes import recipes_for
from rhino_jax.solver.incumbents import RECIPE_EFFORTS
from rhino_jax.units import format_bytes, format_seconds
from rhino_jax.utils.progress import shown


def why(plan: PlanData, key: str, spec: Any = None) -> Why:
    """Explain the layout of a value; see `Plan.why` and `Plan.why_not`.

    Args:
      plan: a plan with an origin.
      key: key of the value.
      spec: the only alternative to evaluate; None: all.
    """
    origin: PlanOrigin = plan.origin
    if plan.has_tasks:
        return _why_in_stages(origin, plan, key, spec)
    solved = origin.solved_for(plan)
    request = _now(solved.search).request
    view = PipelineView(solved) if plan.is_one_program else View()
    with shown(origin.plan_options.progress) as report:
        return explain(solved.found, request, plan, key, spec, report, view)


def _why_in_stages(origin: PlanOrigin, plan: PlanData, key: str, spec: Any) -> Why:
    if type(spec) is int:
        started = time.monotonic()
        other = origin.with_(plan, {"pins": {key: spec}})
        return moved(plan, key, spec, other, time.monotonic() - started)
    plan_options, pins = (
        origin.plan_options,
        origin.stage_pins(origin.plan_options, plan),
    )
    solved, program = origin.solved_for(plan), origin.traced.program
    return StagedQuestion(solved, program, plan_options.level, pins).why(key, spec)


def worth_of(plan: PlanData, held: Mapping[str, Spec]) -> dict[str, float]:
    """Return the change of the step time, in seconds, with one argument fixed to
    another layout and everything else solved again; one entry for each path, each on
    its own.

    Args:
      plan: a plan with an origin.
      held: tree path of an argument → its other layout.
    """
    origin: PlanOrigin = plan.origin
    solved = origin.solved_for(plan)
    with shown(origin.plan_options.progress) as report:
        return steps_held(solved.found, _now(solved.search).request, held, report)


def recipe(plan: PlanData, name: str) -> PlanData:
    """Return an expert's recipe at its best, as a plan; see `Plan.recipe`.

    Raises:
      StageError: the plan has several stages.
      RhinoError: there is no such recipe, or the program does not allow it.
    """
    origin: PlanOrigin = plan.origin
    if not plan.is_one_mesh:
        raise StageError(
            "`plan.recipe`: a plan of several stages cannot be asked.",
            where=f"the plan of `{plan.program_name}`",
            numbers=f"{plan.num_stages} stages, schedule {plan.schedule!r}",
            fix="ask the plan of one: plan.with_(stages=1, mesh=…), on a mesh without"
            " the axis `stage`."
            + " `plan.code('specs')` says what each stage holds, and how."
            * plan.is_one_program,
        )
    solved = origin.solved_for(plan)
    search, found = _now(solved.recipes.search), solved.recipes.found
    problem = found.best.mesh_problem
    for own in in_parts(search.quiet(found.mesh_axes), name):
        search, problem = own
    return origin.finished(
        search.told(plan_of_recipe(problem, search.request, name)),
        plan,
        origin.plan_options,
        None,
    )


def plan_of_recipe(problem: MeshProblem, request: Request, name: str) -> PlanData:
    """Return an expert's recipe as a plan on the searched mesh, whether it fits or not.

    Args:
      problem: the problem of the plan's mesh.
      request: options of the search.
      name: name of the recipe.

    Raises:
      RhinoError: there is no such recipe, or the program does not allow it.
    """
    known = [r.name for r in recipes_for(problem.model.mesh)]
    if name not in known:
        raise RhinoError(
            f"`plan.recipe`: there is no recipe {name!r} here."
            + nearest(name, known or ["dp"]),
            where=f"plan.recipe({name!r})",
            numbers=f"on this mesh: {', '.join(known) or 'none, it has one device'}",
            fix=f"take one of them, as plan.recipe({known[0]!r})."
            if known
            else "plan for several devices.",
        )
    problem = _with_recipe(problem, request, name)
    labels = problem.recipes.get(name)
    if labels is None:
        raise RhinoError(
            f"`plan.recipe`: the program has nothing that {name!r} could shard.",
            where=f"the plan of `{problem.model.graph.program.name}`",
            numbers="it needs a batch, and what else its name says: matmuls whose inner"
            " dims divide, parameters or state, a sequence",
            fix="take another recipe; plan.recipes has None for those that are none.",
        )
    solved = solved_by(problem, labels)
    solution = solved.solution
    builder = problem.model.builder
    plan = assemble(builder.target, request, solved, time.monotonic(), ())
    # The bound is that of the search; nothing was proved about the recipe.
    note = f"this is the recipe {name!r} at its best, not the best plan."
    if solution.peak > request.memory_budget_bytes:
        note += (
            f" It does not fit: {format_bytes(solution.peak)} of"
            f" {format_bytes(request.memory_budget_bytes)} per device."
        )
    search = replace(plan.search, status="recipe")
    return replace(plan, search=search, notes=(*plan.notes, note))


def _with_recipe(problem: MeshProblem, request: Request, name: str) -> MeshProblem:
    """Return the problem with the recipe's solution; solve it only if it is missing."""
    if name in problem.recipes:
        return problem
    every = [r for r in recipes_for(problem.model.mesh) if r.name == name]
    effort = replace(RECIPE_EFFORTS[request.level], deadline=request.deadline)
    return with_recipes(problem, effort, every=every)


def _now(search: Search) -> Search:
    """Return the search with its time limit counted from now."""
    limit = search.request.time_limit_s or math.inf
    return search.asking(deadline=time.monotonic() + limit)


@dataclass(frozen=True, slots=True, eq=False)
class StagedQuestion:
    """A question about a plan in stages.

    Attributes:
      solved: the solved problems of its submeshes.
      program: the step as the user wrote it.
      level: search level of the plan.
      pins: pinned stages: key → stage.
      tried: evaluated candidates, by the name of their constraints.
    """

    solved: SolvedStages
    program: Program
    level: str
    pins: Mapping[str, int]
    tried: dict[str, HeldLayout[Laid]] = field(default_factory=dict)

    def why(self, key: str, asked: Any) -> Why:
        """Explain a value's layout, on its home stage first, then on the others.

        Args:
          key: key of the value, see `place`.
          asked: the only alternative to evaluate; None: all.

        Raises:
          PinError: the key names no value that has a layout.
        """
        started = time.monotonic()
        what = "`plan.why`" if asked is None else "`plan.why_not`"
        places = self._places(key, what)
        planned = self.solved.laid()
        first, *others = [
            self._on_stage(stage, place, asked, planned, is_first=i == 0)
            for i, (stage, place) in enumerate(places.items())
        ]
        seconds = time.monotonic() - started
        return replace(first, also=tuple(others), seconds=seconds)

    def _places(self, key: str, what: str) -> dict[int, PlacedValues]:
        """Return the values that a key means by stage, the home stage first."""
        found = {}
        for stage, group in enumerate(self.solved.groups):
            for text in (key, f"{key}[*]"):  # a slice of stacked layers
                try:
                    place = find_place(text, group.of.program, what)
                except PinError:
                    continue
                found[stage] = replace(place, key=key)
                break
        if not found:
            raise laid_out_nowhere(find_place(key, self.program, what), what)
        laid = {
            s: p
            for s, p in found.items()
            if specs_without_pins(self.solved.groups[s].found, p)
        }
        if not laid:
            raise laid_out_nowhere(next(iter(found.values())), what)
        return dict(sorted(laid.items(), key=lambda x: not self._is_home(*x)))

    def _is_home(self, stage: int, place: PlacedValues) -> bool:
        arguments = self.solved.groups[stage].of.arguments
        home = self.solved.step.home
        keys = [arguments[i] for i in place.inputs]
        return all(k.kind is ValueKind.INPUT and home[k.number] == stage for k in keys)

    def _on_stage(
        self,
        stage: int,
        place: PlacedValues,
        asked: Any,
        planned: Laid,
        *,
        is_first: bool,
    ) -> Why:
        group = self.solved.groups[stage]
        where = Where(self.solved, self.pins, stage, place)
        mine = self._cost(stage, planned, planned)
        found = explain_place(
            group.found,
            place,
            asked,
            where.hands(),
            partial(self._solve, stage, place),
            lambda laid, is_brief: replace(
                self._cost(stage, laid, planned), is_brief=is_brief
            ),
            mine,
            View(),
        )
        return replace(
            found,
            answer=(*where.sentences(is_first=is_first), *found.answer),
            planned_s=planned.step_s,
            stage=stage,
            stage_s=mine.step_s,
        )

    def _cost(self, stage: int, laid: Laid, planned: Laid) -> CostTerms:
        """Return the cost of one stage, with its effect on the whole step."""
        if not laid.groups:
            return CostTerms.of_nothing(Elsewhere(stage, math.inf, laid.cannot))
        took = [g.found.step_s for g in laid.groups]
        before = [g.found.step_s for g in planned.groups]
        others = tuple(
            (s, a - b) for s, (a, b) in enumerate(zip(took, before, strict=True))
            if s != stage
        )  # fmt: skip
        sent = tuple(
            (*pair, seconds - planned.sent.get(pair, 0.0))
            for pair, seconds in laid.sent.items()
        )
        longest = max(range(len(took)), key=took.__getitem__)
        group = laid.groups[stage]
        return replace(
            _as_called(cost_of(group.found), group),
            peak_bytes=laid.peaks[stage],
            elsewhere=Elsewhere(stage, laid.step_s, "", longest, others, sent),
        )

    def _solve(
        self,
        stage: int,
        place: PlacedValues,
        specs: Sequence[Spec],
        current: Spec | None,
    ) -> list[HeldLayout[Laid]]:
        """Solve a place for each layout on all submeshes: all briefly, the most
        promising at the plan's level."""
        every = [self._try(self._held(stage, place, s), s) for s in specs]

        def again(spec: Spec, laid: Laid) -> Laid:
            held = self._held(stage, place, spec)
            return self.solved.best(held, self.level, laid if laid.groups else None)

        def rank(laid: Laid | None) -> tuple[float, ...]:
            return (math.inf,) * 3 if laid is None else laid.rank

        axes = self.solved.groups[stage].found.mesh_axes
        solve_most_promising(every, again, rank, len(axes), current)
        return every

    def _try(self, held: GroupLayouts, spec: Spec) -> HeldLayout[Laid]:
        """Return a briefly searched layout, shared by the stages that have it."""
        found = self.tried.get(held.name)
        if found is None:
            search = partial(self.solved.held, held, "fast", is_kept=True)
            found = self.tried[held.name] = HeldLayout.of(spec, search)
        return found

    def _held(self, stage: int, place: PlacedValues, spec: Spec) -> GroupLayouts:
        """Return the constraints that fix a stage's place to a layout.

        An argument or a result of the step gets it on all stages, as with a pin.
        """
        of, of_step = self.solved.groups[stage].of, self.solved.of_step
        given = {
            made[1]: end.whole
            for made, end in zip(self.solved.step.outputs, of_step.outputs, strict=True)
            if isinstance(made, tuple) and made[0] == stage
        }
        inputs: dict[int, Spec] = {}
        outputs: dict[int, Spec] = {}
        handed: dict[ValueKey, Spec] = {}
        for key in (of.arguments[i] for i in place.inputs):
            if key.kind is ValueKind.INPUT:
                inputs[of_step.inputs[key.number].whole] = spec
            else:
                handed[key] = spec
        for key in (of.results[i] for i in place.outputs):
            if key in given:
                outputs[given[key]] = spec
            else:
                handed[key] = spec
        pins = {v: ValuePin(spec, place.key) for v in place.values}
        return GroupLayouts(inputs, outputs, handed, {stage: pins} if pins else {})


def _as_called(cost: CostTerms, group: PlannedGroup) -> CostTerms:
    """Return a cost with argument paths renamed to those of this submesh.

    Equivalent submeshes are searched once, with the paths of the first.
    """
    searched = group.found.best.model.graph.program
    names = [
        (theirs.path, own.path)
        for theirs, own in zip(searched.inputs, group.of.program.inputs, strict=True)
        if theirs.path != own.path
    ]
    if not names:
        return cost
    lines: dict[Line, float] = {}
    for (kind, axes, source, reason), seconds in cost.by_line.items():
        for theirs, own in names:
            if theirs in reason:
                reason = reason.replace(theirs, own)
                break
        line = kind, axes, source, reason
        lines[line] = lines.get(line, 0.0) + seconds
    return replace(cost, by_line=lines)


def moved(plan: PlanData, key: str, stage: int, other: PlanData, seconds: float) -> Why:
    """Explain the cost of pinning a value to another stage.

    Args:
      plan: the plan as it is.
      key: key of the value.
      stage: the other stage.
      other: the plan with the value pinned to that stage.
      seconds: planning time of `other`.
    """
    before, after = plan.predicted.step_time_s, other.predicted.step_time_s
    works = [
        f"{format_seconds(b.predicted.step_time_s)} instead of"
        f" {format_seconds(a.predicted.step_time_s)} of stage {i}"
        for i, (a, b) in enumerate(zip(plan.stages, other.stages, strict=False))
    ]
    took = f"a step takes {' and '.join(works)}"
    if len(plan.stages) != len(other.stages):
        took = f"{other.num_stages} stage(s) instead of {plan.num_stages}"
    leaves = [x for x in plan.inputs if x.path == key]
    answer = (
        f"on stage {stage}, {how_long('the step', after - before, before)}: all cut"
        f" again with that pin, {took}.",
    )
    return Why(
        key,
        key,
        format_array(leaves[0].dtype, leaves[0].shape) if leaves else "",
        "",
        f"on {leaves[0].stages}" if leaves else f"not on stage {stage}",
        answer,
        (),
        (),
        before,
        seconds,
    )


ONLY_STACKS = "over the stages of one program only stacks of layers lie, by dim 0"


@dataclass(frozen=True, slots=True, eq=False)
class PipelineView(View):
    """Map one stage's values in an SPMD pipeline to those of the whole step."""

    of: SolvedInOne

    def sent_s(self, found: SearchResult) -> float:
        """Return the seconds of transfers between stages."""
        step_s = self.of.step_s(found)
        return step_s - found.step_s if math.isfinite(step_s) else 0.0

    def shape(self, place: PlacedValues) -> tuple[int, ...]:
        """Return the shape of a value in the whole step."""
        if not self._is_stack(place):
            return place.shape
        return place.shape[0] * self.of.stages, *place.shape[1:]

    def shown(self, place: PlacedValues, spec: Spec) -> Spec:
        """Return the spec of a value in the whole step."""
        if not self._is_stack(place):
            return spec
        return (self.of.axis, *spec[0]), *spec[1:]

    def refused(self, place: PlacedValues, asked: Any) -> str:
        """Return why a value of the whole step cannot have a spec; empty: it can."""
        if type(asked) is int:
            return "stages of one program have equal parts of all layers"
        if not isinstance(asked, PartitionSpec):
            return ""
        over = [i for i, d in enumerate(asked) if STAGE_AXIS in entry_axes(d)]
        return "" if over in ([], [0] if self._is_stack(place) else []) else ONLY_STACKS

    def _is_stack(self, place: PlacedValues) -> bool:
        """Whether a stage has a part of everything at the place."""
        whole, own = self.of.search.traced.program, self.of.of_stage
        ends = [(whole.inputs[i].value, own.inputs[i].value) for i in place.inputs]
        ends += [(whole.outputs[i].value, own.outputs[i].value) for i in place.outputs]
        are_parts = [whole.values[a].shape != own.values[b].shape for a, b in ends]
        return bool(ends) and not place.values and all(are_parts)
