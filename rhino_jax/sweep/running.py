"""Run of all configurations of a sweep, group by group, with progress.

Searches are scheduled in this process, or in several others.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

from rhino_jax.errors import ProcessError
from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.program import Program
from rhino_jax.sweep.evaluate import Evaluator, Pending, refused
from rhino_jax.sweep.jobs import (
    BudgetJobs,
    BudgetSweep,
    Meshes,
    SearchOutcome,
    run_search,
    to_bytes,
)
from rhino_jax.sweep.point import (
    WHAT,
    Counts,
    Point,
    SweepConfig,
    SweepWork,
    Told,
)
from rhino_jax.sweep.table import best_of
from rhino_jax.utils.worker import TaskFailed, Worker, WorkerEnded


START_S = 2.0
"""CPU seconds that a process takes to start, mostly to import JAX."""


class Searching:
    """Scheduler of searches, which run in the order in which they are submitted.

    Results do not depend on where they run. Other processes are started if they save
    more time than their start takes, as estimated from the searches done here. They
    receive and return plain data, so that neither the user's function nor their script
    is imported there: a script needs no `if __name__ == "__main__"`, a notebook
    nothing. A context manager, whose exit ends the processes.

    Args:
      meshes: searches in this process.
      workers: number of processes that search; 1: this one alone, None: one per core,
        if they are worth it.
      count: number of calls of `submit` to come.

    Attributes:
      processes: number of processes that search, at the end.
      counts: work of the searches in other processes, `cpu_s` their CPU time, start
        included.
    """

    def __init__(self, meshes: Meshes, workers: int | None, count: int) -> None:
        self._meshes, self._workers, self._left = meshes, workers, count
        self._here: list[tuple[int, SearchOutcome]] = []
        self._open: dict[Future[SearchOutcome], tuple[int, Pending]] = {}
        self._functions: dict[int, bytes | None] = {}
        self._longest_s = 0.0
        self._processes: list[Worker] = []
        self._pool: ThreadPoolExecutor | None = None
        self._of_thread = threading.local()
        self.processes, self.cpu_s, self.counts = 1, 0.0, Counts()

    def __enter__(self) -> Searching:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        for process in self._processes:
            process.close()

    def submit(self, key: int, pending: Pending) -> None:
        """Submit a search; its result gets this key."""
        self._left -= 1
        if self._pool is None and self._is_worth_it():
            self._pool = self._start(min(self._most, self._left + 1))
        of = None if self._pool is None else self._of(pending)
        if self._pool is not None and of is not None:
            future = self._pool.submit(self._send, pending.job, of)
            self._open[future] = key, pending
            return
        started = time.monotonic()
        self._here.append((key, self._run_here(pending)))
        self._longest_s = max(self._longest_s, time.monotonic() - started)

    def results(
        self, *, all_of_them: bool = False
    ) -> Iterator[tuple[int, SearchOutcome]]:
        """Yield the results that arrived; with `all_of_them`, wait for all.

        Raises:
          ProcessError: another process failed.
        """
        while self._here:
            yield self._here.pop()
        arrived = [future for future in self._open if future.done()]
        for future in as_completed([*self._open]) if all_of_them else arrived:
            key, pending = self._open.pop(future)
            found = _result(future, pending)
            self.counts += found.counts
            self.cpu_s += found.cpu_s
            yield key, found

    def _start(self, count: int) -> ThreadPoolExecutor:
        """Start processes, and a thread that communicates with each."""
        self.processes = count
        self._processes = [Worker("rhino_jax.sweep.jobs:run_job") for _ in range(count)]
        idle = queue.SimpleQueue[Worker]()
        for process in self._processes:
            idle.put(process)

        def take() -> None:
            self._of_thread.process, self._of_thread.known = idle.get(), set()

        return ThreadPoolExecutor(count, "rhino_jax sweep", take)

    def _send(
        self, job: BudgetJobs | BudgetSweep, of: Program | bytes
    ) -> SearchOutcome:
        """Send a request to this thread's process, and wait for the result."""
        known, number = self._of_thread.known, (type(job), job.number)
        task = job, None if number in known else of
        known.add(number)
        found: SearchOutcome = self._of_thread.process.answer(task)
        return found

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
        job = pending.job
        if not isinstance(job, BudgetSweep):
            return self._meshes.programs[job.number]
        if job.number not in self._functions:
            self._functions[job.number] = to_bytes(pending.traced)
        return self._functions[job.number]

    def _run_here(self, pending: Pending) -> SearchOutcome:
        try:
            return run_search(pending.job, self._meshes, pending.traced)
        except Exception as error:
            error.add_note(f"raised while {WHAT} searched {pending.title}")
            raise


