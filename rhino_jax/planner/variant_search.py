"""One search: a program, as its user wrote it or with passes done to it, on meshes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.target import Target
from rhino_jax.ir.transform import Transform
from rhino_jax.passes.apply import remade
from rhino_jax.plan.fingerprint import fingerprint
from rhino_jax.plan.lines import with_lines
from rhino_jax.plan.pins.resolve import resolve_pins
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.trees import on_mesh
from rhino_jax.planner.search.candidates import PlanCandidate
from rhino_jax.planner.search.driver import find, make_candidates, search_again
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.held import search_held
from rhino_jax.planner.search.records import Request
from rhino_jax.runtime.processes.agree import processes_of_mesh
from rhino_jax.verify.refine import judge_of, refine


@dataclass(frozen=True, slots=True, eq=False)
class Search:
    """What is planned, and how.

    Attributes:
      traced: the function, as its user wrote it.
      mesh: the mesh that was asked for; None: the best of `meshes`.
      meshes: (name, size) of the axes of those that are compared.
      target: the hardware.
      request: budget, pins and limits.
      pinned: the user's pins; those of values inside are found in every variant anew.
      refine: how many plans to compile; 0: none.
      what: the call that asks, for messages.
      report: is told of progress.
      transforms: the passes that are done before, by name and choice.
    """

    traced: Traced
    mesh: Any
    meshes: list[tuple[tuple[str, int], ...]]
    target: Target
    request: Request
    pinned: Mapping[str, Any]
    refine: int
    what: str
    report: Callable[[float | None, float | None], None]
    transforms: tuple[Transform, ...] = ()

    @property
    def running(self) -> Traced:
        """What is planned: the function with the passes done."""
        return remade(self.traced, self.transforms)

    def after(self, transforms: Iterable[Transform]) -> Search:
        """The same, with these passes done as well, after all others."""
        found = replace(self, transforms=(*self.transforms, *transforms))
        program = found.running.program
        pins = resolve_pins(self.pinned, program, self.meshes[-1])
        return replace(found, request=replace(self.request, value_pins=pins.values))

    def asking(self, **changes: Any) -> Search:
        """The same, with another level, budget, or the like."""
        return replace(self, request=replace(self.request, **changes))

    def on(self, mesh_axes: tuple[tuple[str, int], ...]) -> Search:
        """The same on one mesh alone."""
        return replace(self, meshes=[mesh_axes])

    def on_any(self, meshes: Iterable[tuple[tuple[str, int], ...]]) -> Search:
        """Search the best of some meshes."""
        return replace(self, meshes=list(meshes))

    def find(self) -> SearchResult:
        """Search, and read nothing back."""
        return find(
            self.running.program,
            self.meshes,
            self.target,
            self.request,
            progress=self.report,
        )

    def again(self, found: SearchResult) -> SearchResult:
        """What was found of this program on its best mesh, searched as it is asked for
        now, from there on."""
        return search_again(found, self.request, progress=self.report)

    def plan(self, found: SearchResult | None = None) -> PlanData:
        """The plan of what was found; None: search, and compile where that was asked.

        Raises:
          InfeasiblePlanError: nothing fits.
        """
        if self.refine:
            plan = self._refined()
        else:
            plan = (found or self.find()).plan()
        return self.told(plan)

    def told(self, plan: PlanData) -> PlanData:
        """A plan of this program, for whoever has the function as its user wrote it."""
        mine = fingerprint(self.traced.program, plan.mesh_axes)
        program = remade(self.traced, plan.transforms).program
        return with_lines(replace(plan, fingerprint=mine), program)

    def _refined(self) -> PlanData:
        """The plan that the compiler makes fastest, of the most promising ones."""
        found = make_candidates(
            self.running.program,
            self.meshes,
            self.target,
            self.request,
            self.refine,
            progress=self.report,
        )
        return refine(
            [self._placed(c) for c in found],
            judge_of(self.traced, self.what, self.target),
            self.request.whole_budget_bytes,
            self._within,
            self.request.deadline,
        )

    def _placed(self, candidate: PlanCandidate) -> PlanCandidate:
        if self.mesh is None or processes_of_mesh(self.mesh):
            # Compiling for devices of several processes would wait for them all.
            return candidate
        return replace(candidate, plan=on_mesh(candidate.plan, self.mesh))

    def held(self, found: SearchResult) -> SearchResult:
        """What was found of this program on its best mesh, searched with this one's
        pins and budget; see `search_held`."""
        return search_held(found, self.request, progress=self.report)

    def _within(self, budget_bytes: int) -> PlanCandidate | None:
        less = replace(self.request, memory_budget_bytes=budget_bytes)
        try:
            plan = replace(self, request=less).find().plan()
        except InfeasiblePlanError:
            return None
        return self._placed(PlanCandidate("less memory", plan))


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    """The search that gave a plan, and that of the recipes beside it.

    Attributes:
      search, found: of the plan.
      typed_search, typed: of the program whose recipes stand beside it: as it is
        written where that fits.
    """

    search: Search
    found: SearchResult
    typed_search: Search
    typed: SearchResult

    def alone(self) -> Solved:
        """The same with what holds of the best mesh only, and nobody to tell."""
        found = replace(self.found, solved=self.found.solved[:1])
        typed = found
        if self.typed is not self.found:
            typed = replace(self.typed, solved=self.typed.solved[:1])
        return Solved(
            _quiet(self.search, found), found, _quiet(self.typed_search, typed), typed
        )


def _quiet(search: Search, found: SearchResult) -> Search:
    return replace(
        search.asking(watch=None), meshes=[found.mesh_axes], report=tell_nobody
    )


def tell_nobody(best: float | None, bound: float | None) -> None:
    """Progress that nobody looks at."""
