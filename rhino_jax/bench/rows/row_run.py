"""Runner of rows that are measured as a whole, each in a separate process.

Current speed of the machine, so that tables of different hours are comparable.

Times of planning are those of Python and NumPy on one core, which on shared machines
differ by a factor of two from one hour to the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from rhino_jax.bench.process import run_job
from rhino_jax.bench.progress import Clock, Report, title_of
from rhino_jax.bench.records import row_key
from rhino_jax.bench.store import Store, read_json, write_json
from rhino_jax.bench.suite import BenchRow, Suite
from rhino_jax.bench.tables.table import markdown_table
from rhino_jax.bench.versions import versions, versions_line


ADDITIONS = 10_000_000
"""Number of additions of the timed loop."""


def yardstick_s() -> float:
    """Return the CPU seconds of `ADDITIONS` additions in a Python loop."""
    started = time.process_time()
    total = 0
    for i in range(ADDITIONS):
        total += i
    return time.process_time() - started


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult(Generic[T]):
    """Result of one row, or why there is none.

    Attributes:
      row: the row.
      found: the result; None if there is none.
      error: why there is none.
    """

    row: BenchRow
    found: T | None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTask(Generic[T]):
    """Task that is run for every row.

    Attributes:
      name: name of the child's task, and of the folder of its results.
      samples: number of processes, one after the other; each does the task once.
      is_by_method: whether each process has one of the row's methods, not all.
      read: builds the result from the outputs of the processes.
      line: formats the result in a line.
    """

    name: str
    samples: int
    is_by_method: bool
    read: Callable[[Sequence[Mapping[str, Any]]], T]
    line: Callable[[T], str]


def run_rows(
    suite: Suite, store: Store, report: Report, task: RowTask[T]
) -> tuple[RowResult[T], ...]:
    """Measure every row that has no saved result, one process at a time.

    Args:
      suite: the suite.
      store: folder of the results.
      report: called with a line for every row.
      task: the task of a row.

    Returns:
      The results of all rows, in the suite's order.
    """
    current = versions()
    folder = store.folder / task.name
    folder.mkdir(exist_ok=True)
    files = {row: folder / f"{row_key(row)}.json" for row in suite.rows}
    found: dict[BenchRow, RowResult[T]] = {}
    for row, file in files.items():
        known = read_json(file)
        asked = [m.name for m in row.methods]
        if known is not None and (known["versions"], known["methods"]) == (
            current,
            asked,
        ):
            found[row] = RowResult(row=row, found=task.read(known["samples"]))
    clock = Clock(total=len(files), done=len(found))
    for row, file in files.items():
        if row in found:
            continue
        samples, error = _sample(row, store, suite.timeout_s, task)
        result = RowResult(
            row=row, found=None if error else task.read(samples), error=error
        )
        found[row] = result
        if not error:
            methods = [m.name for m in row.methods]
            entry = {"versions": current, "methods": methods, "samples": samples}
            write_json(file, entry)
        said = error.splitlines()[0] if error else task.line(task.read(samples))
        report(f"{clock.tick()} {title_of(row)}: {said}")
    return tuple(found[row] for row in suite.rows)


def table_of_rows(
    suite: Suite,
    results: Sequence[RowResult[T]],
    command: str,
    header: Sequence[str],
    cells: Callable[[BenchRow, T], list[str]],
) -> list[str]:
    """Return the first parts of a report: the command and versions, and a table.

    Args:
      suite: the suite.
      results: results of all its rows.
      command: the command that repeats the run.
      header: header of the table; workload and target come first.
      cells: cells of a row's line. A row without a result shows its error instead.
    """
    lines = []
    for r in results:
        if r.found is None:
            line = [r.row.workload, r.row.target, r.error.splitlines()[0]]
            lines.append(line + [""] * (len(header) - len(line)))
        else:
            lines.append(cells(r.row, r.found))
    return [
        f"Suite `{suite.name}`: `{command}`. Made with {versions_line(versions())}.",
        markdown_table(header, lines, left=3),
    ]


def _sample(
    row: BenchRow, store: Store, timeout_s: float, task: RowTask[T]
) -> tuple[list[Mapping[str, Any]], str]:
    """Return the outputs of the processes, or an error."""
    file: Path = store.folder / task.name / f"{row_key(row)}.result.json"
    found: list[Mapping[str, Any]] = []
    parts = [row]
    if task.is_by_method:
        parts = [replace(row, methods=(m,)) for m in row.methods]
    for part in parts * task.samples:
        file.unlink(missing_ok=True)
        job = {"task": task.name, "row": part.to_table(), "result": str(file)}
        log = store.log(f"{row_key(row)}-{task.name}")
        outcome = run_job(job, log, timeout_s)
        values = read_json(file) if outcome.status == "ok" else None
        file.unlink(missing_ok=True)
        if values is None:
            return [], f"{outcome.status}. {outcome.error}"
        found.append(values)
    return found, ""
