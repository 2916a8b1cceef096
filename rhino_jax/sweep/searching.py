"""Scheduling of searches: in this process, or in several others."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from rhino_jax.errors import ProcessError, RhinoError
from rhino_jax.ir.program import Program
from rhino_jax.sweep.answers import SearchOutcome
from rhino_jax.sweep.children import Answered, Children
from rhino_jax.sweep.configs import WHAT
from rhino_jax.sweep.meshes import Meshes
from rhino_jax.sweep.pending import Pending
from rhino_jax.sweep.point import why_not
from rhino_jax.sweep.whole import BudgetSweep, prices, to_bytes
from rhino_jax.sweep.work import Counts


START_S = 2.0
"""CPU seconds that a process takes to start, mostly to import JAX."""


class Searching:
    """Scheduler of searches, which run in the order in which they are submitted.

    Results do not depend on where they run. Other processes are started if they save
    more time than their start takes, as estimated from the searches done here.

    Args:
      meshes: searches in this process.
      workers: number of processes that search; 1: this one alone, None: one per core,
        if they are worth it.
      count: number of calls of `ask` to come.

    Attributes:
      processes: number of processes that search, at the end.
      counts: work of the searches in other processes, `cpu_s` their CPU time, start
        included.
    """

    def __init__(self, meshes: Meshes, workers: int | None, count: int) -> None:
        self._meshes, self._workers, self._left = meshes, workers, count
        self._pending: dict[int, Pending] = {}
        self._here: list[tuple[int, SearchOutcome]] = []
        self._functions: dict[int, bytes | None] = {}
        self._longest_s = 0.0
        self._children: Children | None = None
        self._stack = contextlib.ExitStack()
        self.processes, self.cpu_s, self.counts = 1, 0.0, Counts()

    def __enter__(self) -> Searching:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def ask(self, key: int, pending: Pending) -> None:
        """Submit a search; its result gets this key."""
        self._left -= 1
        if self._children is None and self._is_worth_it():
            self.processes = min(self._most, self._left + 1)
            children = Children(self.processes)
            self._children = self._stack.enter_context(children)
        of = None if self._children is None else self._of(pending)
        if self._children is not None and of is not None:
            self._pending[key] = pending
            self._children.ask(key, (pending.asked, of))
            return
        started = time.monotonic()
        self._here.append((key, self._answer(pending)))
        self._longest_s = max(self._longest_s, time.monotonic() - started)

    def answers(
        self, *, all_of_them: bool = False
    ) -> Iterator[tuple[int, SearchOutcome]]:
        """Yield the results that arrived; with `all_of_them`, wait for all.

        Raises:
          ProcessError: another process failed.
        """
        while self._here:
            yield self._here.pop()
        if self._children is None:
            return
        for found in self._children.answers(all_of_them=all_of_them):
            pending = self._pending.pop(found.key)
            if found.answer is None or found.answer.failed:
                raise _failed(pending, found)
            self.counts += found.answer.counts
            self.cpu_s += found.answer.cpu_s
            yield found.key, found.answer

    @property
    def _most(self) -> int:
        return self._workers or _cores()

    def _is_worth_it(self) -> bool:
        if self._workers is not None:
            return self._workers > 1
        most = self._most
        return self._left * self._longest_s * (1 - 1 / most) > 2 * START_S

    def _of(self, pending: Pending) -> Program | bytes | None:
        """Return the program or function to send; None if it must run here."""
        asked = pending.asked
        if not isinstance(asked, BudgetSweep):
            return self._meshes.programs[asked.number]
        if asked.number not in self._functions:
            self._functions[asked.number] = to_bytes(pending.traced)
        return self._functions[asked.number]

    def _answer(self, pending: Pending) -> SearchOutcome:
        try:
            if isinstance(pending.asked, BudgetSweep):
                return SearchOutcome(priced=prices(pending.asked, pending.traced))
            return SearchOutcome(self._meshes.best(pending.asked))
        except RhinoError as error:
            return SearchOutcome(refused=why_not(error))
        except Exception as error:
            error.add_note(f"raised while {WHAT} searched {pending.title}")
            raise


def _cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _failed(pending: Pending, found: Answered) -> ProcessError:
    if found.answer is None:
        return ProcessError(
            f"{WHAT}: a process that searched has ended.",
            where=pending.title,
            numbers=found.ended,
            fix="workers=1 searches in this process alone; fewer need less memory.",
        )
    text = found.answer.failed
    error = ProcessError(
        f"{WHAT}: a search failed.",
        where=pending.title,
        numbers=text.strip().splitlines()[-1],
        fix="workers=1 searches in this process, where a debugger can look.",
    )
    error.add_note(text)
    return error
