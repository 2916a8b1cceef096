"""Jobs of a sweep: requests to search or to plan, and their results.

Configurations whose passes are chosen, too (stages, micro-batches, recompute), are
each planned by itself, the largest budget first. The best plan within a budget is the
best within every smaller one that it fits, and is not planned again there. The plan of
a smaller budget is used for a larger one if it is faster.
"""

from __future__ import annotations

import itertools
import math
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import jax

from rhino_jax._compat import pickled
from rhino_jax.errors import RhinoError
from rhino_jax.frontend.call import Signature
from rhino_jax.frontend.leaves import Leaves
from rhino_jax.frontend.registry import has_user_rules
from rhino_jax.frontend.trace import Traced
from rhino_jax.frontend.tracing.captured import CapturedReferences
from rhino_jax.ir.program import Program
from rhino_jax.plan.plan import AnyPlan
from rhino_jax.planner.meshes import MeshAxes
from rhino_jax.planner.options import PlanOptions
from rhino_jax.runtime.meshes import make_mesh
from rhino_jax.sweep.meshes import Best, BudgetJobs, Meshes
from rhino_jax.sweep.point import WHAT, Counts, why_not


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
        ends, ends,
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
