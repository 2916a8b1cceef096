"""The command `solve`: read, solve, check, write."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rhino_jax.contest.engine import ContestSolution, solve_instance
from rhino_jax.contest.errors import InstanceError
from rhino_jax.contest.instance import Instance, read_instance
from rhino_jax.solver.errors import UnsatisfiedError


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
