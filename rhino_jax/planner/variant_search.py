"""One search: the user's program, with or without passes applied, on meshes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.target import Target
from rhino_jax.ir.transform import Transform
from rhino_jax.passes.apply import apply_passes
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
    """A program with its passes, candidate meshes, hardware and search options.

    Attributes:
      traced: the user's function, traced.
      mesh: the mesh that the user gave; None: the best of `meshes`.
      meshes: (name, size) of the axes of each candidate mesh.
      target: the hardware.
      request: memory budget, pins and limits of the search.
      pinned: the user's pins; those of intermediate values are resolved again in every
        variant.
      refine: how many plans to compile and compare; 0: none.
      what: the public call, for messages.
      report: callback for progress.
      transforms: the passes applied so far, by name and choice.
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
        """Return the planned function: the user's function with the passes applied."""
        return apply_passes(self.traced, self.transforms)

    def after(self, transforms: Iterable[Transform]) -> Search:
        """Return the search with these passes applied in addition, after all others."""
        found = replace(self, transforms=(*self.transforms, *transforms))
        program = found.running.program
        pins = resolve_pins(self.pinned, program, self.meshes[-1])
        return replace(found, request=replace(self.request, value_pins=pins.values))

    def asking(self, **changes: Any) -> Search:
        """Return the search with other options, such as another level or budget."""
        return replace(self, request=replace(self.request, **changes))

    def on(self, mesh_axes: tuple[tuple[str, int], ...]) -> Search:
        """Return the search on one mesh alone."""
        return replace(self, meshes=[mesh_axes])

    def on_any(self, meshes: Iterable[tuple[tuple[str, int], ...]]) -> Search:
        """Return the search on the best of some meshes."""
        return replace(self, meshes=list(meshes))

    def find(self) -> SearchResult:
        """Search, and read no plan back."""
        return find(
            self.running.program,
            self.meshes,
            self.target,
            self.request,
            progress=self.report,
        )

    def again(self, found: SearchResult) -> SearchResult:
        """Continue a search on its best mesh, with this search's request."""
        return search_again(found, self.request, progress=self.report)

    def plan(self, found: SearchResult | None = None) -> PlanData:
        """Return the plan of a search result.

        Args:
          found: the result; None: search, and compile where `refine` says so.
        Raises:
          InfeasiblePlanError: nothing fits.
        """
        if self.refine:
            plan = self._refined()
        else:
            plan = (found or self.find()).plan()
        return self.told(plan)

    def told(self, plan: PlanData) -> PlanData:
        """Return the plan with the user's function's fingerprint and source lines."""
        mine = fingerprint(self.traced.program, plan.mesh_axes)
        program = apply_passes(self.traced, plan.transforms).program
        return with_lines(replace(plan, fingerprint=mine), program)

    def _refined(self) -> PlanData:
        """Return the most promising plan that the compiler makes fastest."""
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
        """Search again on the best mesh of a result, with this search's pins and
        budget; see `search_held`."""
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
    """The search that gave a plan, and that of the recipes that it is compared with.

    Attributes:
      search, found: the search of the plan, and its result.
      typed_search, typed: the search of the program that the recipes are applied to,
        and its result: the user's program where that fits.
    """

    search: Search
    found: SearchResult
    typed_search: Search
    typed: SearchResult

    def alone(self) -> Solved:
        """Return both searches limited to the best mesh, without progress reports."""
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
    """Ignore progress."""
