"""One search: the user's program with or without passes applied, on meshes; and the
search of its variants, with the least gain that they are taken for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from rhino_jax.errors import InfeasiblePlanError, InternalError, MicrobatchError
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Program
from rhino_jax.ir.transform import Stored, Transform
from rhino_jax.passes.apply import PASSES, apply_passes
from rhino_jax.passes.program_pass import NO_LIMITS, ChoiceLimits, Trial
from rhino_jax.plan.fingerprint import fingerprint
from rhino_jax.plan.kept import Part
from rhino_jax.plan.lines import with_lines
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.resolved_pins import resolve_pins
from rhino_jax.plan.trees import on_mesh
from rhino_jax.planner.decision import (
    AS_WRITTEN,
    AUTO,
    MIN_GAIN,
    Decision,
    DecisionOptions,
)
from rhino_jax.planner.meshes import MeshAxes
from rhino_jax.planner.search.driver import find, make_candidates, search_again
from rhino_jax.planner.search.found import SearchResult, search_held
from rhino_jax.planner.search.records import PlanCandidate, Request
from rhino_jax.runtime.processes.agree import processes_of_mesh
from rhino_jax.solver.incumbents import EFFORTS
from rhino_jax.units import format_bytes
from rhino_jax.verify.refine import judge_of, refine


MIN_LAYOUT_GAIN = 2 * EFFORTS["best"].near
"""As `MIN_GAIN`, where all compute stays as it is (deferred reductions, interleaved
storage): its error is the same on both sides, so what is left is that of two results of
the solver at level "best"."""

NEAR = EFFORTS["fast"].near
"""Share of the step time by which brief plans may be off: what is estimated to be this
close to the best plan is planned."""


@dataclass(frozen=True, slots=True, eq=False)
class Search:
    """A program with its passes, candidate meshes, hardware and search options.

    Attributes:
      traced: the user's function, traced.
      mesh: the mesh that the user gave; None: the best of `meshes`.
      meshes: (name, size) of the axes of each candidate mesh.
      target: the hardware.
      request: memory budget, pins and limits of the search.
      pinned: the user's pins; those of intermediate values are resolved again in every
        variant.
      refine: how many plans to compile and compare; 0: none; "auto": the plan, and
        those that it is corrected to.
      what: the public call, for messages.
      transforms: the passes applied so far, by name and choice.
      like: the result of a program that is nearly the same, from which to start.
      options: the decisions that the user takes, and those left open.
      storage: how fused weights are stored; also the inputs in interleaved storage.
      stage_pins: key → stage.
      form_pins: key of a call site (`rhino.choose`) → its form.
      kept: input → stages that hold it in another plan, whose stage cuts are taken
        over.
      enough_s: seconds that a step in stages has to be shorter than.
    """

    traced: Traced
    mesh: Any
    meshes: list[MeshAxes]
    target: Target
    request: Request
    pinned: Mapping[str, Any]
    refine: int | str
    what: str
    transforms: tuple[Transform, ...] = ()
    like: SearchResult | None = None
    options: DecisionOptions = field(default_factory=DecisionOptions)
    storage: str | Stored = AS_WRITTEN
    stage_pins: Mapping[str, int] = field(default_factory=dict)
    form_pins: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[int, Part] = field(default_factory=dict)
    enough_s: float = math.inf

    @property
    def devices(self) -> int:
        """The number of devices, the same on all candidate meshes."""
        return math.prod(size for _, size in self.meshes[0])

    def counts(self) -> list[int]:
        """Return the number of devices of every subset of the first mesh's axes, fewest
        first."""
        sizes = [size for _, size in self.meshes[0]]
        subsets = (
            math.prod(some)
            for n in range(1, len(sizes) + 1)
            for some in combinations(sizes, n)
        )
        return sorted({*subsets} - {1})

    @property
    def running(self) -> Traced:
        """Return the planned function: the user's function with the passes applied."""
        return apply_passes(self.traced, self.transforms)

    def after(self, transforms: Iterable[Transform]) -> Search:
        """Return the search with these passes applied in addition, after all others."""
        found = replace(self, transforms=(*self.transforms, *transforms))
        program = found.running.program
        pins = resolve_pins(self.pinned, program, self.meshes[-1])
        return replace(found, request=replace(self.request, value_pins=pins.values))

    def choices(self, name: str, limits: ChoiceLimits = NO_LIMITS) -> list[Transform]:
        """Return the choices of a pass that the planned function allows, least change
        first.

        Args:
          name: the name of the pass; `limits`: what is known of the program.
        Raises:
          MicrobatchError: there is no batch that can be split.
        """
        return list(PASSES[name].choices(self.running, limits))

    def may(self, trial: Trial) -> bool:
        """Whether the user leaves a pass to the planner."""
        return trial.option is None or getattr(self.options, trial.option) == AUTO

    def tries(self, name: str, peak_bytes: int = 0) -> list[Transform]:
        """Return the choices of a pass that are worth a try, least change first.

        Args:
          name: the name of the pass.
          peak_bytes: the peak of one device: a pass is not tried for arrays that are,
            sharded over all devices, less of it than a variant must gain.
        Raises:
          MicrobatchError: the batch cannot be split.
        """
        trial = PASSES[name].trial
        if trial is None or not self.may(trial):
            return []
        least_bytes = MIN_GAIN * peak_bytes * self.devices
        places = self.options.per_microbatch
        pinned = self.request.value_pins
        limits = ChoiceLimits(least_bytes, places, self.counts(), pinned)
        return self.choices(name, limits)

    def asking(self, **changes: Any) -> Search:
        """Return the search with other options, such as another level or budget."""
        return replace(self, request=replace(self.request, **changes))

    @property
    def brief(self) -> Search:
        """The search at level "fast", without recipes."""
        return self.asking(level="fast", has_recipes=False)

    def on(self, *meshes: MeshAxes) -> Search:
        """Return the search on the best of some meshes."""
        return replace(self, meshes=[*meshes])

    def quiet(self, *meshes: MeshAxes) -> Search:
        """Return the search on some meshes, without progress reports."""
        return replace(self, request=self.request.quiet, meshes=[*meshes])

    @property
    def problem(self) -> tuple[Program, list[MeshAxes], Target, Request]:
        """The program to plan, candidate meshes, hardware, and options."""
        return self.running.program, self.meshes, self.target, self.request

    def find(self) -> SearchResult:
        """Search, and read no plan back."""
        return find(*self.problem, like=self.like)

    def again(self, found: SearchResult) -> SearchResult:
        """Continue a search on its best mesh, with this search's request."""
        return search_again(found, self.request)

    def plan(self, found: SearchResult | None = None) -> PlanData:
        """Return the plan of a search result.

        Args:
          found: the result; None: search, and compile where `refine` says so.
        Raises:
          InfeasiblePlanError: nothing fits.
        """
        if not self.refine:
            return self.told((found or self.find()).plan())
        # The most promising plan that the compiler makes fastest.
        candidates = make_candidates(*self.problem, int(self.refine))
        return self.told(
            refine(
                [self.placed(c) for c in candidates],
                judge_of(self.traced, self.what, self.target),
                self.request.whole_budget_bytes,
                self._within,
                self.request.deadline,
            )
        )

    def told(self, plan: PlanData) -> PlanData:
        """Return the plan with the user's function's fingerprint and source lines."""
        mine = fingerprint(self.traced.program, plan.mesh_axes)
        program = apply_passes(self.traced, plan.transforms).program
        return with_lines(replace(plan, fingerprint=mine), program)

    def placed(self, candidate: PlanCandidate) -> PlanCandidate:
        """Return the candidate on the user's mesh, where one was given."""
        if self.mesh is None or processes_of_mesh(self.mesh):
            # Compiling for devices of several processes would wait for them all.
            return candidate
        return replace(candidate, plan=on_mesh(candidate.plan, self.mesh))

    def held(self, found: SearchResult) -> SearchResult:
        """Search again on the best mesh of a result, with this search's pins and
        budget; see `search_held`."""
        return search_held(found, self.request)

    def _within(self, budget_bytes: int) -> PlanCandidate | None:
        less = replace(self.request, memory_budget_bytes=budget_bytes)
        try:
            plan = replace(self, request=less).find().plan()
        except InfeasiblePlanError:
            return None
        return self.placed(PlanCandidate("less memory", plan))


