"""The runner, with children that do what the tests say."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rhino_jax.bench import cells as cells_module
from rhino_jax.bench.cells import SuiteRun
from rhino_jax.bench.checks import BenchError
from rhino_jax.bench.command import Command, narrow, run_command
from rhino_jax.bench.compiling import CompileKind
from rhino_jax.bench.methods import parse_method
from rhino_jax.bench.process import JobProcess, Outcome
from rhino_jax.bench.progress import Clock, format_duration
from rhino_jax.bench.records import Result, cell_key
from rhino_jax.bench.run import run_suite
from rhino_jax.bench.store import Store
from rhino_jax.bench.suite import Suite, parse_suite
from rhino_jax.utils.worker import WorkerStopped
from tests.bench.samples import measure


SUITE = parse_suite(
    {
        "methods": ["dp", "fsdp@matmul", "best", "refined:2"],
        "rows": [
            {
                "model": "mlp-tiny",
                "regime": "plenty",
                "target": "cpu:8",
                "mesh": {"data": 8},
            },
            {
                "model": "gpt-tiny",
                "regime": "little",
                "target": "v5e:2x4",
                "mesh": {"data": 4, "model": 2},
            },
        ],
    },
    name="mine",
    file="mine.toml",
)

OK = Outcome(status="ok")
STEPS_MS = {"dp": 10.0, "fsdp_matmul": 8.0, "best": 7.0, "refined2": 6.0}


class Children:
    """Stands in for child processes: writes what they would, or dies."""

    def __init__(self) -> None:
        self.jobs: list[str] = []
        self.ends: dict[str, Outcome | type[BaseException]] = {}
        self.unplanned: set[str] = set()

    def run(
        self,
        process: JobProcess,
        job: Mapping[str, Any],
        log: Path,
        timeout_s: float,
        stop: threading.Event,
    ) -> Outcome:
        row, name = job["row"], log.stem.rpartition("-")[2]
        self.jobs.append(f"{row.model} {name}")
        if self.jobs[-1] in self.unplanned:
            return Outcome(status="died", error="why")
        if self.jobs[-1] == "gpt-tiny dp":
            return Outcome(status="ok", values=REFUSED)
        key = f"{cell_key(row, *row.methods)}-plan"
        Store(Path(job["folder"])).save(key, PLANNED, job["versions"])
        end = self.ends.get(self.jobs[-1], OK)
        if isinstance(end, type):
            raise end()
        if end is not OK:
            return end
        return Outcome(status="ok", values=self._compiled(job, name))

    def _compiled(self, job: Mapping[str, Any], name: str) -> Result:
        is_refined = job["row"].methods[0].refine
        return replace(
            PLANNED,
            candidates=({"name": "best"},) if is_refined else (),
            program=name,
            compiled=measure(STEPS_MS[name]),
            rematerialised=0,
            compile_s=3.0,
        )


PLANNED = Result(status="ok", plan_s=2.0, mesh={"data": 8}, predicted=measure(9.0))
REFUSED = Result(status="not allowed", error="no batch")


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Children:
    found = Children()
    monkeypatch.setattr(JobProcess, "run", lambda *args: found.run(*args))
    monkeypatch.setattr(cells_module, "versions", lambda: {"rhino_jax": "1"})
    return found


def run_in(
    store: Store, suite: Suite = SUITE, jobs: int = 1, **missing: str
) -> tuple[Result, ...]:
    run = SuiteRun(suite, store, lambda line: None)
    return run_suite(CompileKind(missing), run, jobs)


def run(folder: Path, suite: Suite = SUITE, **missing: str) -> dict[str, Result]:
    results = run_in(Store.open(folder), suite, **missing)
    return {f"{r.workload} {r.method}": r for r in results}


def test_every_cell_has_a_result(tmp_path: Path, children: Children) -> None:
    found = run(tmp_path)
    assert len(found) == 8
    first = found["mlp-tiny fsdp@matmul"]
    assert first.fits and first.compiled == measure(8.0)
    assert first.predicted == measure(9.0) and first.plan_s == 2.0
    assert found["gpt-tiny dp"].status == "not allowed"
    assert found["gpt-tiny refined:2"].candidates == ({"name": "best"},)
    assert len(children.jobs) == 8


def test_what_is_finished_is_not_run_again(tmp_path: Path, children: Children) -> None:
    once = run(tmp_path)
    children.jobs.clear()
    assert run(tmp_path) == once
    assert children.jobs == []


def test_an_interrupted_suite_goes_on_where_it_was(
    tmp_path: Path, children: Children
) -> None:
    children.ends["gpt-tiny fsdp_matmul"] = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    children.ends.clear()
    children.jobs.clear()
    assert len(run(tmp_path)) == 8
    assert children.jobs == [
        "gpt-tiny fsdp_matmul",
        "gpt-tiny best",
        "gpt-tiny refined2",
    ]


@pytest.mark.parametrize("status", ["died", "timeout", "error"])
def test_a_cell_that_dies_is_a_result_and_is_tried_again(
    tmp_path: Path, children: Children, status: str
) -> None:
    children.ends["mlp-tiny best"] = Outcome(status=status, error="why")
    found = run(tmp_path)
    dead = found["mlp-tiny best"]
    assert (dead.status, dead.error, dead.fits) == (status, "why", False)
    assert dead.predicted == measure(9.0) and dead.compiled is None
    assert found["mlp-tiny refined:2"].fits and found["gpt-tiny best"].fits
    children.ends.clear()
    children.jobs.clear()
    assert run(tmp_path)["mlp-tiny best"].fits
    assert children.jobs == ["mlp-tiny best"]


def test_a_cell_whose_planning_dies_has_no_predictions(
    tmp_path: Path, children: Children
) -> None:
    children.unplanned = {"mlp-tiny dp"}
    found = run(tmp_path)
    dead = found["mlp-tiny dp"]
    assert (dead.status, dead.error, dead.predicted) == ("died", "why", None)
    assert found["mlp-tiny best"].fits and found["gpt-tiny best"].fits


def test_other_versions_run_again(
    tmp_path: Path, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path)
    children.jobs.clear()
    monkeypatch.setattr(cells_module, "versions", lambda: {"rhino_jax": "2"})
    run(tmp_path)
    assert len(children.jobs) == 8


def test_a_method_that_is_added_later_is_all_that_runs(
    tmp_path: Path, children: Children
) -> None:
    run(tmp_path, narrow(SUITE, "mlp-*", ["dp"]))
    children.jobs.clear()
    found = run(tmp_path, narrow(SUITE, "mlp-*", ["dp", "best"]))
    assert list(found) == ["mlp-tiny dp", "mlp-tiny best"]
    assert children.jobs == ["mlp-tiny best"]


def test_rows_that_run_at_a_time_give_the_same(
    tmp_path: Path, children: Children
) -> None:
    one, two = Store.open(tmp_path / "1"), Store.open(tmp_path / "2")
    alone = run_in(one)
    assert run_in(two, jobs=2) == alone
    assert run_in(two) == alone


def test_an_interrupt_of_one_row_stops_the_others(
    tmp_path: Path, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Event()

    def run_job(
        process: JobProcess,
        job: Mapping[str, Any],
        log: Path,
        timeout_s: float,
        stop: threading.Event,
    ) -> Outcome:
        if job["row"].model == "mlp-tiny":
            started.wait(30)
            raise KeyboardInterrupt
        started.set()
        assert stop.wait(30), "nobody stopped this"
        raise WorkerStopped

    monkeypatch.setattr(JobProcess, "run", run_job)
    store = Store.open(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_in(store, jobs=2)
    assert not list((store.folder / "results").iterdir())


def test_a_missing_extra_is_a_result_that_is_not_final(
    tmp_path: Path, children: Children
) -> None:
    store = Store.open(tmp_path)
    results = run_in(store, **{"v5e:2x4": "libtpu is not installed"})
    assert [r.status for r in results[4:]] == ["no extra"] * 4
    assert results[4].error == "libtpu is not installed"
    assert run(tmp_path)["gpt-tiny best"].fits


def test_narrowing() -> None:
    assert [r.model for r in narrow(SUITE, "gpt*", ()).rows] == ["gpt-tiny"]
    assert [r.model for r in narrow(SUITE, "* cpu:8", ()).rows] == ["mlp-tiny"]
    assert narrow(SUITE, "", ["dp"]).rows[0].methods == (parse_method("dp"),)
    with pytest.raises(BenchError, match="no workload matches") as caught:
        narrow(SUITE, "llama*", ())
    assert "mlp-tiny" in caught.value.numbers


def test_time_that_is_left() -> None:
    now = iter([0.0, 60.0, 180.0])
    clock = Clock(total=12, done=9, clock=lambda: next(now))
    assert clock.tick() == "[10/12, 2 min left]"
    assert clock.tick() == "[11/12, 2 min left]"
    assert clock.tick() == "[12/12]"
    assert [format_duration(s) for s in (40, 59.6, 3599, 3720)] == [
        "40 s", "60 s", "1 h 00 min", "1 h 02 min",
    ]  # fmt: skip


def test_a_suite_must_be_named() -> None:
    with pytest.raises(BenchError, match="which suite"):
        run_command(Command())
