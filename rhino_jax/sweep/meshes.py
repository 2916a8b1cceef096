"""Search of the best mesh within every budget, for configurations that differ in these.

The optimum without a memory limit is optimal within every budget that it fits, and its
lower bound holds within every budget. So each mesh is first searched without a limit,
which is quick; then within the budgets, the largest first. Meshes whose bound cannot
beat the best result by more than the search's tolerance are skipped.

Inputs and results are plain data, so that other processes can search as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.hardware.target import Device, Target
from rhino_jax.ir.program import Program
from rhino_jax.plan.records import Predicted
from rhino_jax.planner.meshes import MeshAxes
from rhino_jax.planner.search.compare import COMPARED
from rhino_jax.planner.search.driver import distinct_meshes
from rhino_jax.planner.search.mesh_problem import build_mesh_problem
from rhino_jax.planner.search.passes import SOLVE
from rhino_jax.planner.search.read_back.assemble import costs_of
from rhino_jax.planner.search.recipe_choices import first_choices
from rhino_jax.planner.search.records import MeshProblem, Request, SolvedMesh
from rhino_jax.solver.incumbents import EFFORTS, Effort
from rhino_jax.solver.problem import Labels
from rhino_jax.sweep.point import Counts
from rhino_jax.utils.gc import no_garbage_collection


@dataclass(frozen=True, slots=True)
class BudgetJobs:
    """Configurations that differ in their budgets alone, to be searched.

    Attributes:
      number: number of the program, after its passes; see `Meshes`.
      target: the hardware.
      meshes: the meshes to compare.
      request: options of the search, without budget.
      budgets: bytes per device.
      level: "fast": meshes are searched as for a comparison; "best": with further
        search.
    """

    number: int
    target: Target
    meshes: tuple[MeshAxes, ...]
    request: Request
    budgets: tuple[int, ...]
    level: str


@dataclass(frozen=True, slots=True)
class Best:
    """The best choice within a budget.

    Attributes:
      axes: (name, size) of its mesh.
      predicted: predicted cost; None if nothing fits.
      made_for: the budget with which its model was built, or for which it was planned,
        in bytes per device.
      labels: index of the chosen strategy by node; None if nothing fits, or if passes
        were chosen, too.
      bound_s: proved lower bound of the step on this mesh, in seconds.
      smallest_peak: lowest peak, in bytes per device, of all candidates met.
    """

    axes: MeshAxes
    predicted: Predicted | None
    made_for: int
    labels: Labels | None = None
    bound_s: float = 0.0
    smallest_peak: float = math.inf


@dataclass(slots=True, eq=False)
class Meshes:
    """Searches of meshes, with a cache of what they share.

    Attributes:
      programs: programs by number.
      analyses: analyses by number of the program, and device.
      counts: work of all searches.
    """

    programs: dict[int, Program] = field(default_factory=dict)
    analyses: dict[tuple[int, Device], ProgramAnalysis] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)

    def number(self, program: Program) -> int:
        """Return the number of a program; the same object has the same number."""
        for number, known in self.programs.items():
            if known is program:
                return number
        number = len(self.programs)
        self.programs[number] = program
        return number

    def analysis(self, number: int, target: Target) -> ProgramAnalysis:
        """Return a program's analysis, shared by targets of one kind of device."""
        key = number, target.device
        found = self.analyses.get(key)
        if found is None:
            found = self.analyses[key] = ProgramAnalysis.of(
                self.programs[number], target
            )
        return replace(found, target=target)

    @no_garbage_collection()
    def best(self, job: BudgetJobs) -> dict[int, Best]:
        """Return budget → the best choice on any of the meshes.

        Raises:
          RhinoError: a mesh has no choice, whatever the budget.
        """
        analysis = self.analysis(job.number, job.target)
        every = [
            _Mesh.of(analysis, tuple(axes), job)
            for axes in distinct_meshes(job.meshes, job.target)
        ]
        found, ruled_out = {}, 0
        for budget in sorted(set(job.budgets), reverse=True):
            best: _Mesh | None = None
            every.sort(key=lambda mesh: mesh.worth)
            for mesh in every:
                if best is not None and not mesh.may_beat(best.worth[0]):
                    ruled_out += 1
                    continue
                mesh.search(budget)
                if best is None or mesh.worth < best.worth:
                    best = mesh
            assert best is not None
            found[budget] = best.result()
        searches, reused = sum(m.searches for m in every), sum(m.reused for m in every)
        self.counts += Counts(len(every), searches, reused, ruled_out)
        return found


@dataclass(slots=True, eq=False)
class _Mesh:
    """One mesh, and the state of its search.

    Attributes:
      axes: (name, size).
      problem: built for the smallest budget, which decides which copies are left out.
      priced_bytes: that budget.
      starts: choices of the recipes, as hints.
      effort, request: limits and options of the search.
      floor_s: proved lower bound of the step within any budget, in seconds.
      last: result within the smallest budget so far, or without any.
      searches, reused: number of searches, and of budgets that needed none.
    """

    axes: MeshAxes
    problem: MeshProblem
    priced_bytes: int
    starts: list[Labels]
    effort: Effort
    request: Request
    floor_s: float = 0.0
    last: SolvedMesh | None = None
    searches: int = 0
    reused: int = 0

    @classmethod
    def of(cls, analysis: ProgramAnalysis, axes: MeshAxes, job: BudgetJobs) -> _Mesh:
        """Return the mesh with its lower bound, if it is compared with others."""
        priced = min(job.budgets)
        request = replace(job.request, memory_budget_bytes=priced)
        problem = build_mesh_problem(analysis, axes, request)
        effort = COMPARED if job.level == "fast" else EFFORTS[job.level]
        mesh = cls(axes, problem, priced, first_choices(problem), effort, request)
        # A single mesh needs no bound for comparisons.
        if len(job.meshes) > 1:
            mesh.search(math.inf)
        return mesh

    def search(self, budget: float) -> None:
        """Search within a budget that is not larger than those before."""
        if self.last is not None:
            labels = self.last.solution.labels
            # If nothing fits a budget, nothing fits a smaller one.
            if labels is None or self.last.solution.peak <= budget:
                self.reused += 1
                return
            self.starts = [labels, *self.starts]
        self.searches += 1
        mine = self.problem.within(budget)
        self.last = SOLVE.run(None, mine, self.effort, self.request, None, self.starts)
        self.floor_s = max(self.floor_s, self.last.solution.bound)

    def may_beat(self, step_s: float) -> bool:
        """Whether this mesh may be faster, by more than the search's tolerance."""
        return self.floor_s < (1 - self.effort.near) * step_s

    @property
    def worth(self) -> tuple[float, float]:
        """Sort key, lowest best: seconds of the step, then the memory needed."""
        if self.last is None:
            return 0.0, 0.0
        solution = self.last.solution
        step_s = math.inf if solution.labels is None else solution.objective
        return step_s, solution.smallest_peak

    def result(self) -> Best:
        """Return the result as data."""
        assert self.last is not None
        solution, predicted = self.last.solution, None
        if solution.labels is not None:
            predicted = costs_of(self.last.mesh_problem, solution.labels)[0]
        return Best(
            self.axes,
            predicted,
            self.priced_bytes,
            solution.labels,
            solution.bound,
            solution.smallest_peak,
        )
