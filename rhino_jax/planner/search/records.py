"""The request of a search, its limits (what it leaves out, and where it stops), and the
records that its passes exchange.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rhino_jax.analysis.graph import Node
from rhino_jax.cost.corrections import NO_CORRECTIONS, CostCorrections
from rhino_jax.ir.spec import Spec
from rhino_jax.model.build import MeshModel
from rhino_jax.model.strategies import Strategy
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.resolved_pins import ValuePin
from rhino_jax.planner.search.symmetry import Symmetry
from rhino_jax.recipes.recipe_book import RecipeBook
from rhino_jax.solver.least_peak import least_possible
from rhino_jax.solver.overlap import Overlap
from rhino_jax.solver.problem import Labels, Problem
from rhino_jax.solver.restricted import Restrictions
from rhino_jax.solver.solve import Solution
from rhino_jax.units import format_bytes, format_share


MeshAxes = Sequence[tuple[str, int]]
"""(Name, size) of the axes of a mesh, major first."""

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
      progress: called with new best objectives and bounds, in seconds, or None.
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
    progress: Progress | None = field(default=None, compare=False)

    def begun(self, started: float) -> Request:
        """Return the request with the deadline of its time limit.

        Args:
          started: `time.monotonic()` when the search began.
        """
        deadline = started + (self.time_limit_s or math.inf)
        return replace(self, deadline=min(self.deadline, deadline))

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.deadline

    @property
    def quiet(self) -> Request:
        """The request without reports of passes and of progress."""
        return replace(self, watch=None, progress=None)

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

    @property
    def divided_peak(self) -> float:
        """The peak in bytes if every value were divided evenly over all devices: a
        lower bound on the memory of pipeline stages of the same program."""
        return least_possible(self.model.problem, self.devices)

    @property
    def firsts(self) -> list[Node]:
        """The first node of every orbit."""
        return [self.model.graph.nodes[n] for n in self.symmetry.first]

    def most_cut(self, left: Restrictions) -> Labels:
        """Return recipes taken literally: every orbit is sharded over as many mesh axes
        as the recipe allows."""
        return self.book.most_cut(self.firsts, left)

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

    @property
    def model(self) -> MeshModel:
        """The costs of the searched problem."""
        return self.mesh_problem.model

    @property
    def labels(self) -> Labels:
        """The option of every node; a plan must fit."""
        assert self.solution.labels is not None, "nothing fits"
        return self.solution.labels

    @property
    def overlapped_s(self) -> float:
        """Compute time of all nodes in seconds, behind which collectives may hide."""
        return self.mesh_problem.overlap.compute.objective(self.labels)

    def strategy(self, node: int) -> Strategy:
        """Return the strategy that a node takes."""
        return self.model.options[node].strategies[self.labels[node]]

    def compute_s(self, node: Node) -> float:
        """Return the seconds of a node's compute, in all of its runs."""
        seconds = self.model.options[node.id].compute_s
        return node.count * float(seconds[self.labels[node.id]]) if seconds.size else 0

    def flops(self, node: Node) -> float:
        """Return the FLOPs of a node on one device, in all of its runs."""
        flops = self.model.options[node.id].flops
        return node.count * float(flops[self.labels[node.id]]) if flops.size else 0

    def seconds(self, place: Callable[[int, int], int]) -> np.ndarray:
        """Return the seconds of nodes in all runs, [nodes], with the reshards of edges.

        Args:
          place: (source, target) of an edge → the node that its reshard counts for.
        """
        problem, labels = self.model.problem, self.labels
        found = np.array([c[k] for c, k in zip(problem.costs, labels, strict=True)])
        for source, target, table in problem.edges:
            found[place(source, target)] += table[labels[source], labels[target]]
        return found


