"""The kind of suites whose plans are compiled: a cell is a method on a row, from its
plan to its compiled program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from rhino_jax.bench.cells import BenchCell, SuiteReport, SuiteRun
from rhino_jax.bench.methods import PLAIN
from rhino_jax.bench.process import JobProcess, Outcome
from rhino_jax.bench.progress import line_of
from rhino_jax.bench.records import FINAL, Result, cell_key, row_key
from rhino_jax.bench.suite import BenchRow, Suite
from rhino_jax.bench.tables.figures import figures_of
from rhino_jax.bench.tables.table import changes_text, compiled_summary, to_markdown


@dataclass(frozen=True, slots=True)
class CompileKind:
    """Suites whose plans are compiled.

    Attributes:
      missing: target → the compiler that is not installed for it.
      earlier: results of an earlier run to compare with.
      against: file of these; None: no comparison.
    """

    missing: Mapping[str, str] = field(default_factory=dict)
    earlier: tuple[Result, ...] = ()
    against: str | None = None

    sample: ClassVar[type[Result]] = Result

    def cells(self, row: BenchRow) -> list[BenchCell]:
        return [
            BenchCell(
                key=cell_key(row, method),
                row=replace(row, methods=(method,)),
                # The plan, its program, and those that are compiled to choose it.
                programs=2 + (method.refine and method.refine + len(PLAIN)),
            )
            for method in row.methods
        ]

    def measured(self, cell: BenchCell, process: JobProcess, run: SuiteRun) -> Result:
        """Plan and compile a cell, in the process of its row."""
        row = cell.row
        outcome = Outcome(status="no extra", error=self.missing.get(row.target, ""))
        if not outcome.error:
            if not process.is_running:
                run.report(f"planning {row.title}")
            outcome = run.job(cell, process)
        result: Result | None = outcome.values
        if result is None:
            store = replace(run.store, is_fresh=False)
            planned = store.saved(f"{cell.key}-plan", Result, run.versions)
            failed = planned or Result(status="error")
            result = replace(failed, status=outcome.status, error=outcome.error)
        return replace(
            result,
            mesh=result.mesh or dict(row.mesh),
            key=cell.key,
            row=row_key(row),
            workload=row.workload,
            regime=row.regime,
            target=row.target,
            method=row.methods[0].name,
            versions=dict(run.versions),
        )

    def is_final(self, result: Result) -> bool:
        return result.status in FINAL

    def line(self, cell: BenchCell, result: Result) -> str:
        return f"{cell.row.title}, {result.method}: {line_of(result)}"

    def results(
        self, suite: Suite, values: Sequence[Sequence[Result]]
    ) -> tuple[Result, ...]:
        return tuple(result for row in values for result in row)

    def report(
        self, suite: Suite, results: Sequence[Result], command: str
    ) -> SuiteReport:
        """Return the report, with changes since the earlier run."""
        figures = figures_of(results)
        text = to_markdown(suite.name, results, figures, command)
        if self.against is not None:
            text += "\n" + changes_text(results, self.earlier, self.against) + "\n"
        return SuiteReport(
            text=text,
            lines=compiled_summary(suite.name, results, figures),
            values={"figures": figures, "results": results},
            failed=figures.failed,
        )
