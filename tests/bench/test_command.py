"""The command, from its words to its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rhino_jax.bench import child, command as command_module
from rhino_jax.bench.process import JobProcess, Outcome
from rhino_jax.bench.suite import suite_names
from rhino_jax.cli import main
from tests.cases import covering


SUITE = """
methods = ["fsdp@matmul", "megatron+sp", "best"]

[[rows]]
model = "mlp-tiny"
regime = "little"
target = "cpu:4"
mesh = {data = 2, model = 2}
"""


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(SUITE)
    monkeypatch.chdir(tmp_path)
    return path


def test_lists(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    assert capsys.readouterr().out.split() == list(suite_names())
    assert main(["bench", str(suite), "--list"]) == 0
    listed = capsys.readouterr().out
    assert listed == (
        "mlp-tiny (little), cpu:4, data=2 × model=2: fsdp@matmul, megatron+sp, best\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench"], "which suite"),
        (["bench", "quik"], "Did you mean 'quick'"),
        (["bench", "quick", "--only", "nothing*"], "no workload matches"),
        (["bench", "quick", "--methods", "bst"], "Did you mean 'best'"),
        (["bench", "quick", "--only", "gpt*", "--readme"], "of a whole suite"),
        (["bench", "plan", "--methods", "fast,refined"], "kind 'compile' refine"),
        (["bench", "clock", "--methods", "refined:2"], "kind 'compile' refine"),
        (["bench", "quick", "--methods", "1f1b"], "schedules are methods of suites"),
        (["bench", "stages", "--methods", "best"], "schedules are methods of suites"),
        (["bench", "plan", "--against", "a.json"], "only what is compiled is compared"),
        (["bench", "quick", "--against", "a.json"], "holds no results"),
    ],
)
def test_bad_words(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def run_here(process: Any, job: Any, *rest: Any) -> Outcome:
    """Do a job in this process, as `JobProcess` does it in one of its own."""
    return Outcome(status="ok", values=child.run_task(job))


@pytest.mark.parametrize("has_processes", covering([False, True]))
def test_from_end_to_end_and_on(
    suite: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    has_processes: bool,
) -> None:
    if not has_processes:
        monkeypatch.setattr(JobProcess, "run", run_here)
        monkeypatch.setattr(child, "_emulate", lambda _: None)
    (tmp_path / "READ.md").write_text("<!-- bench:mine -->\n<!-- /bench:mine -->\n")
    tables = tmp_path / "rhino_jax" / "bench" / "RESULTS.md"
    tables.parent.mkdir(parents=True)
    tables.write_text("# Results\n")
    words = ["bench", "mine.toml"]
    assert main([*words, "--methods", "fsdp@matmul,best"]) == 0
    first = capsys.readouterr()
    assert "[2/2]" in first.err
    assert main([*words, "--readme", "READ.md"]) == 0
    assert "2 of 3 cells are there already" in capsys.readouterr().err
    found = json.loads((tmp_path / "rhino_bench" / "mine.json").read_text())
    recipe, missing, best = found["results"]
    assert missing["status"] == "not allowed" and missing["compiled"] is None
    for result in (recipe, best):
        assert result["status"] == "ok"
        assert result["compiled"]["peak_bytes"] > 0
        assert result["compiled"]["step_time_s"] > 0
        assert result["versions"]["jax"]
    assert recipe["predicted"]["wire_bytes"] > 0
    assert found["figures"]["fidelity"]["programs"] >= 1
    assert "| mlp-tiny | little | cpu:4 |" in tables.read_text()
    text = (tmp_path / "READ.md").read_text()
    assert "`mine`, rows: 1, on cpu:4" in text and "| mlp-tiny" not in text
    assert main([*words, "--against", "rhino_bench/mine.json"]) == 0
    assert "- `best`, 1 rows: geometric mean 1.000" in capsys.readouterr().out


def test_a_missing_extra_is_said_or_is_an_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        command_module, "missing_extra", lambda target: "libtpu is not installed."
    )
    path = tmp_path / "mine.toml"
    path.write_text(SUITE.replace("cpu:4", "v5e:2x2"))
    words = ["bench", str(path), "--out", str(tmp_path / "out")]
    assert main([*words, "--require-extras"]) == 2
    assert "libtpu is not installed" in capsys.readouterr().err
    assert main(words) == 0
    told = capsys.readouterr()
    assert "!!! NOT RUN: v5e:2x2: libtpu is not installed." in told.err
    assert "no extra" in told.out