@dataclass(frozen=True, slots=True)
class PlanCandidate:
    """A plan to compile.

    Attributes:
      name: "best", a recipe, "fsdp@matmul" (a recipe that is annotated around matmuls
        only), "fsdp@batch" (one whose parameters, optimizer state and batch alone are
        annotated), "less communication", "more communication", or "best on 2x4"
        (another mesh).
      plan: the plan.
    """

    name: str
    plan: PlanData


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """Limits of the search.

    Attributes:
      most_meshes: maximum number of meshes whose models are retained, as candidates for
        the compiler.
      node_s: cost of a search per node, in seconds on one core, at level "best" and
        unfolded. With `cell_s` it fits the time of 21 models on meshes of one to three
        axes (57 problems, 21 of them of `bench.holdout`), to a factor of 1.7 in the
        geometric mean and of 5.5 at worst.
      cell_s: cost of a search per pair of options of two neighbours, in seconds.
      unfolded_s: a problem whose search takes no longer than this, in seconds, is not
        folded: people do not mind a second (Nielsen, Usability Engineering, 1993,
        chapter 5).
      another_axis_s: cost of a mesh with one more axis per pair of options of the
        folded problem with one fewer, in seconds on one core, at level "fast": the
        median of 23 models from a third axis, of 0.8e-6 to 8e-6; pairs become 7 to 25
        times as many.
      meshes_s: seconds that meshes of three and more axes may take by that estimate,
        where no mesh is given and time is not limited: after ten, people turn to
        something else (same source).
      meshes_share: share of the time limit that they may take where there is one; the
        best of them is then searched to the end.
      second_axis_gain: share of the step time that meshes of two axes must have gained
        over those of one: less than the three digits of tables tell.
      axis_gain: share of the step time that meshes of one more axis must have gained
        over those of two or more, before one of them is chosen, or meshes of yet
        another axis are tried. GPT 7B on 1,024 H100 gained 0.4 % by a third axis in the
        comparison; searched to the end, with its variants, the mesh of two is 2 %
        faster, and takes a fifth of the time.
      recipes_share: share of the remaining time that recipes may take, where time is
        limited. The search starts from them, and finds plans that they exclude.
      prediction_error: error of the ratio of two plans' predicted step times against
        the ratio of their compiled ones: plans whose predicted step is further than
        this above the best one's are not compiled for comparison.
      brief_error: share by which the excess of local search over full search may differ
        between meshes of a program: of seven models on 2 to 6 meshes each, up to 1.5 %
        on those that were within 3 % of the best. Two full searches of one mesh, from
        other starts, differ by up to 3 % (`Effort.near`): by 2.3 % for moe-tiny on
        v5e:4x4, whose best mesh is found.
      arithmetic_share: share of an op's seconds from which on its arithmetic is said to
        be all of them: padding and rates are rounded.
      communication_weights: factors on the cost of communication, under which the
        runners-up are searched for the compiler to compare.
      most_pins: maximum number of pins that are dropped one by one to find those that
        prevent a plan from fitting; each costs a search for the smallest peak.
      minimum_axes: maximum number of axes of the meshes on which the smallest peak is
        searched for, where several may be taken: those of more axes hold as little
        where dims divide, and their options take ten times as long to enumerate.
      unlike_gain: share by which repeated nodes that choose differently must be able to
        lower the smallest peak: they are then searched unfolded, in ten times the time.
      loop_parts: number of parts into which the slices of a loop's stacked residuals
        are divided; the first parts may be saved and the others recomputed.
      late_times: number of times of backward tasks that are told apart in the choice of
        what a stage recomputes: values recomputed between two of them count as live at
        once.
      most_visited: maximum number of values visited to find the update that a gradient
        is for; a gradient farther away is not named after its parameter.
    """

    most_meshes: int = 3
    node_s: float = 3.4e-4
    cell_s: float = 3.5e-7
    unfolded_s: float = 1.0
    another_axis_s: float = 2.1e-6
    meshes_s: float = 10.0
    meshes_share: float = 0.5
    second_axis_gain: float = 0.001
    axis_gain: float = 0.01
    recipes_share: float = 0.4
    prediction_error: float = 0.3
    brief_error: float = 0.03
    arithmetic_share: float = 0.99
    communication_weights: tuple[float, ...] = (2.0, 0.5)
    most_pins: int = 8
    minimum_axes: int = 2
    unlike_gain: float = 0.01
    loop_parts: int = 8
    late_times: int = 12
    most_visited: int = 64

    @property
    def recipe_worth(self) -> float:
        """Ratio of a recipe's step time to the best recipe's so far beyond which it is
        not searched to the end: it would not be compiled, only be listed in the plan's
        table, with a step that is not the smallest of that recipe."""
        return 1 + self.prediction_error

    def search_s(self, problem: Problem) -> float:
        """Return the estimated seconds of a search of a problem on one core."""
        cells = sum(edge.table.size for edge in problem.edges)
        return self.node_s * len(problem.costs) + self.cell_s * cells


LIMITS = SearchLimits()
