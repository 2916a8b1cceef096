"""Jobs of a sweep: requests to search or to plan, and their results.

Of configurations that differ in their budgets alone, the best mesh is searched within
every budget. The optimum without a memory limit is optimal within every budget that it
fits, and its lower bound holds within every budget. So each mesh is first searched
without a limit, which is quick; then within the budgets, the largest first. Meshes
whose bound cannot beat the best result by more than the search's tolerance are skipped.

Configurations whose passes are chosen, too (stages, micro-batches, recompute), are
each planned by itself, the largest budget first. The best plan within a budget is the
best within every smaller one that it fits, and is not planned again there. The plan of
a smaller budget is used for a larger one if it is faster.

Requests and results are plain data, so that other processes can search as well.
"""

from __future__ import annotations

import itertools
import math
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import jax

from rhino_jax._compat import open_jaxpr, pickled, type_on
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.errors import RhinoError
from rhino_jax.frontend.call import Signature
from rhino_jax.frontend.leaves import Leaves
from rhino_jax.frontend.registry import has_user_rules
from rhino_jax.frontend.trace import Traced
from rhino_jax.frontend.tracing.captured import CapturedReferences
from rhino_jax.hardware.target import Device, Target
from rhino_jax.ir.program import Program
from rhino_jax.plan.plan import AnyPlan
from rhino_jax.plan.records import Predicted
from rhino_jax.planner.meshes import MeshAxes
from rhino_jax.planner.options import PlanOptions
from rhino_jax.planner.search.compare import COMPARED
from rhino_jax.planner.search.driver import distinct_meshes
from rhino_jax.planner.search.folding import first_choices
from rhino_jax.planner.search.mesh_problem import build_mesh_problem
from rhino_jax.planner.search.passes import SOLVE
from rhino_jax.planner.search.read_back.assemble import costs_of
from rhino_jax.planner.search.records import MeshProblem, Request, SolvedMesh
from rhino_jax.runtime.meshes import make_mesh
from rhino_jax.solver.incumbents import EFFORTS, Effort
from rhino_jax.solver.problem import Labels
from rhino_jax.sweep.point import WHAT, Counts, why_not
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
      analyses: analyses by number of the program, device, and number of devices.
      counts: work of all searches.
    """

    programs: dict[int, Program] = field(default_factory=dict)
    analyses: dict[tuple[int, Device, int | None], ProgramAnalysis] = field(
        default_factory=dict
    )
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
        """Return a program's analysis, shared by targets of equally many devices of
        one kind: how many there are decides what may stay on chip."""
        key = number, target.device, target.num_devices
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
        self.last = SOLVE.run(None, mine, self.effort, self.request, self.starts)
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
            predicted = costs_of(self.last)[0]
        return Best(
            self.axes,
            predicted,
            self.priced_bytes,
            solution.labels,
            solution.bound,
            solution.smallest_peak,
        )


FITS = 0.99
"""Share of a budget up to which a plan made for a larger budget is reused: with a
larger budget, larger copies are left out of the model
(`ModelConstants.small_share`)."""


@dataclass(frozen=True, slots=True)
class BudgetSweep:
    """Configurations that differ in their budgets alone, to be planned.

    Attributes:
      number: number of the function.
      plan_options: options of the plan, without budget.
      mesh: (name, size) of its axes; None: chosen by rhino.
      budgets: bytes per device.
      usable_share: share of a budget that a plan's predicted peak may reach.
    """

    number: int
    plan_options: PlanOptions
    mesh: MeshAxes | None
    budgets: tuple[int, ...]
    usable_share: float = 1.0

    def within(
        self, plan: Callable[[PlanOptions], AnyPlan]
    ) -> dict[int, tuple[int, AnyPlan | RhinoError]]:
        """Return budget → (budget for which the plan was made, the plan or the error).

        Args:
          plan: makes a plan from options.
        """
        made: dict[int, tuple[int, AnyPlan | RhinoError]] = {}
        last: tuple[int, AnyPlan] | None = None
        for budget in sorted(set(self.budgets), reverse=True):
            usable = self.usable_share * budget
            if last is not None and last[1].predicted.peak_bytes <= FITS * usable:
                made[budget] = last
                continue
            try:
                made[budget] = last = budget, plan(self.options_within(budget))
            except RhinoError as error:
                made[budget] = budget, error
        for less, more in itertools.pairwise(sorted(made)):
            made[more] = min(made[more], made[less], key=_step_s)
        return made

    def options_within(self, budget: int) -> PlanOptions:
        """Return the options of the plan within a budget."""
        return replace(self.plan_options, memory_budget_bytes=budget)


def _step_s(made: tuple[int, AnyPlan | RhinoError]) -> float:
    plan = made[1]
    return math.inf if isinstance(plan, RhinoError) else plan.predicted.step_time_s


def best_plans(whole: BudgetSweep, traced: Traced) -> dict[int, Best | str]:
    """Return budget → the best plan's figures, or why there is none."""
    mesh = None if whole.mesh is None else make_mesh(whole.mesh, WHAT)
    made = whole.within(
        lambda plan_options: plan_options.found_with(traced, mesh, None)[0]
    )
    return {
        budget: why_not(plan)
        if isinstance(plan, RhinoError)
        else Best(plan.mesh_axes, plan.predicted, made_for)
        for budget, (made_for, plan) in made.items()
    }