@dataclass(frozen=True, slots=True, eq=False)
class VariantCandidate:
    """A program with passes, searched.

    Attributes:
      search: the search of the program, with the request's own level.
      found: its result, or that of a brief search.
      name: the passes applied to the baseline, for messages.
      done: these passes.
    """

    search: Search
    found: SearchResult
    name: str = "baseline"
    done: tuple[Transform, ...] = ()

    @property
    def step_s(self) -> float:
        """Predicted step in seconds; infinite where nothing fits."""
        return self.found.step_s

    @property
    def peak_bytes(self) -> int:
        """Peak of the plan in bytes, or the smallest peak where nothing fits."""
        solution = self.found.best.solution
        return int(solution.peak if self.found.fits else solution.smallest_peak)

    def is_better(self, other: VariantCandidate) -> bool:
        """Whether it is faster, or nearer to fitting where neither fits."""
        if self.found.fits or other.found.fits:
            return self.step_s < other.step_s
        return self.peak_bytes < (1 - MIN_GAIN) * other.peak_bytes

    def again(self, **changes: Any) -> VariantCandidate:
        """Continue the search of the best mesh, with other options."""
        found = self.search.asking(**changes).again(self.found)
        return replace(self, found=found)

    def alone(self) -> VariantCandidate:
        """Return the search limited to the best mesh, without progress reports."""
        found = self.found
        found = replace(found, solved=found.solved[:1], request=found.request.quiet)
        return replace(self, search=self.search.quiet(found.mesh_axes), found=found)


