"""The command `python -m rhino_jax bench`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from rhino_jax.bench.cells import SuiteRun
from rhino_jax.bench.checks import BenchError
from rhino_jax.bench.compiling import CompileKind
from rhino_jax.bench.methods import ALPA, SCHEDULES, parse_method
from rhino_jax.bench.records import Result
from rhino_jax.bench.rows import ROW_KINDS
from rhino_jax.bench.rows.row_run import RowKind
from rhino_jax.bench.run import run_suite
from rhino_jax.bench.store import Store, read_results, write_json
from rhino_jax.bench.suite import Suite, load_suite, suite_names
from rhino_jax.bench.tables.readme import check_places, write_results
from rhino_jax.bench.tables.table import to_list
from rhino_jax.bench.versions import versions
from rhino_jax.errors import HardwareError
from rhino_jax.hardware.files import load_target
from rhino_jax.verify.targets import compile_target


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Options of the command line.

    Attributes:
      suite: name or file; None only to list the suites.
      is_list: whether to list the suites or rows, and run nothing.
      only: glob that a row's workload, or workload and target, must match; empty: all
        rows.
      methods: names that replace the suite's methods; empty: the suite's.
      timeout_s: replaces the suite's time limit; None: the suite's.
      jobs: number of rows compiled at a time; None: one per core, at most two, since
        compilers need memory. Timed suites run one row at a time.
      out: folder of the results.
      is_fresh: whether to discard earlier results.
      requires_extras: whether a target without a compiler is an error.
      readme: README of a checkout, into which the results are written; None: no file.
      against: results of an earlier run to compare with; None: no comparison.
    """

    suite: str | None = None
    is_list: bool = False
    only: str = ""
    methods: tuple[str, ...] = ()
    timeout_s: float | None = None
    jobs: int | None = None
    out: str = "rhino_bench"
    is_fresh: bool = False
    requires_extras: bool = False
    readme: str | None = None
    against: str | None = None


def run_command(command: Command) -> int:
    """Run or list a suite.

    Returns:
      1 if cells timed out, died or raised; else 0.

    Raises:
      BenchError: there is no such suite, or it cannot run with these options.
    """
    if command.suite is None:
        if not command.is_list:
            raise BenchError(
                "`bench`: which suite?",
                numbers=f"there are: {', '.join(suite_names())}",
                fix="python -m rhino_jax bench quick",
            )
        print("\n".join(suite_names()))
        return 0
    suite = narrow(load_suite(command.suite), command.only, command.methods)
    suite = replace(suite, timeout_s=command.timeout_s or suite.timeout_s)
    if command.readme is not None and (command.only or command.methods):
        raise BenchError(
            f"`bench {suite.name} --readme`: only the results of a whole suite are"
            " written there.",
            where="--only" if command.only else "--methods",
            fix="leave one of them out.",
        )
    if suite.kind in ROW_KINDS and command.against is not None:
        raise BenchError(
            f"`bench {suite.name} --against`: only what is compiled is compared.",
            where="--against",
            numbers=f"the suite's kind is {suite.kind!r}",
            fix="leave --against out.",
        )
    if suite.kind in ROW_KINDS and any(m.refine for r in suite.rows for m in r.methods):
        raise BenchError(
            f"`bench {suite.name}`: only suites of kind 'compile' refine plans.",
            where="--methods" if command.methods else command.suite,
            numbers=f"its kind is {suite.kind!r}",
            fix="leave the method refined out.",
        )
    _check_schedules(suite)
    if command.is_list:
        for row in suite.rows:
            print(f"{row.title}: {', '.join(m.name for m in row.methods)}")
        return 0
    if command.readme is not None:
        check_places(command.readme, suite.name)
    try:
        return _run(suite, command)
    except KeyboardInterrupt:
        say("\nstopped; the same command goes on from here")
        raise


def _check_schedules(suite: Suite) -> None:
    """Refuse schedules in suites without stages, other methods in suites with.

    Suites that plan stages may also have the methods `auto` and `alpa`.
    """
    is_staged = suite.kind in ("stages", "pipelines")
    methods = dict.fromkeys(m for row in suite.rows for m in row.methods)
    wrong = [m.name for m in methods if (m.plan in SCHEDULES) != is_staged]
    wrong += [ALPA for m in methods if m.plan == ALPA and not is_staged]
    if suite.kind == "pipelines":
        wrong = [name for name in wrong if name not in ("auto", ALPA)]
    if wrong:
        raise BenchError(
            f"`bench {suite.name}`: schedules are methods of suites of kind 'stages'"
            " or 'pipelines', and only these.",
            where=", ".join(wrong),
            numbers=f"its kind is {suite.kind!r}; schedules: {', '.join(SCHEDULES)}",
            fix="leave these methods out, or change the suite's kind.",
        )
    for row in suite.rows:
        if row.alpa is None and any(m.plan == ALPA for m in row.methods):
            raise BenchError(
                f"`bench {suite.name}`: a row says nothing of what Alpa found for it.",
                where=row.title,
                numbers=f"methods: {', '.join(m.name for m in row.methods)}",
                fix=f"leave the method {ALPA!r} out, or add `alpa` to the row.",
            )


