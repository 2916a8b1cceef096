"""A pytest plugin: which slow tests a run holds, and what it leaves out, by name.

A run on a machine without memory reaches every slow test within N runs: `--turn K/N`
keeps those at places K, K + N, … of the selected slow tests, so that neighbours, which
are mostly cases of one matrix, are in different turns. `--end-after` starts no test
after so many seconds. What either leaves out is listed at the end. Tests that
`--first FILE` names, one a line, run first and in every turn. `--log FILE` appends a
line for each test that was left out or failed: "left out", "no time" or "failed", a
tab, and its name.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pytest


LONG_S = 2.0
"""A test of more seconds is `slow`."""

_TOLD_S = 2 * LONG_S  # Machines are shared: what takes this long is no chance.
_NO_TIME = "NOT RUN: the time of this run was over"
_LEFT_OUT = "rhino_left_out"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("turns")
    group.addoption("--turn", metavar="K/N", help="every Nth slow test from the Kth on")
    group.addoption(
        "--end-after", type=float, metavar="S", help="start no test after S seconds"
    )
    group.addoption(
        "--first", type=Path, metavar="FILE", help="tests to run first, one a line"
    )
    group.addoption(
        "--log", type=Path, metavar="FILE", help="append what was left out or failed"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.turn:
        read_turn(config.option.turn)
    config.stash[_START] = time.monotonic()
    names_tests = any("::" in str(argument) for argument in config.args)
    if not config.option.markexpr and not names_tests:
        config.option.markexpr = "not slow"


def read_turn(text: str) -> tuple[int, int]:
    """Return (K, N) of "K/N", with K from 1 to N; raises UsageError for another."""
    turn, _, count = text.partition("/")
    if not (turn.isdigit() and count.isdigit() and 1 <= int(turn) <= int(count)):
        raise pytest.UsageError(f"--turn {text}: not K/N with K from 1 to N, as 2/3")
    return int(turn), int(count)


def split(
    names: Iterable[str], turn: int, count: int, always: Iterable[str] = ()
) -> tuple[list[str], list[str]]:
    """Divide test names into those of a turn and the others.

    Args:
      names: of the slow tests of a run, in pytest's order.
      turn: from 1 to `count`.
      always: names that are in every turn.
    """
    always, kept, others = set(always), [], []
    for i, name in enumerate(names):
        is_kept = name in always or i % count == turn - 1
        (kept if is_kept else others).append(name)
    return kept, others


# After pytest's own selection by marks and words.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    first = _names_in(config.option.first)
    others: set[str] = set()
    if config.option.turn:
        slow = [item.nodeid for item in items if item.get_closest_marker("slow")]
        others = set(split(slow, *read_turn(config.option.turn), first)[1])
    config.stash[_OTHERS] = sorted(others)
    if others:
        config.hook.pytest_deselected(items=[i for i in items if i.nodeid in others])
    kept = [item for item in items if item.nodeid not in others]
    items[:] = sorted(kept, key=lambda item: item.nodeid not in first)


def _names_in(file: Path | None) -> set[str]:
    if file is None or not file.exists():
        return set()
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return {line for line in lines if line}


def pytest_runtest_setup(item: pytest.Item) -> None:
    limit_s = item.config.option.end_after
    if limit_s and time.monotonic() - item.config.stash[_START] > limit_s:
        pytest.skip(_NO_TIME)


# Workers of pytest-xdist collect, and the process that reports does not.
def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_LEFT_OUT] = session.config.stash.get(_OTHERS, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:  # type: ignore[no-untyped-def]
    others = getattr(node, "workeroutput", {}).get(_LEFT_OUT)
    if others is not None:
        node.config.stash[_OTHERS] = others


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if hasattr(config, "workeroutput"):
        return  # The process that reports has all of it.
    stats = terminalreporter.stats
    others = config.stash.get(_OTHERS, [])
    late = [r.nodeid for r in stats.get("skipped", ()) if _NO_TIME in str(r.longrepr)]
    failed = [r.nodeid for key in ("failed", "error") for r in stats.get(key, ())]
    _list(terminalreporter, "left to other turns", others)
    _list(terminalreporter, _NO_TIME, late)
    if config.option.log:
        logged = {"left out": others, "no time": late, "failed": failed}
        with config.option.log.open("a", encoding="utf-8") as log:
            for what, names in logged.items():
                log.writelines(f"{what}\t{name}\n" for name in names)
    long = [
        f"{report.nodeid}  {report.duration:.1f} s"
        for reports in stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        and report.duration > _TOLD_S
        and "slow" not in report.keywords
    ]
    _list(terminalreporter, f"over {_TOLD_S:g} s and not marked slow", sorted(long))


def _list(reporter: pytest.TerminalReporter, title: str, names: list[str]) -> None:
    if names:
        reporter.section(f"{title}: {len(names)} tests")
        reporter.write_line("\n".join(names))


_START = pytest.StashKey[float]()
_OTHERS = pytest.StashKey[list[str]]()
