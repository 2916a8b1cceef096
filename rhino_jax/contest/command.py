"""`python -m rhino_jax solve`: read, solve, check, write."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from rhino_jax.contest.engine import Answer, solve_instance
from rhino_jax.contest.errors import InstanceError
from rhino_jax.contest.instance import Instance, read_instance


GRACE_S = 1.0
"""Seconds of the time limit that are left for checking and writing."""


def run_solve(
    file: str,
    *,
    time_limit_s: float,
    output: str | None = None,
    workers: int | None = None,
    seed: int = 0,
    shows_progress: bool = True,
) -> Answer:
    """Solve a file, print what was found, and write the choices.

    Args:
      file: of the contest's format.
      time_limit_s: seconds in all, reading included.
      output: file for the choices, a JSON list with one index per node; or None.
      workers: of CP-SAT; None: one per core.
      seed: of everything random.
      shows_progress: say every better objective on the error stream.
    Raises:
      InstanceError: the file is malformed, or the output cannot be written.
      UnsatisfiedError: nothing satisfies it, or nothing that does was found in time.
    """
    started = time.monotonic()
    instance = read_instance(file)

    def report(seconds: float, objective: int, bound: float) -> None:
        if shows_progress:
            print(f"{seconds:8.1f} s  objective {objective}", file=sys.stderr)

    answer = solve_instance(
        instance,
        deadline=started + max(time_limit_s - GRACE_S, time_limit_s / 2),
        workers=workers or os.cpu_count() or 1,
        seed=seed,
        report=report,
    )
    print(summary(instance, answer, time.monotonic() - started))
    if output is not None:
        _write(output, answer.choices)
    return answer


def summary(instance: Instance, answer: Answer, seconds: float) -> str:
    """What was found, as the checker recomputed it."""
    found = answer.checked
    gap = 1 - answer.bound / found.objective if found.objective > 0 else 0.0
    proof = "optimal" if answer.is_optimal else f"gap {gap:.2%}"
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