CONFIG = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
)
"""Options of JAX's configuration that traces depend on."""


def to_bytes(traced: Traced) -> bytes | None:
    """Serialize a function for another process to plan, as `of_bytes` reads it.

    None if it contains, or depends on, objects of the user's own code.
    """
    if traced.captured or traced.written is not None or has_user_rules():
        return None
    paths = traced.arguments.array_paths
    config = {name: getattr(jax.config, name) for name in CONFIG}
    program = traced.program
    return pickled(
        (config, traced.name, traced.closed_jaxpr, program, traced.donated, paths)
    )


def of_bytes(data: bytes) -> Traced:
    """Deserialize a function, with flat arguments and without source lines.

    Its cost is the same. JAX is configured as in the sending process.
    """
    config, name, jaxpr, program, donated, paths = pickle.loads(data)
    for key, value in config.items():
        jax.config.update(key, value)
    count = len(paths)
    tree = jax.tree.structure((0,) * count)
    places = tuple(range(count))
    arguments = Leaves(tree, (None,) * count, paths, places, (), places)
    none = Leaves(jax.tree.structure(()), (), (), (), (), ())
    signature = Signature(tree, (), (), places, ())
    captured = CapturedReferences()
    ends = ((), ())
    return Traced(
        name, jaxpr, program, signature, arguments, none, donated, None, captured,
        ends, ends, tuple(type_on(v.aval) for v in open_jaxpr(jaxpr).outvars),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """Result of a search.

    Attributes:
      best: budget → the best choice, or why there is none.
      refused: why there is no result, as a message for the user.
      counts: work of the search.
      cpu_s: CPU seconds since the previous result, or since the process started.
    """

    best: Mapping[int, Best | str] = field(default_factory=dict)
    refused: str = ""
    counts: Counts = field(default_factory=Counts)
    cpu_s: float = 0.0


Task = tuple[BudgetJobs | BudgetSweep, Program | bytes | None]
"""A request, with its program, or its function as serialized by `whole.to_bytes`, the
first time that a process gets a request about it; None later."""


def run_search(
    job: BudgetJobs | BudgetSweep, meshes: Meshes, traced: Traced | None
) -> SearchOutcome:
    """Search with these meshes, or plan this function; return the result."""
    try:
        if isinstance(job, BudgetSweep):
            assert traced is not None
            return SearchOutcome(best_plans(job, traced))
        return SearchOutcome(meshes.best(job))
    except RhinoError as error:
        return SearchOutcome(refused=why_not(error))


@dataclass(slots=True, eq=False)
class JobRunner:
    """Executor of requests in a worker, which caches programs and functions.

    Attributes:
      meshes: searches.
      functions: functions by number.
      used_s: CPU seconds up to the previous result.
    """

    meshes: Meshes = field(default_factory=Meshes)
    functions: dict[int, Traced] = field(default_factory=dict)
    used_s: float = 0.0

    def run(self, task: Task) -> SearchOutcome:
        """Search or plan, and return the result."""
        job, of = task
        self.meshes.counts = Counts()
        if isinstance(of, bytes):
            self.functions[job.number] = of_bytes(of)
        elif of is not None:
            self.meshes.programs[job.number] = of
        found = run_search(job, self.meshes, self.functions.get(job.number))
        before_s, self.used_s = self.used_s, time.process_time()
        taken_s = self.used_s - before_s
        return replace(found, counts=self.meshes.counts, cpu_s=taken_s)


run_job = JobRunner().run
"""Answers a task with what earlier tasks cached; runs in a worker."""
