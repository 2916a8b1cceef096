"""Rows that are measured as a whole, each in a process of its own, and kept."""

from __future__ import annotations

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


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult(Generic[T]):
    """One row: what was measured, or why nothing was.

    Attributes:
      row: what was run.
      found: what was measured, or None.
      error: why there is none.
    """

    row: BenchRow
    found: T | None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTask(Generic[T]):
    """What is done with a row.

    Attributes:
      name: of the child's task, and of the folder of its results.
      samples: processes, one after the other; each does the task once.
      is_by_method: each process has one of the row's methods, not all.
      read: makes what was measured of what the processes wrote.
      line: says it in a line.
    """

    name: str
    samples: int
    is_by_method: bool
    read: Callable[[Sequence[Mapping[str, Any]]], T]
    line: Callable[[T], str]


def run_rows(
    suite: Suite, store: Store, report: Report, task: RowTask[T]
) -> tuple[RowResult[T], ...]:
    """Measure every row that was not measured before, one process at a time."""
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
    """The first parts of a report: what made it, and a table.

    Args:
      suite: what was run.
      results: of all its rows.
      command: that made them, to be repeated.
      header: of the table; workload and target come first.
      cells: a line of it. A row of which there is nothing says why instead.
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
    """What the processes wrote, or what went wrong."""
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
