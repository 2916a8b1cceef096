"""Slow tests take turns, and what a run leaves out is named."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import covering
from tests.turns import read_turn, split


ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

SLOW = [pytest.param(x, marks=pytest.mark.slow) for x in range(1, 7)]

@pytest.mark.parametrize("x", [0, *SLOW])
def test_of_a_matrix(x):
    pass
"""


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [0, 1, 4, 17])
def test_every_test_has_its_turn(size: int, count: int) -> None:
    names = [f"test_{i}" for i in range(size)]
    turns = [split(names, turn, count)[0] for turn in range(1, count + 1)]
    assert sorted(itertools.chain(*turns)) == sorted(names)
    assert max(map(len, turns)) - min(map(len, turns)) <= 1
    for turn in range(1, count + 1):
        kept, others = split(names, turn, count, always=names[:2])
        assert set(names[:2]) <= set(kept) and sorted(kept + others) == sorted(names)


@pytest.mark.parametrize("text", ["0/3", "4/3", "2", "a/b", "/"])
def test_what_is_no_turn_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="as 2/3"):
        read_turn(text)


def test_cases_of_the_short_run() -> None:
    def slow(cases: list) -> list:
        return [case.values for case in cases if hasattr(case, "marks")]

    assert slow(covering(range(3))) == [(1,), (2,)]
    assert slow(covering(["a", "b", "c"], ["b"])) == [("a",), ("c",)]
    assert slow(covering([(1, 2), (3, 4)], lambda case: case[0] > 1)) == [(1, 2)]
    assert slow(covering([(1, 2), (3, 4)], each=True)) == [((3, 4),)]
    marked = covering([1, pytest.param(2, id="two", marks=pytest.mark.browser)])[1]
    assert marked.id == "two" and {m.name for m in marked.marks} == {"browser", "slow"}
    with pytest.raises(ValueError, match="no such cases"):
        covering([1], [2])


def test_what_a_run_leaves_out_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    failed = "# of the last run\ntest_it.py::test_of_a_matrix[4]\n"
    (tmp_path / "failed").write_text(failed)

    def run(*options: str) -> str:
        command = [sys.executable, "-m", "pytest", "-v", "-p", "tests.turns", *options]
        found = subprocess.run(
            [*command, f"--rootdir={tmp_path}", str(tmp_path)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        )
        return found.stdout + found.stderr

    assert "1 passed" in run()
    turn = run("-m", "slow", "--turn", "2/3", "--first", str(tmp_path / "failed"))
    assert "3 passed" in turn and "left to other turns: 3 tests" in turn
    others = turn.partition("left to other turns")[2]
    assert [x for x in range(7) if f"[{x}]" in others] == [1, 3, 6]
    assert turn.index("matrix[4] PASSED") < turn.index("matrix[2] PASSED")

    log = tmp_path / "log"
    options = ("-p", "xdist", "-n", "2", "--end-after", "1e-9", "--log", str(log))
    late = run("-m", "slow or not slow", *options, "--turn", "1/2")
    assert "4 skipped" in late and "NOT RUN: the time of this run was over: 4" in late
    name = "test_it.py::test_of_a_matrix"
    expected = [f"left out\t{name}[{x}]" for x in (2, 4, 6)]
    expected += [f"no time\t{name}[{x}]" for x in (0, 1, 3, 5)]
    assert sorted(log.read_text().splitlines()) == expected


def unknown_names(file: Path, root: Path) -> list[str]:
    """Return the names of a file of names that no test of a checkout has."""
    unknown = []
    for line in file.read_text(encoding="utf-8").splitlines():
        name = line.partition("#")[0].strip()
        path, _, test = name.partition("::")
        function = test.partition("[")[0].rpartition("::")[2]
        if name and not (
            (root / path).is_file()
            and re.search(rf"^\s*def {function}\(", (root / path).read_text(), re.M)
        ):
            unknown.append(name)
    return unknown


def test_names_that_failed_are_names_of_tests(tmp_path: Path) -> None:
    """A name that no test has any more would be passed over."""
    here = "tests/test_turns.py::test_names_that_failed_are_names_of_tests"
    gone = ["tests/test_turns.py::test_gone[1]", "tests/test_gone.py::test_x"]
    names = tmp_path / "failed"
    names.write_text("\n".join(["# a comment", here, *gone]), encoding="utf-8")
    assert unknown_names(names, ROOT) == gone
    if (failed := ROOT / ".ci" / "failed").exists():
        assert unknown_names(failed, ROOT) == []
