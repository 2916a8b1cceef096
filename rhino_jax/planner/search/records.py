"""The request of a search, and the records that its passes exchange."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rhino_jax.cost.corrections import NO_CORRECTIONS, CostCorrections
from rhino_jax.ir.spec import Spec
from rhino_jax.model.build import MeshModel
from rhino_jax.plan.resolved_pins import ValuePin
from rhino_jax.planner.search.symmetry import Symmetry
from rhino_jax.recipes.recipe_book import RecipeBook
from rhino_jax.solver.overlap import Overlap
from rhino_jax.solver.problem import Labels
from rhino_jax.solver.solve import Solution
from rhino_jax.units import format_bytes, format_share


Watch = Callable[[Any, Any], None]
"""Called with a pass and the form that it returned: see `passes`."""

Progress = Callable[[float | None, float | None], None]
"""Called with new best objectives and bounds, in seconds."""


@dataclass(frozen=True, slots=True)
class Request:
    """The options of a search, other than program, mesh and target.

    Attributes:
      memory_budget_bytes: maximum predicted peak of a plan, per device.
      reserve_share: share of the whole budget that is held back from that, see
        `hardware.target.Device`.
      pins: input slot → spec.
      output_pins: output slot → spec.
      value_pins: value id → pin of an intermediate value.
      level: "fast" or "best".
      time_limit_s: wall-clock limit of the search, or None.
      deadline: `time.monotonic()` at which the search returns its best so far; shared
        by all searches of a request.
      seed: seed of CP-SAT.
      cutoff_s: the search stops once every plan is proved to take longer.
      density: which values of a program are annotated, and costed so: "all", "matmul"
        or "batch"; see `rhino_jax.plan.decisions`.
      has_recipes: whether recipes are searched, for the plan's table; else only their
        first choices start the search, as for a variant of a planned program.
      names_pins: whether the error where nothing fits names the pins without which less
        memory would do, each tried on its own; not where no user wrote them.
      corrections: corrections of costs by programs that were compiled.
      watch: called after every pass, or None.
    """

    memory_budget_bytes: float
    pins: Mapping[int, Spec]
    output_pins: Mapping[int, Spec]
    level: str = "best"
    time_limit_s: float | None = None
    deadline: float = math.inf
    seed: int = 0
    cutoff_s: float = math.inf
    density: str = "all"
    has_recipes: bool = True
    value_pins: Mapping[int, ValuePin] = field(default_factory=dict)
    reserve_share: float = 0.0
    names_pins: bool = True
    corrections: CostCorrections = NO_CORRECTIONS
    watch: Watch | None = field(default=None, compare=False)

    @property
    def whole_budget_bytes(self) -> int:
        """The budget as its user gave it, including the reserve."""
        return int(round(self.memory_budget_bytes / (1 - self.reserve_share), 3))

    @property
    def budget_text(self) -> str:
        """The budget in words, for messages."""
        said = f"memory budget {format_bytes(self.whole_budget_bytes)} per device"
        if not self.reserve_share:
            return said
        return (
            f"{said}, of which {format_bytes(self.memory_budget_bytes)} for what is"
            " predicted, as compiled programs hold up to"
            f" {format_share(self.reserve_share)} of it more"
        )

    def budget_for(self, peak_bytes: float) -> int:
        """Return the smallest whole budget that allows a predicted peak."""
        return math.ceil(round(peak_bytes / (1 - self.reserve_share), 3))


@dataclass(frozen=True, slots=True, eq=False)
class MeshProblem:
    """A cost model on one mesh, and the recipes' choices in it.

    Attributes:
      model: options and costs of every node.
      overlap: the problem with the communication that compute can hide.
      book: the options that recipes allow.
      symmetry: the orbits of nodes that share a choice.
      folded: `overlap` of the orbits.
      recipes: name → labels of all nodes, or None where the recipe does not apply;
        empty until `with_recipes` fills it.
      is_cut: the deadline passed before the recipes were at their best.
      density: see `Request`.
    """

    model: MeshModel
    overlap: Overlap
    book: RecipeBook
    symmetry: Symmetry
    folded: Overlap
    recipes: dict[str, Labels | None] = field(default_factory=dict)
    is_cut: bool = False
    density: str = "all"

    @property
    def devices(self) -> int:
        """The number of devices of the mesh."""
        return math.prod(axis.size for axis in self.model.mesh.axes)

    def within(self, limit: float) -> MeshProblem:
        """Return the problem with another memory limit, its costs unchanged."""
        if limit == self.model.problem.limit:
            return self
        problem = self.model.problem.within(limit)
        return replace(
            self,
            model=replace(self.model, problem=problem),
            overlap=replace(self.overlap, problem=problem),
            folded=replace(self.folded, problem=self.folded.problem.within(limit)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class SolvedMesh:
    """A searched model.

    Attributes:
      mesh_problem: the searched problem.
      solution: its solution.
      is_fallback: the deadline passed before the search began.
      is_cut: the deadline passed before the search was done.
    """

    mesh_problem: MeshProblem
    solution: Solution
    is_fallback: bool = False
    is_cut: bool = False