def _run(suite: Suite, command: Command) -> int:
    earlier: tuple[Result, ...] = ()
    if command.against is not None:
        earlier = read_results(command.against, f"`bench {suite.name} --against`")
    store = Store.open(command.out, is_fresh=command.is_fresh)
    missing: dict[str, str] = {}
    jobs = 1
    kind: RowKind[Any] | CompileKind | None = ROW_KINDS.get(suite.kind)
    if kind is None:
        missing = _missing_extras(suite, command)
        jobs = command.jobs or min(2, os.cpu_count() or 1)
        kind = CompileKind(missing, earlier, command.against)
    results = run_suite(kind, SuiteRun(suite, store, say), jobs)
    report = kind.report(suite, results, _words(command))
    head = {"suite": suite.name, "versions": versions()}
    write_json(store.folder / f"{suite.name}.json", head | report.values)
    (store.folder / f"{suite.name}.md").write_text(report.text, encoding="utf-8")
    if report.plot:
        plot = store.folder / f"{suite.name}.svg"
        plot.write_text(report.plot, encoding="utf-8")
    print(report.text)
    say(f"written to {store.folder}")
    if command.readme is not None:
        summary = to_list(report.lines)
        where = write_results(
            command.readme, suite.name, report.text, summary, report.plot
        )
        say(f"written to {where}")
    for target, error in missing.items():
        say(f"!!! NOT RUN: {target}: {error}")
    return 1 if report.failed else 0


def say(line: str) -> None:
    """Print a line of progress to standard error, flushed."""
    print(line, file=sys.stderr, flush=True)


def narrow(suite: Suite, only: str, methods: Sequence[str]) -> Suite:
    """Return the requested part of a suite.

    Args:
      suite: the suite.
      only: see `Command`.
      methods: see `Command`.

    Raises:
      BenchError: nothing is left, or there is no such method.
    """
    rows = [
        row
        for row in suite.rows
        for names in [(row.model, row.workload, f"{row.workload} {row.target}")]
        if not only or any(fnmatchcase(name, only) for name in names)
    ]
    if not rows:
        workloads = dict.fromkeys(row.workload for row in suite.rows)
        raise BenchError(
            f"`bench {suite.name} --only {only!r}`: no workload matches.",
            numbers=f"workloads: {', '.join(workloads)}",
            fix="give one of these, or a pattern as 'gpt-*' or '* v5e:4x4'.",
        )
    if methods:
        parsed = tuple(dict.fromkeys(map(parse_method, methods)))
        rows = [replace(row, methods=parsed) for row in rows]
    return replace(suite, rows=tuple(rows))


def _missing_extras(suite: Suite, command: Command) -> dict[str, str]:
    """Return targets without an installed compiler, and what is missing.

    Raises:
      BenchError: there are some, and all are required.
    """
    found: dict[str, str] = {}
    for target in dict.fromkeys(row.target for row in suite.rows):
        error = missing_extra(target)
        if error is not None:
            found[target] = error
            say(f"!!! NOT RUN: {target}: {error}")
    if found and command.requires_extras:
        raise BenchError(
            f"`bench {suite.name} --require-extras`: some targets cannot be compiled"
            " for.",
            where=", ".join(found),
            numbers="; ".join(dict.fromkeys(found.values())),
            fix="install what is missing.",
        )
    return found


def missing_extra(target: str) -> str | None:
    """Return the compiler that is missing for a target; None if it is installed."""
    if "cpu" in load_target(target).device.kinds:
        return None
    try:
        compile_target(target)
    except HardwareError as error:
        return f"{error.what} {error.fix}"
    return None


def _words(command: Command) -> str:
    """Return the command to repeat the run, without its output options."""
    words = ["python -m rhino_jax bench", shlex.quote(str(command.suite))]
    if command.only:
        words.append(f"--only {shlex.quote(command.only)}")
    if command.methods:
        words.append(f"--methods {shlex.quote(','.join(command.methods))}")
    return " ".join(words)
