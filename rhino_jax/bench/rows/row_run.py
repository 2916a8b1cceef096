"""Kinds of suites whose rows are measured as a whole, each in a separate process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from rhino_jax.bench.cells import BenchCell, SuiteReport, SuiteRun
from rhino_jax.bench.process import JobProcess, Outcome
from rhino_jax.bench.records import row_key
from rhino_jax.bench.suite import BenchRow, Suite
from rhino_jax.bench.tables.table import table_of
from rhino_jax.bench.versions import versions, versions_line
from rhino_jax.utils.codec import to_json


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

TableLines = Iterable[Mapping[str, str]]
"""Column of a table → its text, by line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKind(Generic[T]):
    """A kind of suites whose rows are measured as a whole.

    Attributes:
      name: the suites' `kind`.
      sample: type of the result of one process.
      measure: measures a row in the child process.
      describe: formats a row's result in a line.
      table: the lines of a row in the report's table, without the workload and the
        target, which come first; columns are in the order of the longest line.
      notes: how the figures of the table were measured.
      summary: name of the suite and results → lines for the README, and below the
        table.
      read: builds a row's result from its samples; default: there is only one.
      plot: draws the results as SVG; None: no plot.
      plot_title: description of the plot.
      samples: number of processes, one after the other; each measures once.
      is_by_method: whether each process has one of the row's methods, not all.
    """

    name: str
    sample: type[Any]
    measure: Callable[[BenchRow], Any]
    describe: Callable[[T], str]
    table: Callable[[BenchRow, T], TableLines]
    notes: str
    summary: Callable[[str, Found[T]], Iterable[str]]
    read: Callable[[Sequence[Any]], T] = lambda samples: samples[0]
    plot: Callable[[Results[T]], str] | None = None
    plot_title: str = ""
    samples: int = 1
    is_by_method: bool = False

    def cells(self, row: BenchRow) -> list[BenchCell]:
        parts = [row]
        if self.is_by_method:
            parts = [replace(row, methods=(m,)) for m in row.methods]
        return [
            BenchCell(key=f"{row_key(row)}-{self.name}-{i}", row=part)
            for i, part in enumerate(parts * self.samples)
        ]

    def measured(self, cell: BenchCell, process: JobProcess, run: SuiteRun) -> Any:
        """Measure a cell in a process of its own; return its sample, or a failure."""
        outcome = run.job(cell, process)
        process.close()
        return outcome if outcome.values is None else outcome.values

    def is_final(self, value: Any) -> bool:
        return not isinstance(value, Outcome)

    def line(self, cell: BenchCell, value: Any) -> str:
        result = self._result(cell.row, [value])
        found, error = result.found, result.error.partition("\n")[0]
        said = error if found is None else self.describe(found)
        return f"{cell.row.title}: {said}"

    def results(
        self, suite: Suite, values: Sequence[Sequence[Any]]
    ) -> tuple[RowResult[T], ...]:
        """Return the result of each row from its samples, or the first failure."""
        return tuple(map(self._result, suite.rows, values))

    def _result(self, row: BenchRow, values: Sequence[Any]) -> RowResult[T]:
        for failed in values:
            if isinstance(failed, Outcome):
                error = f"{failed.status}. {failed.error}"
                return RowResult(row=row, found=None, error=error)
        return RowResult(row=row, found=self.read(values))

    def report(self, suite: Suite, results: Results[T], command: str) -> SuiteReport:
        """Return the report, in which a row without a result shows its error.

        Args:
          suite: the suite; its plot is in a file of its name next to the text.
          results: results of all its rows.
          command: the command that repeats the run.
        """
        found = [(r.row, r.found) for r in results if r.found is not None]
        summary = tuple(self.summary(suite.name, found)) if found else ()
        parts = [f"![{self.plot_title}]({suite.name}.svg)"] if self.plot else []
        parts += [
            f"Suite `{suite.name}`: `{command}`. Made with"
            f" {versions_line(versions())}.",
            self._table(results),
            self.notes,
            *(f"- {line}" for line in summary),
        ]
        return SuiteReport(
            text="\n\n".join(parts) + "\n",
            lines=summary,
            values={"results": [r.to_json() for r in results]},
            failed=len(results) - len(found),
            plot=self.plot(results) if self.plot else "",
        )

    def _table(self, results: Results[T]) -> str:
        told = [
            (r, [] if r.found is None else list(self.table(r.row, r.found)))
            for r in results
        ]
        first = next(
            (name for _, own in told for line in own for name in line), "result"
        )
        lines = [
            {"workload": r.row.workload, "target": r.row.target, **line}
            for r, own in told
            for line in own or [{first: r.error.partition("\n")[0]}]
        ]
        return table_of(lines, left=3)
