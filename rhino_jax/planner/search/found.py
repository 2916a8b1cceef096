"""The result of a search, before a plan is read back from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rhino_jax.analysis.graph import NodeKind
from rhino_jax.hardware.target import Target
from rhino_jax.plan.decisions import Decisions
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.records import Predicted
from rhino_jax.planner.search.passes import READ_BACK
from rhino_jax.planner.search.read_back.assemble import decisions_by, recipes_of
from rhino_jax.planner.search.records import Request, SolvedMesh


@dataclass(frozen=True, slots=True, eq=False)
class SearchResult:
    """The result of a search, from which a plan can be read back.

    Attributes:
      solved: the searched meshes, the best first.
      compared: where there are several meshes, shapes and objectives of those searched.
      notes: on meshes and recipes left out.
      target, request: see `choose_plan`.
      started: `time.monotonic()` when the search began.
      brief: the result of level "fast" on the best mesh, with which results of other
        brief searches compare; None where there is none.
    """

    solved: list[SolvedMesh]
    compared: tuple[tuple[tuple[int, ...], float], ...]
    notes: Sequence[str]
    target: Target
    request: Request
    started: float
    brief: SolvedMesh | None = None

    @property
    def best(self) -> SolvedMesh:
        """The best mesh, searched."""
        return self.solved[0]

    @property
    def fits(self) -> bool:
        """Whether a plan fits the memory budget on the best mesh."""
        return self.best.solution.labels is not None

    @property
    def step_s(self) -> float:
        """Predicted step of the best mesh in seconds; infinite where nothing fits."""
        return self.best.solution.objective if self.fits else math.inf

    @property
    def at_fast(self) -> SearchResult:
        """The result at level "fast", of which the requested level is no worse; this
        one where only the requested level finds a plan that fits."""
        is_alone = self.fits and (
            self.brief is None or self.brief.solution.labels is None
        )
        if self.brief is None or is_alone:
            return self
        return replace(self, solved=[self.brief, *self.solved[1:]])

    @property
    def compute_s(self) -> float:
        """Compute time of the best mesh in seconds; a plan must fit."""
        return self.best.mesh_problem.overlap.compute.objective(self.best.labels)

    @property
    def stack_copies_s(self) -> float:
        """Seconds of copies into and out of stacks of loops; a plan must fit."""
        model = self.best.model
        return sum(
            node.count * float(model.options[node.id].compute_s[label])
            for node, label in zip(model.graph.nodes, self.best.labels, strict=True)
            if node.kind in (NodeKind.SLICE, NodeKind.STACK)
        )

    @property
    def is_bound_by_memory(self) -> bool:
        """Whether another choice would be cheaper, or fit, with more memory."""
        return not self.fits or self.best.solution.dual is not None

    @property
    def is_too_slow(self) -> bool:
        """Whether every plan on the best few meshes is proved to take longer than the
        request's cutoff, memory left aside."""
        least_s = min(found.solution.bound for found in self.solved)
        return least_s > self.request.cutoff_s

    @property
    def mesh_axes(self) -> tuple[tuple[str, int], ...]:
        """(name, size) of the best mesh's axes."""
        return self.meshes[0]

    @property
    def meshes(self) -> list[tuple[tuple[str, int], ...]]:
        """Axes of the best few meshes, as `mesh_axes`, the best first."""
        meshes = (found.model.mesh for found in self.solved)
        return [tuple((a.name, a.size) for a in mesh.axes) for mesh in meshes]

    def is_same_choice(self, other: SearchResult) -> bool:
        """Whether another result of the same search has the same plan."""
        both = self.fits and other.fits
        return both and np.array_equal(self.best.labels, other.best.labels)

    def decisions(self) -> Decisions:
        """Return the specs of the plan, where there is one."""
        return decisions_by(self.best.mesh_problem, self.best.labels, self.request)

    def recipes(self) -> dict[str, Predicted | None]:
        """Return the predictions for the recipes that the program allows."""
        return recipes_of(self.best.mesh_problem)

    def plan(self) -> PlanData:
        """Read the plan of the best mesh back.

        Raises:
          InfeasiblePlanError: nothing fits; says what conflicts and what would help.
        """
        plan = READ_BACK.run(
            self.request.watch,
            self.target,
            self.request,
            self.best,
            self.started,
            self.compared,
        )
        return replace(plan, notes=(*plan.notes, *self.notes))
