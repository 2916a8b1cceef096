"""The runner: cells one after the other, each result saved before the next begins.

One cell: a method on a row, from its plan to its compiled program.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rhino_jax.bench.compiling import CompiledRow
from rhino_jax.bench.methods import PLAIN, ShardingMethod
from rhino_jax.bench.planned import PlanEntry, read_entries
from rhino_jax.bench.process import Outcome, run_job
from rhino_jax.bench.progress import Clock, Report, line_of, title_of
from rhino_jax.bench.records import Result, cell_key, file_name, row_key
from rhino_jax.bench.store import Store, in_order, read_json
from rhino_jax.bench.suite import BenchRow, Suite
from rhino_jax.bench.versions import versions
from rhino_jax.utils.codec import from_json


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
    _entries: dict[str, PlanEntry] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Folder of the row's plans."""
        return self.store.folder / "plans" / row_key(self.row)

    def plan(self, methods: Sequence[ShardingMethod]) -> None:
        """Plan the methods that need no compiler and are not planned yet.

        A failure is recorded in every cell that it concerns.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._entries.update(read_entries(self.folder, self.versions))
        missing = [
            m.name for m in methods if not m.refine and m.name not in self._entries
        ]
        if not missing:
            return
        job = self._job("plan", folder=str(self.folder))
        job["row"]["methods"] = missing
        outcome = run_job(job, self._log("plan"), self.timeout_s, self.stop)
        self._entries.update(read_entries(self.folder, self.versions))
        for name in missing:
            failed = PlanEntry(status=outcome.status, error=outcome.error)
            self._entries.setdefault(name, failed)

    def cell(self, method: ShardingMethod) -> Result:
        """Compile a method's plan; a refined one is planned here, too.

        `plan` must have been called for the others.
        """
        key, cache = cell_key(self.row, method), self.store.folder / "compiled"
        file = cache / f"{key}.result.json"
        if method.refine:
            job = self._job("refine", method=method.name)
        else:
            entry = self._entries[method.name]
            if entry.status != "ok":
                return self._result(method, _from_plan(entry))
            job = self._job("compile", plan=str(self.folder / entry.file))
        job |= {"cache": str(cache), "result": str(file)}
        file.unlink(missing_ok=True)
        programs = method.refine + len(PLAIN) if method.refine else 1
        timeout_s = self.timeout_s * programs
        outcome = run_job(job, self._log(method.name), timeout_s, self.stop)
        values = read_json(file) if outcome.status == "ok" else None
        file.unlink(missing_ok=True)
        if values is None:
            found = {} if method.refine else _from_plan(entry)
            return self._result(method, found | _from_outcome(outcome))
        if method.refine:
            entry = from_json(PlanEntry, values["planned"])
        if "compiled" not in values:
            return self._result(method, _from_plan(entry))
        compiled = from_json(CompiledRow, values["compiled"])
        candidates = tuple(values.get("candidates", ()))
        found = {**_from_compiled(compiled), "candidates": candidates}
        return self._result(method, _from_plan(entry) | found)

    def without_extra(self, method: ShardingMethod, error: str) -> Result:
        """Return the result of a cell whose target has no compiler installed."""
        return self._result(method, {"status": "no extra", "error": error})

    def _job(self, task: str, **values: str) -> dict[str, Any]:
        versions = dict(self.versions)
        return {"task": task, "row": self.row.to_table(), "versions": versions} | values

    def _log(self, name: str) -> Path:
        return self.store.log(f"{row_key(self.row)}-{file_name(name)}")

    def _result(self, method: ShardingMethod, found: Mapping[str, Any]) -> Result:
        asked = {
            "key": cell_key(self.row, method),
            "row": row_key(self.row),
            "workload": self.row.workload,
            "regime": self.row.regime,
            "target": self.row.target,
            "mesh": dict(self.row.mesh),
            "method": method.name,
            "versions": dict(self.versions),
        }
        return Result(**(asked | dict(found)))


def _from_plan(entry: PlanEntry) -> dict[str, Any]:
    found = {
        "status": entry.status,
        "plan_s": entry.plan_s,
        "predicted": entry.predicted,
        "error": entry.error,
    }
    return found if entry.mesh is None else found | {"mesh": entry.mesh}


def _from_outcome(outcome: Outcome) -> dict[str, Any]:
    status = "error" if outcome.status == "ok" else outcome.status
    error = outcome.error or "the process ended without a result."
    return {"status": status, "error": error}


def _from_compiled(compiled: CompiledRow) -> dict[str, Any]:
    return {
        "status": compiled.status,
        "compiled": compiled.measure,
        "rematerialised": compiled.rematerialised,
        "compile_s": compiled.compile_s,
        "rates": compiled.rates,
        "program": compiled.program,
        "error": compiled.error,
        "notes": compiled.notes,
    }


def cells_of(suite: Suite) -> list[tuple[BenchRow, ShardingMethod]]:
    """Return all cells, in the order in which they run."""
    return [(row, method) for row in suite.rows for method in row.methods]


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
    found = store.finished(current)
    cells = cells_of(suite)
    todo = [c for c in cells if cell_key(*c) not in found]
    clock = Clock(total=len(cells), done=len(cells) - len(todo))
    if len(todo) < len(cells):
        report(f"{len(cells) - len(todo)} of {len(cells)} cells are there already")
    stop, writing = threading.Event(), threading.Lock()

    def finish(row: BenchRow, method: ShardingMethod, result: Result) -> None:
        with writing:
            store.append(result)
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
    return in_order(found, (cell_key(*c) for c in cells))


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
