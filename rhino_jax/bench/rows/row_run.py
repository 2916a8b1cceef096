"""Kinds of suites whose rows are measured as a whole, each in a separate process.

Times of planning are those of Python and NumPy on one core, which on shared machines
differ by a factor of two from one hour to the next: `yardstick_s` measures the current
speed of the machine, so that tables of different hours are comparable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from rhino_jax.bench.process import run_job
from rhino_jax.bench.progress import Clock, Report, title_of
from rhino_jax.bench.records import row_key
from rhino_jax.bench.store import Store
from rhino_jax.bench.suite import BenchRow, Suite
from rhino_jax.bench.tables.table import markdown_table
from rhino_jax.bench.versions import versions, versions_line
from rhino_jax.utils.codec import from_json, to_json


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

    def to_json(self) -> dict[str, Any]:
        found = {"workload": self.row.workload, "found": self.found}
        return to_json({**found, "error": self.error})


Results = Sequence[RowResult[T]]

Found = Sequence[tuple[BenchRow, T]]
"""The rows that have a result, with it."""

Cells = Iterable[Mapping[str, str]]
"""Column of a table → its text, by line."""


def the_only(samples: Sequence[T]) -> T:
    """Return the result of a row with one process."""
    (sample,) = samples
    return sample


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKind(Generic[T]):
    """A kind of suites whose rows are measured as a whole.

    Attributes:
      name: the suites' `kind`.
      sample: type of the result of one process.
      measure: measures a row in the child process.
      read: builds a row's result from those of its processes.
      line: formats the result in a line.
      cells: the lines of a row in the report's table, without the workload and the
        target, which come first; columns are in the order of the longest line.
      notes: how the figures of the table were measured.
      summary: name of the suite and results → lines for the README, and below the
        table.
      plot: draws the results as SVG; None: no plot.
      plot_title: description of the plot.
      samples: number of processes, one after the other; each measures once.
      is_by_method: whether each process has one of the row's methods, not all.
    """

    name: str
    sample: type[Any]
    measure: Callable[[BenchRow], Any]
    read: Callable[[Sequence[Any]], T]
    line: Callable[[T], str]
    cells: Callable[[BenchRow, T], Cells]
    notes: str
    summary: Callable[[str, Found[T]], Iterable[str]]
    plot: Callable[[Results[T]], str] | None = None
    plot_title: str = ""
    samples: int = 1
    is_by_method: bool = False

    def lines(self, suite: str, results: Results[T]) -> tuple[str, ...]:
        """Return the lines of `summary`; none without results."""
        found = [(r.row, r.found) for r in results if r.found is not None]
        return tuple(self.summary(suite, found)) if found else ()

    def report(self, suite: Suite, results: Results[T], command: str) -> str:
        """Return the results as Markdown.

        A row without a result shows its error.

        Args:
          suite: the suite; its plot is in a file of its name next to the text.
          results: results of all its rows.
          command: the command that repeats the run.
        """
        told = [
            (r, [] if r.found is None else list(self.cells(r.row, r.found)))
            for r in results
        ]
        # A line without a result may lack columns in the middle.
        longest = sorted((x for _, every in told for x in every), key=len, reverse=True)
        own = list(dict.fromkeys(k for line in longest for k in line)) or ["result"]
        lines = [
            [r.row.workload, r.row.target, *(line.get(k, "") for k in own)]
            for r, every in told
            for line in every or [{own[0]: r.error.partition("\n")[0]}]
        ]
        parts = [f"![{self.plot_title}]({suite.name}.svg)"] if self.plot else []
        made_with = versions_line(versions())
        parts += [
            f"Suite `{suite.name}`: `{command}`. Made with {made_with}.",
            markdown_table(["workload", "target", *own], lines, left=3),
            self.notes,
            *(f"- {line}" for line in self.lines(suite.name, results)),
        ]
        return "\n\n".join(parts) + "\n"


def run_rows(
    suite: Suite, store: Store, report: Report, kind: RowKind[T]
) -> tuple[RowResult[T], ...]:
    """Measure every row that has no saved result, one process at a time.

    Args:
      suite: the suite.
      store: folder of the results.
      report: called with a line for every row.
      kind: the suite's kind.

    Returns:
      The results of all rows, in the suite's order.
    """
    found: dict[BenchRow, RowResult[T]] = {}
    made_with = {
        row: {"versions": versions(), "methods": [m.name for m in row.methods]}
        for row in suite.rows
    }
    for row in suite.rows:
        known = store.saved(f"{row_key(row)}-{kind.name}", list, made_with[row])
        if known is not None:
            samples = [from_json(kind.sample, x) for x in known]
            found[row] = RowResult(row=row, found=kind.read(samples))
    clock = Clock(total=len(suite.rows), done=len(found))
    for row in suite.rows:
        if row in found:
            continue
        samples, error = _sample(row, store, suite.timeout_s, kind)
        if error:
            found[row] = RowResult(row=row, found=None, error=error)
            said = error.splitlines()[0]
        else:
            store.save(f"{row_key(row)}-{kind.name}", samples, made_with[row])
            value = kind.read(samples)
            found[row], said = RowResult(row=row, found=value), kind.line(value)
        report(f"{clock.tick()} {title_of(row)}: {said}")
    return tuple(found[row] for row in suite.rows)


def _sample(
    row: BenchRow, store: Store, timeout_s: float, kind: RowKind[T]
) -> tuple[list[Any], str]:
    """Return the results of the processes, or an error."""
    log = store.log(f"{row_key(row)}-{kind.name}")
    found: list[Any] = []
    parts = [row]
    if kind.is_by_method:
        parts = [replace(row, methods=(m,)) for m in row.methods]
    for part in parts * kind.samples:
        job = {"task": "measure", "kind": kind.name, "row": part}
        outcome = run_job(job, log, timeout_s)
        if outcome.values is None:
            return [], f"{outcome.status}. {outcome.error}"
        found.append(outcome.values)
    return found, ""
