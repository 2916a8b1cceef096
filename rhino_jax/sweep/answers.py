"""Requests to processes that search, and their results."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rhino_jax.errors import RhinoError
from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.program import Program
from rhino_jax.sweep.meshes import Best, BudgetJobs, Meshes
from rhino_jax.sweep.point import Counts, why_not
from rhino_jax.sweep.whole import BudgetSweep, Priced, of_bytes, prices


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """Result of a search.

    Attributes:
      best: budget → the best choice.
      priced: budget → cost of the plan, or why there is none.
      refused: why there is no result, as a message for the user.
      counts: work of the search.
      cpu_s: CPU seconds since the previous result, or since the process started.
    """

    best: Mapping[int, Best] = field(default_factory=dict)
    priced: Mapping[int, Priced | str] = field(default_factory=dict)
    refused: str = ""
    counts: Counts = field(default_factory=Counts)
    cpu_s: float = 0.0


Task = tuple[BudgetJobs | BudgetSweep, Program | bytes | None]
"""A request, with its program, or its function as serialized by `whole.to_bytes`, the
first time that a process gets a request about it; None later."""


@dataclass(slots=True, eq=False)
class Answering:
    """Executor of requests, which caches programs and functions.

    Attributes:
      meshes: searches.
      functions: functions by number.
    """

    meshes: Meshes = field(default_factory=Meshes)
    functions: dict[int, Traced] = field(default_factory=dict)

    def answer(self, task: Task) -> SearchOutcome:
        """Search or plan, and return the result."""
        asked, of = task
        self.meshes.counts = Counts()
        try:
            if isinstance(asked, BudgetSweep):
                if isinstance(of, bytes):
                    self.functions[asked.number] = of_bytes(of)
                return SearchOutcome(priced=prices(asked, self.functions[asked.number]))
            if isinstance(of, Program):
                self.meshes.programs[asked.number] = of
            best = self.meshes.best(asked)
            return SearchOutcome(best, counts=self.meshes.counts)
        except RhinoError as error:
            return SearchOutcome(refused=why_not(error), counts=self.meshes.counts)


_ANSWERING = Answering()
_before_s = 0.0


def answer_task(task: Task) -> SearchOutcome:
    """Search or plan, with what earlier tasks cached; runs in a worker."""
    global _before_s
    found, now_s = _ANSWERING.answer(task), time.process_time()
    taken_s, _before_s = now_s - _before_s, now_s
    return replace(found, cpu_s=taken_s)
