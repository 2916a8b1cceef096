"""Solution of an instance: converted to a problem, reduced, solved, and checked."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from rhino_jax.contest.check import Checked, check
from rhino_jax.contest.instance import Instance
from rhino_jax.solver.errors import UnsatisfiedError
from rhino_jax.solver.limited import Report
from rhino_jax.solver.presolve.simplify import simplify
from rhino_jax.solver.solve_limited import solve_limited


@dataclass(frozen=True, slots=True, eq=False)
class ContestSolution:
    """The best choice found.

    Attributes:
      choices: index of a strategy of every node.
      checked: its objective and memory, recomputed by the checker.
      bound: proved lower bound of the objective.
      is_optimal: whether the objective equals the bound.
      num_nodes: number of nodes of the instance, and of the reduced core.
    """

    choices: list[int]
    checked: Checked
    bound: int
    is_optimal: bool
    num_nodes: tuple[int, int]


def solve_instance(
    instance: Instance,
    *,
    deadline: float,
    workers: int = 2,
    seed: int = 0,
    report: Report = lambda seconds, objective, bound: None,
) -> ContestSolution:
    """Minimise an instance.

    Args:
      instance: the instance.
      deadline: latest end, in seconds of `time.monotonic()`.
      workers: number of CP-SAT workers.
      seed: seed of all randomness.
      report: called with every better choice.

    Raises:
      UnsatisfiedError: nothing satisfies it, or no feasible choice was found in time.
    """
    core = simplify(instance.problem())
    found = solve_limited(
        core, deadline=deadline, workers=workers, seed=seed, report=report
    )
    if found.best is None:
        raise UnsatisfiedError(
            "`solve`: no choice that satisfies the instance was found in time.",
            numbers=f"{time.monotonic() - found.started:.1f} s, memory limit"
            f" {instance.limit}",
            fix="give it more time: --time-limit-s.",
        )
    chosen = dict(zip(core.costs, found.best.tolist(), strict=True))
    choices = core.expand(chosen).tolist()
    checked = check(instance, choices)
    assert checked.fits, "the solver's choice does not hold up to the checker"
    bound = min(math.ceil(found.bound - 1e-6), checked.objective)
    sizes = len(instance.costs), len(core.costs)
    return ContestSolution(choices, checked, bound, bound == checked.objective, sizes)
