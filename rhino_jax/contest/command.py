"""The command `solve`: read, solve, check, write.

The independent checker: cost and memory of a choice, in exact integers.

It shares nothing with the solver but the instance as read from the file.

Solution of an instance: converted to a problem, reduced, solved, and checked.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rhino_jax.contest.instance import FORBIDDEN, Instance, InstanceError, read_instance
from rhino_jax.solver.limited import Report
from rhino_jax.solver.problem import UnsatisfiedError
from rhino_jax.solver.simplify import simplify
from rhino_jax.solver.solve_limited import solve_limited


@dataclass(frozen=True, slots=True)
class Checked:
    """Recomputed cost and memory of a choice.

    Attributes:
      objective: costs of nodes and edges together.
      peak: largest memory in use at any time.
      peak_time: the first time at which that much is in use.
      forbidden: number of nodes and edges whose cost forbids the choice.
      fits: whether the memory stays within the limit at every time, and nothing is
        forbidden.
    """

    objective: int
    peak: int
    peak_time: int
    forbidden: int
    fits: bool


def check(instance: Instance, choices: Sequence[int]) -> Checked:
    """Recompute objective and memory.

    Raises:
      InstanceError: the choices are not one valid strategy of every node.
    """
    if len(choices) != len(instance.costs):
        raise InstanceError(
            "`check`: there is not one choice per node.",
            numbers=f"{len(choices)} choices, {len(instance.costs)} nodes",
            fix="give a list with one index per node.",
        )
    for i, k in enumerate(choices):
        if not 0 <= k < len(instance.costs[i]):
            raise InstanceError(
                f"`check`: node {i} has no such strategy.",
                numbers=f"choice {k}, {len(instance.costs[i])} strategies",
                fix="strategies are counted from 0.",
            )
    paid = [cost[k] for cost, k in zip(instance.costs, choices, strict=True)]
    for (i, j), table in zip(instance.edges, instance.tables, strict=True):
        paid.append(table[choices[i] * len(instance.costs[j]) + choices[j]])
    change: dict[int, int] = defaultdict(int)
    for (start, stop), usage, k in zip(
        instance.intervals, instance.usages, choices, strict=True
    ):
        if start < stop:
            change[start] += usage[k]
            change[stop] -= usage[k]
    peak = peak_time = held = 0
    for moment in sorted(change):
        held += change[moment]
        if held > peak:
            peak, peak_time = held, moment
    forbidden = sum(cost >= FORBIDDEN for cost in paid)
    fits = peak <= instance.limit and not forbidden
    return Checked(sum(paid), peak, peak_time, forbidden, fits)


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


GRACE_S = 1.0
"""Seconds of the time limit that are reserved for checking and writing."""


def run_solve(
    file: str,
    *,
    time_limit_s: float,
    output: str | None = None,
    workers: int | None = None,
    seed: int = 0,
    shows_progress: bool = True,
    limit_shares: Sequence[float] = (1.0,),
) -> None:
    """Solve a file, print the result, and write the choices.

    Args:
      file: file of the contest's format.
      time_limit_s: seconds in all, reading included.
      output: file for the choices, a JSON list with one index per node; None: no file.
      workers: number of CP-SAT workers; None: one per core.
      seed: seed of all randomness.
      shows_progress: whether to print every better objective to standard error.
      limit_shares: shares of the file's memory limit that choices must fit. Each of
        several has the time limit, and is a line of a table.

    Raises:
      InstanceError: the file is malformed, or the output cannot be written.
      UnsatisfiedError: nothing satisfies it, or no feasible choice was found in time.
    """
    begun = time.monotonic()
    whole = read_instance(file)
    is_table = len(limit_shares) > 1
    if is_table:
        print(f"{'share':8}{'limit':>14}{'objective':>18}{'bound':>18}{'gap':>9}  best")
    for share in limit_shares:
        instance = replace(whole, limit=int(share * whole.limit))
        line = f"{share:<8g}{instance.limit:>14}"
        found_s: list[float] = [0.0]

        def report(
            seconds: float, objective: float, _: float, found_s: list[float] = found_s
        ) -> None:
            found_s.append(seconds)
            if shows_progress:
                print(f"{seconds:8.1f} s  objective {objective:.0f}", file=sys.stderr)

        try:
            answer = solve_instance(
                instance,
                deadline=begun + max(time_limit_s - GRACE_S, time_limit_s / 2),
                workers=workers or os.cpu_count() or 1,
                seed=seed,
                report=report,
            )
        except UnsatisfiedError as error:
            if not is_table:
                raise
            print(f"{line}  {error.what}", flush=True)
        else:
            if is_table:
                print(f"{line}{_columns(answer)}  {found_s[-1]:.1f} s", flush=True)
            else:
                print(summary(instance, answer, time.monotonic() - begun))
            if output is not None:
                _write(output, answer.choices)
        begun = time.monotonic()


def _columns(answer: ContestSolution) -> str:
    objective = answer.checked.objective
    return f"{objective:>18}{answer.bound:>18}{_gap(answer):>9.2%}"


def _gap(answer: ContestSolution) -> float:
    objective = answer.checked.objective
    return 1 - answer.bound / objective if objective > 0 else 0.0


def summary(instance: Instance, answer: ContestSolution, seconds: float) -> str:
    """Return the lines on a solution, as the checker recomputed it."""
    found = answer.checked
    proof = "optimal" if answer.is_optimal else f"gap {_gap(answer):.2%}"
    whole, left = answer.num_nodes
    return "\n".join([
        f"objective {found.objective}",
        f"bound     {answer.bound} ({proof})",
        f"memory    {found.peak} of {instance.limit}, at time {found.peak_time}",
        f"nodes     {whole}, of which {left} were left to choose",
        f"seconds   {seconds:.1f}",
    ])  # fmt: skip


def _write(file: str, choices: list[int]) -> None:
    try:
        Path(file).write_text(json.dumps(choices) + "\n", encoding="utf-8")
    except OSError as error:
        raise InstanceError(
            f"`solve`: the choices cannot be written: {error.strerror}.",
            where=file,
            fix="give --output a file in a folder that is there and can be written.",
        ) from None
