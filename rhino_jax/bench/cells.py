"""Cells of a suite, the jobs that measure them, and the report of their results."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rhino_jax.bench.process import JobProcess, Outcome
from rhino_jax.bench.progress import Report
from rhino_jax.bench.store import Store
from rhino_jax.bench.suite import BenchRow, Suite
from rhino_jax.bench.versions import versions


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteReport:
    """A suite's results as files have them.

    Attributes:
      text: all of them, as Markdown.
      lines: some for a README; none without results.
      values: what the JSON file has.
      failed: number of cells that failed, and would be run again.
      plot: SVG that the text links to; empty: none.
    """

    text: str
    lines: Sequence[str]
    values: dict[str, Any]
    failed: int
    plot: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCell:
    """One measurement of a suite: a row, or some of its methods.

    Attributes:
      key: name for files.
      row: the row, with the methods that are measured.
      programs: number of plans and programs that are made, each within the suite's time
        limit.
    """

    key: str
    row: BenchRow
    programs: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class SuiteRun:
    """A suite in progress: its folder, and the jobs of its cells.

    Attributes:
      suite: the suite.
      store: folder of the results.
      report: called with a line for every cell.
      versions: versions of the planner and compilers.
      stop: kills running processes when it is set.
    """

    suite: Suite
    store: Store
    report: Report
    versions: Mapping[str, str] = field(default_factory=lambda: versions())
    stop: threading.Event = field(default_factory=threading.Event)

    def job(self, cell: BenchCell, process: JobProcess) -> Outcome:
        """Measure a cell in a process; see `rhino_jax.bench.child`."""
        job = {
            "kind": self.suite.kind,
            "row": cell.row,
            "folder": str(self.store.folder),
            "versions": dict(self.versions),
        }
        timeout_s = self.suite.timeout_s * cell.programs
        return process.run(job, self.store.log(cell.key), timeout_s, self.stop)

    def made_with(self, cell: BenchCell) -> dict[str, Any]:
        """Return what a cell's result depends on."""
        methods = [method.name for method in cell.row.methods]
        return {"versions": self.versions, "methods": methods}
