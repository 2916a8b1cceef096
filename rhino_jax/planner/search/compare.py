"""Comparison of meshes: all of them briefly, then those that may be the best.

A local search from the recipes' choices takes a fraction of the time of a full search,
and ends above it by about the same share on all meshes of a program with the same
number of axes: 0 to 1.5 % for most programs, 2 to 61 % for a transformer of two layers.
Of each number of axes the mesh that looks best is searched in full, and those that may
be better if their local search ended as far above; where a search takes less than a
second, all of them, each until its bound exceeds the best step so far.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.plan.records import CUT_BY_CLOCK
from rhino_jax.planner.search.folding import first_choices
from rhino_jax.planner.search.mesh_problem import build_mesh_problem
from rhino_jax.planner.search.passes import SOLVE
from rhino_jax.planner.search.records import (
    LIMITS,
    MeshAxes,
    MeshProblem,
    Request,
    SolvedMesh,
)
from rhino_jax.solver.incumbents import EFFORTS, Effort
from rhino_jax.solver.problem import Labels
from rhino_jax.solver.solve import Solution


COMPARED = replace(EFFORTS["fast"], max_starts=2, max_fusions=0)
"""Effort by which the best meshes are compared; the best is searched again."""

BRIEF = replace(COMPARED, max_rounds=0, max_weights=1, max_prices=0)
"""Effort by which all meshes are compared first: local search alone."""


BoundAxes = Callable[[int, float, SolvedMesh | None], float]
"""See `Comparison.bound_axes`."""


@dataclass(slots=True, eq=False)
class Comparison:
    """A comparison of meshes.

    Attributes:
      analysis: the program.
      request: budget, pins and limits.
      solved: the best few meshes, the best first.
      objectives: sizes of a mesh's axes → the shortest step found there, in seconds.
      left_s: remaining seconds that meshes of three and more axes may take.
      cells: number of axes → pairs of options of the largest folded problem.
      left_out: reason → number of meshes of three and more axes left out.
      untimely: number of meshes, of any number of axes, for which no time was left.
      nothing_fits: whether memory is exceeded on any mesh of so many devices.
      bound_axes: called with a number of axes and the best mesh so far after all meshes
        of that number, and with 0 and None before any is searched; and with the
        smallest compute seconds of any choice on meshes of up to two axes of several
        devices. Returns the seconds that further meshes must be shorter than, or raises
        where none can be.
      least_s: the smallest compute seconds of any choice, where there is a bound.
      worth_s: the seconds that a mesh must be shorter than to be searched in full.
      full: sizes of the axes of meshes that were searched in full.
    """

    analysis: ProgramAnalysis
    request: Request
    solved: list[SolvedMesh] = field(default_factory=list)
    objectives: dict[tuple[int, ...], float] = field(default_factory=dict)
    bound_axes: BoundAxes | None = None
    least_s: float = 0.0
    worth_s: float = math.inf
    full: set[tuple[int, ...]] = field(default_factory=set)
    left_s: float = field(init=False)
    cells: Counter[int] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    untimely: int = 0
    nothing_fits: bool = False

    def __post_init__(self) -> None:
        limit_s, share = self.request.time_limit_s, LIMITS.meshes_share
        self.left_s = LIMITS.meshes_s if limit_s is None else share * limit_s

    def _may_try(self, num_axes: int) -> bool:
        """Whether to try a mesh of so many axes; if so, deduct its time."""
        if self.nothing_fits:
            return False
        if num_axes <= 2:
            return True
        every = self.objectives.items()
        fewer = min((s for n, s in every if len(n) < num_axes - 1), default=math.inf)
        last = min((s for n, s in every if len(n) == num_axes - 1), default=math.inf)
        takes_s = LIMITS.another_axis_s * self.cells[num_axes - 1]
        why = f"the axis before gained less than {LIMITS.axis_gain:.0%}"
        if math.isinf(fewer) or last <= (1 - LIMITS.axis_gain) * fewer:
            if takes_s <= self.left_s:
                self.left_s -= takes_s
                return True
            why = "the program is large"
        self.left_out[why] += 1
        return False

    def run(self, meshes: Sequence[MeshAxes]) -> None:
        """Compare meshes, fewest axes first."""
        built: dict[tuple[tuple[str, int], ...], MeshProblem] = {}
        if self.bound_axes is not None:  # Compute bounds a step.
            built = {
                tuple(axes): build_mesh_problem(self.analysis, axes, self.request)
                for at, axes in enumerate(meshes)
                if not at or sum(size > 1 for _, size in axes) <= 2
            }
            computes = (of.overlap.compute.costs for of in built.values())
            self.least_s = min(sum(float(c.min()) for c in costs) for costs in computes)
            self.worth_s = self.bound_axes(0, self.least_s, None)
        for num_axes, group in groupby(meshes, key=len):
            brief: list[SolvedMesh] = []
            for axes in group:
                if self.objectives and self.request.is_over:
                    self.untimely += 1
                elif self._may_try(num_axes):
                    brief.append(self._briefly(axes, built.pop(tuple(axes), None)))
                    most = (1 + LIMITS.prediction_error) * self._best_s
                    if not self.solved:  # `worth_s` may be below all: one stays.
                        most = max(most, min(map(_step_s, brief)))
                    brief = [f for f in brief if _is_small(f) or _step_s(f) <= most]
            excess = math.inf  # Unknown until the first full search.
            for found in sorted(brief, key=_step_s):
                is_near = math.isinf(excess) or _step_s(found) < excess * self._best_s
                if is_near or _is_small(found):
                    searched = self._further(found)
                    told = 1.0 + LIMITS.brief_error
                    if 0 < _step_s(searched) < math.inf:
                        told *= _step_s(found) / _step_s(searched)
                    excess = told if math.isinf(excess) else max(excess, told)
                    self._take(searched)
            self._take(*brief)
            if self.bound_axes is not None and self.solved:
                best = self.solved[0]
                self.worth_s = self.bound_axes(num_axes, self.least_s, best)

    @property
    def in_order(self) -> tuple[tuple[tuple[int, ...], float], ...]:
        """Sizes and objectives of all meshes, the best first."""
        return tuple(
            sorted(self.objectives.items(), key=lambda of: _rank(of[1], len(of[0])))
        )

    def notes(self) -> list[str]:
        """Return notes on the meshes that were left out, and on those that were not
        taken although a brief search found a shorter step there."""
        (chosen, step_s), *_ = self.in_order
        faster = [s for s in self.objectives.values() if s < step_s]
        notes = [
            f"{CUT_BY_CLOCK} was over before mesh shapes were compared:"
            f" {self.untimely}. Give mesh= to plan on one."
        ] * bool(self.untimely)
        notes += [
            f"mesh shapes of three or more axes that were not tried, because {why}:"
            f" {count}. Give mesh= to plan on one."
            for why, count in self.left_out.items()
        ]
        if faster and min(faster) < step_s * (1 - 1e-3):
            notes.append(
                f"a mesh of more than {len(chosen)} axes was faster by"
                f" {1 - min(faster) / step_s:.1%} in the comparison. It is taken where"
                f" each axis gains {LIMITS.axis_gain:.0%}: searches take ten times as"
                " long on it. Give mesh= to plan on it."
            )
        return notes

    @property
    def _best_s(self) -> float:
        return min(self.worth_s, *self.objectives.values(), math.inf)

    def _briefly(self, axes: MeshAxes, built: MeshProblem | None) -> SolvedMesh:
        """Run a local search on one mesh; a full search where memory binds, or no
        recipe gives a start."""
        mesh_problem = built or build_mesh_problem(self.analysis, axes, self.request)
        starts = first_choices(mesh_problem)
        if not starts:
            return self._solve(mesh_problem, self._compared(len(axes)), starts)
        worth_s = (1 + LIMITS.prediction_error) * self._best_s
        brief = replace(BRIEF, worth_s=worth_s)
        found = self._solve(mesh_problem, brief, starts)
        solution = found.solution
        if solution.labels is not None and solution.dual is None:
            return found  # Memory does not limit the choice.
        effort = self._compared(len(axes))
        return self._solve(mesh_problem, effort, starts, solution)

    def _compared(self, num_axes: int) -> Effort:
        """Return the effort for a mesh of so many axes, up to the seconds from which on
        it is not the best."""
        known = (_rank(step_s, len(axes)) for axes, step_s in self.objectives.items())
        least_s = min(known, default=math.inf) / _rank(1.0, num_axes)
        return replace(COMPARED, cutoff_s=min(self.worth_s, least_s))

    def _further(self, brief: SolvedMesh) -> SolvedMesh:
        """Search a mesh in full from its brief result, unless proved not the best."""
        solution, is_full = brief.solution, _sizes(brief.mesh_problem) in self.full
        is_proved = solution.bound > 0 and solution.gap <= COMPARED.near
        if solution.labels is None or is_full or is_proved:
            return brief
        best = self.solved[0].solution.last if self.solved else None
        if best and solution.last and _is_small(brief):
            # The weight that bounds the best mesh bounds others, too.
            solution = replace(solution, last=(best[0], solution.last[1]))
        effort = self._compared(len(_sizes(brief.mesh_problem)))
        return self._solve(brief.mesh_problem, effort, [], solution)

    def _solve(
        self,
        mesh_problem: MeshProblem,
        effort: Effort,
        starts: Sequence[Labels],
        before: Solution | None = None,
    ) -> SolvedMesh:
        quiet, report = replace(self.request, progress=None), self.request.progress
        found = SOLVE.run(quiet.watch, mesh_problem, effort, quiet, starts, before)
        sizes = _sizes(mesh_problem)
        if effort.max_rounds:
            self.full.add(sizes)
        edges = mesh_problem.folded.problem.edges
        cells = sum(e.table.size for e in edges)
        self.cells[len(sizes)] = max(self.cells[len(sizes)], cells)
        if found.solution.unfit is not None:
            limit = found.model.problem.limit
            self.nothing_fits |= mesh_problem.divided_peak > limit
        known_s = self.objectives.get(sizes, math.inf)
        self.objectives[sizes] = min(known_s, found.solution.objective)
        if report is not None and math.isfinite(self._best_s):
            report(self._best_s, None)
        return found

    def _take(self, *found: SolvedMesh) -> None:
        """Add results to the best few meshes; of each mesh, the first result counts."""
        known = {f.model.mesh.signature for f in self.solved}
        new = [f for f in found if f.model.mesh.signature not in known]
        every = sorted(
            [*self.solved, *new],
            key=lambda f: _rank(_step_s(f), len(f.model.mesh.axes)),
        )
        self.solved = every[: LIMITS.most_meshes]


def _sizes(mesh_problem: MeshProblem) -> tuple[int, ...]:
    return tuple(axis.size for axis in mesh_problem.model.mesh.axes)


def _is_small(found: SolvedMesh) -> bool:
    """Whether a mesh is searched until its bound exceeds the best step so far: local
    search alone may end far above that."""
    return LIMITS.search_s(found.mesh_problem.overlap.problem) <= LIMITS.unfolded_s


def _step_s(found: SolvedMesh) -> float:
    return found.solution.objective


def _rank(step_s: float, num_axes: int) -> float:
    """Return the seconds by which meshes are ordered.

    Each axis has to gain something: the second what tables show, and those after it
    more, since all later searches on the mesh take ten times as long with one, and end
    farther from the optimum.
    """
    second, more = min(num_axes - 1, 1), max(num_axes - 2, 0)
    gains = 1 - LIMITS.second_axis_gain, 1 - LIMITS.axis_gain
    return step_s / (gains[0] ** second * gains[1] ** more)
