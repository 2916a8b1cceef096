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


def searched(
    asked: BudgetJobs | BudgetSweep, meshes: Meshes, traced: Traced | None
) -> SearchOutcome:
    """Search with these meshes, or plan this function; return the result."""
    try:
        if isinstance(asked, BudgetSweep):
            assert traced is not None
            return SearchOutcome(priced=prices(asked, traced))
        return SearchOutcome(meshes.best(asked))
    except RhinoError as error:
        return SearchOutcome(refused=why_not(error))


@dataclass(slots=True, eq=False)
class Answering:
    """Executor of requests in a worker, which caches programs and functions.

    Attributes:
      meshes: searches.
      functions: functions by number.
      used_s: CPU seconds up to the previous result.
    """

    meshes: Meshes = field(default_factory=Meshes)
    functions: dict[int, Traced] = field(default_factory=dict)
    used_s: float = 0.0

    def answer(self, task: Task) -> SearchOutcome:
        """Search or plan, and return the result."""
        asked, of = task
        self.meshes.counts = Counts()
        if isinstance(of, bytes):
            self.functions[asked.number] = of_bytes(of)
        elif of is not None:
            self.meshes.programs[asked.number] = of
        found = searched(asked, self.meshes, self.functions.get(asked.number))
        before_s, self.used_s = self.used_s, time.process_time()
        taken_s = self.used_s - before_s
        return replace(found, counts=self.meshes.counts, cpu_s=taken_s)


answer_task = Answering().answer
"""Answers a task with what earlier tasks cached; runs in a worker."""