def _cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _result(future: Future[SearchOutcome], pending: Pending) -> SearchOutcome:
    """Return the result of another process.

    Raises:
      ProcessError: the process ended, or the search raised an internal error.
    """
    try:
        return future.result()
    except TaskFailed as error:
        failure = ProcessError(
            f"{WHAT}: a search failed.",
            where=pending.title,
            numbers=str(error),
            fix="workers=1 searches in this process, where a debugger can look.",
        )
        failure.add_note(error.trace)
    except Exception as error:
        is_end = isinstance(error, WorkerEnded)
        failure = ProcessError(
            f"{WHAT}: a process that searched has ended.",
            where=pending.title,
            numbers=str(error) if is_end else f"{type(error).__name__}: {error}",
            fix="workers=1 searches in this process alone; fewer need less memory.",
        )
    raise failure


class SweepRun:
    """A sweep in progress.

    Args:
      evaluator: evaluates groups of configurations.
      configs: the configurations.
      tell: called with the number of points done, of all, and the best point so far.
    """

    def __init__(
        self, evaluator: Evaluator, configs: Sequence[SweepConfig], tell: Told
    ) -> None:
        self._evaluator, self._configs, self._tell = evaluator, configs, tell
        of_group: dict[Hashable, list[int]] = {}
        for i, config in enumerate(configs):
            of_group.setdefault(evaluator.group(config), []).append(i)
        self._groups = list(of_group.values())
        self._found: dict[int, Point] = {}
        self._pending: dict[int, Pending] = {}
        self._best: Point | None = None
        self._planned = 0

    def points(
        self,
        traced_for: Callable[[int | None], Traced],
        workers: int | None,
        started_s: tuple[float, float],
    ) -> tuple[list[Point], SweepWork]:
        """Return a point for every configuration, and the work of the sweep.

        Configurations of a group are searched together.

        Args:
          traced_for: batch size → the function; None: as it was called.
          workers: as in `sweep`.
          started_s: wall-clock and CPU time at which the sweep started.
        """
        programs: dict[int | None, Traced] = {}
        with Searching(self._evaluator.meshes, workers, len(self._groups)) as searching:
            for key, members in enumerate(self._groups):
                group = [self._configs[i] for i in members]
                size = group[0].batch
                if size not in programs:
                    programs[size] = traced_for(size)
                begun = self._evaluator.begin(programs[size], group)
                if isinstance(begun, Pending):
                    if isinstance(begun.job, BudgetSweep):
                        self._planned += len(group)
                    self._pending[key] = begun
                    searching.submit(key, begun)
                else:
                    self._take(key, begun)
                self._take_all(searching.results())
            self._take_all(searching.results(all_of_them=True))
        work = SweepWork(
            configurations=len(self._configs),
            groups=len(self._groups),
            planned=self._planned,
            counts=self._evaluator.meshes.counts + searching.counts,
            processes=searching.processes,
            cpu_s=time.process_time() - started_s[1] + searching.cpu_s,
            seconds=time.monotonic() - started_s[0],
        )
        return [self._found[i] for i in range(len(self._configs))], work

    def _take_all(self, answers: Iterable[tuple[int, SearchOutcome]]) -> None:
        for key, answer in answers:
            pending = self._pending.pop(key)
            if answer.refused:
                self._take(key, refused(pending.group, answer.refused))
            else:
                self._take(key, self._evaluator.end(pending, answer))

    def _take(self, key: int, points: Sequence[Point]) -> None:
        self._found.update(zip(self._groups[key], points, strict=True))
        self._best = best_of([*points, *([self._best] if self._best else [])])
        self._tell(len(self._found), len(self._configs), self._best)