Passes = tuple[Transform, ...]
"""Passes that are applied to a program, in this order."""


@dataclass(eq=False, kw_only=True)
class Variants(Decision[Passes, VariantCandidate]):
    """Variants of a program, each planned briefly with shardings of its own; each
    search starts from the fastest so far.

    Attributes:
      search: the search of the baseline, with the request's own level.
      meshes: the candidate meshes of variants; None: those of the baseline.
      after: passes → the search of the baseline with these applied.
      find: searches a variant.
    """

    search: Search
    make: Callable[[Passes], VariantCandidate] = field(init=False)
    refusals: tuple[type[Exception], ...] = field(
        default=(MicrobatchError,), init=False
    )
    meshes: Sequence[MeshAxes] | None = None
    after: Callable[[Sequence[Transform]], Search] = field(init=False)
    find: Callable[[Search], SearchResult] = lambda search: search.brief.find()

    def __post_init__(self) -> None:
        self.after = self.search.after
        self.rank = lambda variant: (variant.step_s, variant.peak_bytes)
        self.deadline = self.search.request.deadline

    def variant(
        self, name: str, done: Sequence[Transform], *, must_win: bool = False
    ) -> VariantCandidate | None:
        """Plan a variant; None where the program does not allow the passes, or the
        time is up.

        Args:
          name: for messages.
          done: the passes.
          must_win: stop as soon as it is proved not to be the one to take.
        """

        def make(done: Passes) -> VariantCandidate:
            search = self.after(done)
            if self.meshes is not None:
                search = search.on(*self.meshes)
            asked = search
            if self.plans:
                like = self.fastest().found
                asked = replace(search, like=like if like.fits else None)
            if must_win:
                asked = asked.asking(cutoff_s=self.cutoff_s)
            return VariantCandidate(search, self.find(asked), name, done)

        self.make = make
        return self.plan((*done,))

    def begin(self, written: VariantCandidate) -> VariantCandidate:
        """Record the baseline, which is planned already."""
        self.first = ()
        self.plans[()] = written
        return written

    @property
    def tried(self) -> list[VariantCandidate]:
        """All variants so far, the baseline first."""
        return [*self.plans.values()]

    @property
    def cutoff_s(self) -> float:
        """The step in seconds below which a variant is the one to take."""
        return min(self.enough_s, *(t.step_s for t in self.tried))

    def may_win(self, estimate_s: float) -> bool:
        """Whether a variant of some estimated step may be the one to take."""
        return (1 - NEAR) * estimate_s < self.cutoff_s


def peaks_text(tried: Iterable[VariantCandidate]) -> str:
    """Return the smallest peaks of variants, for errors."""
    peaks = ", ".join(f"{t.name} {format_bytes(t.peak_bytes)}" for t in tried)
    return f"smallest peaks: {peaks}"


def nothing_fits(
    tried: Sequence[VariantCandidate], intro: str = ""
) -> InfeasiblePlanError:
    """Return the error of the variant that comes nearest to the budget.

    Args:
      tried: all variants, none of which fits.
      intro: what to say before.
    """
    nearest = min(tried, key=lambda t: t.peak_bytes)
    try:
        nearest.found.plan()
    except InfeasiblePlanError as error:
        if len(tried) == 1 and not intro:
            return error
        return InfeasiblePlanError(
            f"{intro}{error.what}",
            where=error.where,
            numbers=f"{error.numbers}; {peaks_text(tried)}",
            fix=error.fix,
        )
    raise InternalError(
        f"A plan of `{nearest.search.traced.name}` over its memory budget was read"
        " back.",
        numbers=f"peak {format_bytes(nearest.peak_bytes)}",
    )


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    """The search that gave a plan, and that of the recipes that it is compared with.

    Attributes:
      own: the search of the plan, and its result.
      recipes: the search of the program that the recipes are applied to, and its
        result: the user's program where that fits.
    """

    own: VariantCandidate
    recipes: VariantCandidate

    @property
    def search(self) -> Search:
        """The search of the plan."""
        return self.own.search

    @property
    def found(self) -> SearchResult:
        """The result that the plan was read from."""
        return self.own.found

    pinned_search = search

    def planned_with(self, search: Search) -> tuple[PlanData, Solved] | None:
        """Plan with another search's pins and budget, and with this one's passes.

        Returns:
          The plan, and the searches that gave it; None where nothing fits.
        Raises:
          PinError: an op cannot produce what is pinned.
        """
        found = search.held(self.found)
        if not found.fits:
            return None
        own = replace(self.own, search=search, found=found)
        return search.plan(found), Solved(own, self.recipes).alone()

    def alone(self) -> Solved:
        """Return both searches limited to the best mesh, without progress reports."""
        own = self.own.alone()
        is_one = self.recipes.found is self.found
        return Solved(own, own if is_one else self.recipes.alone())
