"""The runner: cells one after the other, each result saved before the next begins.

One cell: a method on a row, from its plan to its compiled program.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rhino_jax.bench.methods import PLAIN, ShardingMethod
from rhino_jax.bench.process import run_job
from rhino_jax.bench.progress import Clock, Report, line_of, title_of
from rhino_jax.bench.records import (
    FINAL,
    CellOutcome,
    Result,
    cell_key,
    file_name,
    row_key,
)
from rhino_jax.bench.store import Store
from rhino_jax.bench.suite import BenchRow, Suite
from rhino_jax.bench.versions import versions


@dataclass(frozen=True, slots=True, eq=False)
class RowRun:
    """Runner of one row's cells, each in child processes.

    Attributes:
      row: the row.
      store: folder of the benchmark.
      versions: versions of the planner and compilers.
      timeout_s: time limit of planning the row, and of each plan that a cell compiles,
        in seconds.
      stop: kills running processes when it is set.
    """

    row: BenchRow
    store: Store
    versions: Mapping[str, str]
    timeout_s: float
    stop: threading.Event = field(default_factory=threading.Event)
    _planned: dict[str, CellOutcome] = field(default_factory=dict)

    def plan(self, methods: Sequence[ShardingMethod]) -> None:
        """Plan the methods that need no compiler and are not planned yet.

        A failure is recorded in every cell that it concerns.
        """
        own = [m for m in methods if not m.refine]
        self._read_plans(own)
        missing = tuple(m for m in own if m.name not in self._planned)
        if not missing:
            return
        row = replace(self.row, methods=missing)
        job = self._job("plan", folder=str(self.store.folder)) | {"row": row}
        outcome = run_job(job, self._log("plan"), self.timeout_s, self.stop)
        self._read_plans(missing)
        failed = CellOutcome(status=outcome.status, error=outcome.error)
        for method in missing:
            self._planned.setdefault(method.name, failed)

    def _read_plans(self, methods: Iterable[ShardingMethod]) -> None:
        """Read the outcomes of planning, as the process that plans writes them."""
        store = replace(self.store, is_fresh=False)
        for m in methods:
            key = f"{cell_key(self.row, m)}-plan"
            planned = store.saved(key, CellOutcome, self.versions)
            if planned is not None:
                self._planned[m.name] = planned

    def cell(self, method: ShardingMethod) -> Result:
        """Compile a method's plan; a refined one is planned here, too.

        `plan` must have been called for the others.
        """
        planned, programs = CellOutcome(status="error"), 1
        if method.refine:
            job = self._job("refine", method=method.name)
            programs = method.refine + len(PLAIN)
        else:
            planned = self._planned[method.name]
            if not planned.fits:
                return self._result(method, planned)
            plan = self.store.plan_file(cell_key(self.row, method))
            job = self._job("compile", plan=str(plan), planned=planned)
        job["cache"] = str(self.store.folder / "compiled")
        timeout_s = self.timeout_s * programs
        outcome = run_job(job, self._log(method.name), timeout_s, self.stop)
        if outcome.values is not None:
            return self._result(method, outcome.values)
        failed = replace(planned, status=outcome.status, error=outcome.error)
        return self._result(method, failed)

    def without_extra(self, method: ShardingMethod, error: str) -> Result:
        """Return the result of a cell whose target has no compiler installed."""
        return self._result(method, CellOutcome(status="no extra", error=error))

    def _job(self, task: str, **values: Any) -> dict[str, Any]:
        versions = dict(self.versions)
        return {"task": task, "row": self.row, "versions": versions} | values

    def _log(self, name: str) -> Path:
        return self.store.log(f"{row_key(self.row)}-{file_name(name)}")

    def _result(self, method: ShardingMethod, outcome: CellOutcome) -> Result:
        values = {f.name: getattr(outcome, f.name) for f in fields(outcome)}
        return Result(
            **values | {"mesh": outcome.mesh or dict(self.row.mesh)},
            key=cell_key(self.row, method),
            row=row_key(self.row),
            workload=self.row.workload,
            regime=self.row.regime,
            target=self.row.target,
            method=method.name,
            versions=dict(self.versions),
        )


def run_suite(
    suite: Suite,
    store: Store,
    report: Report,
    missing: Mapping[str, str],
    *,
    jobs: int = 1,
) -> tuple[Result, ...]:
    """Run the cells that have no final result.

    Args:
      suite: the suite.
      store: folder of the results.
      report: called with a line for every cell.
      missing: target → the compiler that is not installed for it.
      jobs: number of rows at a time; the cells of a row, which may be one program, run
        one after the other.

    Returns:
      The results of all cells, earlier ones included, in the suite's order.
    """
    current = versions()
    cells = [(row, method) for row in suite.rows for method in row.methods]
    keys = [cell_key(*cell) for cell in cells]
    saved = {key: store.saved(key, Result, current) for key in keys}
    found = {key: result for key, result in saved.items() if result is not None}
    todo = [c for c in cells if cell_key(*c) not in found]
    clock = Clock(total=len(cells), done=len(cells) - len(todo))
    if len(todo) < len(cells):
        report(f"{len(cells) - len(todo)} of {len(cells)} cells are there already")
    stop, writing = threading.Event(), threading.Lock()

    def finish(row: BenchRow, method: ShardingMethod, result: Result) -> None:
        with writing:
            if result.status in FINAL:
                store.save(result.key, result, current)
            found[result.key] = result
            report(f"{clock.tick()} {title_of(row)}, {method.name}: {line_of(result)}")

    def run_row(row: BenchRow) -> None:
        methods = tuple(method for r, method in todo if r is row)
        run = RowRun(row, store, current, suite.timeout_s, stop)
        if row.target in missing:
            for method in methods:
                finish(row, method, run.without_extra(method, missing[row.target]))
        elif methods:
            report(f"planning {title_of(row)}")
            run.plan(methods)
            for method in methods:
                finish(row, method, run.cell(method))

    _each(suite.rows, run_row, jobs, stop)
    return tuple(found[key] for key in keys)


def _each(
    rows: Sequence[BenchRow],
    run_row: Callable[[BenchRow], None],
    jobs: int,
    stop: threading.Event,
) -> None:
    """Run every row, `jobs` at a time; an error in one of them stops all."""
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run_row, row) for row in rows]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
