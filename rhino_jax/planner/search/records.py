"""What the search is asked for, and what it carries from step to step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rhino_jax.ir.spec import Spec
from rhino_jax.model.build import MeshModel
from rhino_jax.plan.pins.interior import ValuePin
from rhino_jax.planner.search.folding.symmetry import Symmetry
from rhino_jax.recipes.recipe_book import RecipeBook
from rhino_jax.solver.overlap import Overlap
from rhino_jax.solver.problem import Labels
from rhino_jax.solver.solve import Solution
from rhino_jax.units import format_bytes, format_share


Watch = Callable[[Any, Any], None]
"""Called with a pass and the form that it gave: see `passes`."""

Progress = Callable[[float | None, float | None], None]
"""Called with new best objectives and bounds, in seconds."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for, besides program, mesh and target.

    Attributes:
      memory_budget_bytes: that a plan may hold by prediction, per device.
      reserve_share: share of the whole budget that is not part of that, as of
        `hardware.target.Device`.
      pins: input slot → spec.
      output_pins: output slot → spec.
      value_pins: value id → pin of a value inside of the program.
      level: "fast" or "best".
      time_limit_s: wall-clock limit of the search, or None.
      deadline: `time.monotonic()` at which the search gives what it has; of a request
        that may call for several searches.
      seed: of CP-SAT.
      density: how much of programs plans annotate, "all", "matmul" or "batch", and
        are priced by; see `rhino_jax.plan.density`.
      has_recipes: whether recipes are searched, to be told beside the plan; else their
        first choices only start the search, as for a variant of what has been planned.
      names_pins: whether the error where nothing fits names the pins without which less
        would do, each tried by itself; not where no user wrote them.
      watch: called after every pass, or None.
    """

    memory_budget_bytes: float
    pins: Mapping[int, Spec]
    output_pins: Mapping[int, Spec]
    level: str = "best"
    time_limit_s: float | None = None
    deadline: float = math.inf
    seed: int = 0
    density: str = "all"
    has_recipes: bool = True
    value_pins: Mapping[int, ValuePin] = field(default_factory=dict)
    reserve_share: float = 0.0
    names_pins: bool = True
    watch: Watch | None = field(default=None, compare=False)

    @property
    def whole_budget_bytes(self) -> int:
        """The budget as its user gave it, with what is kept in reserve."""
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
    """A priced model on one mesh, and the recipes' choices in it.

    Attributes:
      model: options and costs of every node.
      overlap: what of the model's costs can hide.
      book: what recipes allow.
      symmetry: which nodes choose alike.
      folded: `overlap` of the orbits.
      recipes: name → choice of all nodes, or None where it is not allowed; empty
        until they are asked for.
      is_cut: the time was over before these were at their best.
      density: as of `Request`.
    """

    model: MeshModel
    overlap: Overlap
    book: RecipeBook
    symmetry: Symmetry
    folded: Overlap
    recipes: dict[str, Labels | None] = field(default_factory=dict)
    is_cut: bool = False
    density: str = "all"

    def within(self, limit: float) -> MeshProblem:
        """The same with another memory limit; what was priced stays as it is."""
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
      mesh_problem: what was searched.
      solution: what was found.
      is_fallback: the time was over before the search.
      is_cut: the time was over before the search was.
    """

    mesh_problem: MeshProblem
    solution: Solution
    is_fallback: bool = False
    is_cut: bool = False
