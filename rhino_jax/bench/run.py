"""The runner: cells one after the other, each result saved before the next begins."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from rhino_jax.bench.cell import RowRun
from rhino_jax.bench.methods import ShardingMethod
from rhino_jax.bench.progress import Clock, Report, line_of, title_of
from rhino_jax.bench.records import Result, cell_key
from rhino_jax.bench.store import Store, in_order
from rhino_jax.bench.suite import BenchRow, Suite
from rhino_jax.bench.versions import versions


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
