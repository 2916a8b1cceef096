"""What processes that search are asked, and what they answer."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field

from rhino_jax.errors import RhinoError
from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.program import Program
from rhino_jax.sweep.meshes import Best, BudgetJobs, Meshes
from rhino_jax.sweep.point import why_not
from rhino_jax.sweep.whole import BudgetSweep, Priced, of_bytes, prices
from rhino_jax.sweep.work import Counts


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """What came of a search.

    Attributes:
      best: budget → the best choice.
      priced: budget → what the plan costs, or why there is none.
      refused: why there is none, for the user.
      failed: what was raised, and where, of an error that no user can mend.
      counts: what the search took.
      cpu_s: since the answer before, or since the process began.
    """

    best: Mapping[int, Best] = field(default_factory=dict)
    priced: Mapping[int, Priced | str] = field(default_factory=dict)
    refused: str = ""
    failed: str = ""
    counts: Counts = field(default_factory=Counts)
    cpu_s: float = 0.0


Task = tuple[BudgetJobs | BudgetSweep, Program | bytes | None]
"""What is asked, with its program, or its function as `whole.to_bytes` gives it, the
first time that a process is asked about it."""


@dataclass(slots=True, eq=False)
class Answering:
    """Answers, and keeps what was asked about.

    Attributes:
      meshes: searches.
      functions: by their numbers.
    """

    meshes: Meshes = field(default_factory=Meshes)
    functions: dict[int, Traced] = field(default_factory=dict)

    def answer(self, task: Task) -> SearchOutcome:
        """Search or plan, and say what came of it."""
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
        except Exception:
            return SearchOutcome(failed=traceback.format_exc())
