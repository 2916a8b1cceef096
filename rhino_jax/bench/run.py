"""The runner: cells one after the other, each result saved before the next begins."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from typing import Any

from rhino_jax.bench.cells import BenchCell, SuiteRun
from rhino_jax.bench.compiling import CompileKind
from rhino_jax.bench.process import JobProcess, Outcome
from rhino_jax.bench.progress import Clock
from rhino_jax.bench.rows.row_run import RowKind


def run_suite(
    kind: RowKind[Any] | CompileKind, run: SuiteRun, jobs: int = 1
) -> tuple[Any, ...]:
    """Run the cells that have no saved result.

    Args:
      kind: the suite's kind.
      run: the suite, its folder and processes.
      jobs: number of rows at a time; the cells of a row, which may be one program, run
        one after the other.

    Returns:
      The results of all cells, or rows, earlier ones included, in the suite's order.
    """
    rows = [kind.cells(row) for row in run.suite.rows]
    cells = [cell for row in rows for cell in row]
    found: dict[str, Any] = {}
    for cell in cells:
        known = run.store.saved(cell.key, kind.sample, run.made_with(cell))
        if known is not None:
            found[cell.key] = known
    clock = Clock(total=len(cells), done=len(found))
    if found:
        run.report(f"{len(found)} of {len(cells)} cells are there already")
    finishing = threading.Lock()

    def run_row(row: Sequence[BenchCell]) -> None:
        failed: Outcome | None = None
        with closing(JobProcess()) as process:
            for cell in (cell for cell in row if cell.key not in found):
                # One failed sample of a row is enough.
                value: Any = failed or kind.measured(cell, process, run)
                if kind.is_final(value):
                    run.store.save(cell.key, value, run.made_with(cell))
                with finishing:
                    found[cell.key], count = value, clock.tick()
                    if failed is None:
                        run.report(f"{count} {kind.line(cell, value)}")
                failed = value if isinstance(value, Outcome) else None

    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run_row, row) for row in rows]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            # An error in one row stops all.
            run.stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return kind.results(run.suite, [[found[c.key] for c in row] for row in rows])
