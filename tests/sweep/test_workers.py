"""Sweeps whose configurations are searched in several processes."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax._compat import new_primitive, pickled
from rhino_jax.errors import ProcessError, RhinoError
from rhino_jax.frontend import registry
from rhino_jax.frontend.trace import Traced, trace
from rhino_jax.hardware.files import load_target
from rhino_jax.models import registry as models
from rhino_jax.plan.fingerprint import fingerprint
from rhino_jax.rewrite.retraced import reimported
from rhino_jax.sweep.jobs import Meshes, of_bytes, to_bytes
from rhino_jax.sweep.running import Searching
from rhino_jax.utils.worker import Worker, environment_of_worker
from tests.cases import covering
from tests.sweep.test_sweep import arguments, staged, step


LISTS: dict[str, Any] = {
    "hardware": ["v5e", load_target("v5p").replace(launch_s=1e-5)],
    "devices": [4, 8],
    "memory_budget_bytes": [None, "1KiB"],
    "batch": [512, 1024],
    "microbatches": [2, 600],
}


def swept(workers: int | None, **lists: Any) -> Any:
    options = {"donate_argnums": 0, "progress": False, "workers": workers}
    return rhino.sweep(step, *arguments(), **{**options, **lists})


def test_processes_find_what_one_finds_and_their_progress_is_counted() -> None:
    told: list[tuple[int, int, Any]] = []
    several = swept(
        2,
        progress=lambda *of: told.append(of),
        **LISTS,
    )
    alone = swept(1, **LISTS)
    assert len(alone) == 32
    assert several.points == alone.points
    # Both budgets of a configuration are told together.
    assert [t[:2] for t in told] == [(i, 32) for i in range(2, 33, 2)]
    # The best is that of the least time per example.
    steps = [best.step_s / best.batch for *_, best in told if best is not None]
    assert len(steps) > 4 and steps == sorted(steps, reverse=True)
    assert told[-1][2] == several.best
    assert {p.fits for p in alone} == {True, False}
    point = several.best
    assert point is not None
    plan = point.plan()
    assert plan.predicted.step_time_s == pytest.approx(point.step_s)
    assert plan.mesh_axes == point.mesh


def test_small_sweeps_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(Worker, "__init__", lambda self, *of: started.append(of))
    swept(None, hardware="v5e", devices=[2, 4])
    assert started == []


def test_long_sweeps_start_as_many_as_there_are_cores() -> None:
    with Searching(Meshes(), None, 100) as searching:
        searching._longest_s = 0.01
        assert not searching._is_worth_it()
        searching._longest_s = 1.0
        assert searching._is_worth_it() == (searching._most > 1)


@pytest.mark.slow
def test_a_process_that_fails_names_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search that raises what is no error of the user's."""
    send = Searching._send

    def broken(self: Searching, asked: Any, of: Any) -> Any:
        if asked.target.name == "h100:8":
            asked = replace(asked, level="none")
        return send(self, asked, of)

    monkeypatch.setattr(Searching, "_send", broken)
    with pytest.raises(ProcessError, match="a search failed") as raised:
        swept(2, hardware=["v5e", "h100"], devices=[4, 8], microbatches=2)
    said = str(raised.value)
    assert "KeyError" in said and "8 devices of h100:8, microbatches 2" in said
    assert "Traceback" in "".join(raised.value.__notes__)


def test_a_process_that_is_killed_names_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send = Searching._send

    def killing(self: Searching, *of: Any) -> Any:
        for process in self._processes:
            process.kill()
        return send(self, *of)

    monkeypatch.setattr(Searching, "_send", killing)
    with pytest.raises(ProcessError, match="has ended") as raised:
        swept(2, hardware="v5e", devices=[4, 8])
    assert "signal 9" in str(raised.value) and "devices of v5e" in str(raised.value)


@pytest.mark.parametrize("workers", [0, -1, "many", 1.5])
def test_workers_are_a_number(workers: Any) -> None:
    with pytest.raises(RhinoError, match="workers must be"):
        swept(workers, hardware="v5e")


SCRIPT = """
import sys, time
import jax, jax.numpy as jnp
import rhino_jax as rhino

print("script")
def f(w, x):
    return jnp.tanh(x @ w)

def tell(done, of, best):
    print("done", done, flush=True)
    time.sleep(float(sys.argv[1]))

shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
found = rhino.sweep(f, shape, shape, hardware="v5e", devices=[2, 4, 8], workers=2,
                    progress=tell)
print(len(found), "found")
"""


def started(tmp_path: Path, wait_s: float) -> subprocess.Popen[str]:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    return subprocess.Popen(
        [sys.executable, "script.py", str(wait_s)],
        cwd=tmp_path,
        env=environment_of_worker(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    out, err = started(tmp_path, 0).communicate(timeout=120)
    assert out.splitlines() == ["script", "done 1", "done 2", "done 3", "3 found"], err


@pytest.mark.slow
def test_an_interrupt_ends_the_processes(tmp_path: Path) -> None:
    script = started(tmp_path, 60)
    assert script.stdout is not None
    while "done" not in script.stdout.readline():
        assert script.poll() is None
    children = children_of(script.pid)
    assert len(children) == 2
    script.send_signal(signal.SIGINT)
    script.communicate(timeout=60)
    assert script.returncode != 0
    until = time.monotonic() + 10
    while any(map(is_alive, children)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_alive, children))


def children_of(process: int) -> list[int]:
    found = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(each) for each in found.split()]


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_stages_are_planned_in_processes_too() -> None:
    """The plan behind a point is made in this process, with the same figures."""
    lists: dict[str, Any] = {
        "hardware": [load_target("v5e").replace(launch_s=1e-5)],
        "devices": 8,
        "stages": [2, [4, 2, 2], [3, 3]],
        "microbatches": 4,
        "memory_budget_bytes": ["1GiB", "64MiB", "1KiB"],
    }
    alone, several = staged(workers=1, **lists), staged(workers=2, **lists)
    assert several.points == alone.points
    assert several.work.planned == 9 and several.work.processes == 2
    assert sum(p.fits for p in several) == 4
    sources = set[str]()
    for point in (p for p in several if p.fits):
        plan = point.plan()
        assert plan.predicted.step_time_s == pytest.approx(point.step_s)
        assert plan.memory_budget_bytes == point.memory_budget_bytes
        sources.update(c.source for c in plan.collectives)
    assert any("test_sweep.py" in source for source in sources)


def test_what_holds_the_users_objects_is_planned_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    primitive = new_primitive("of_the_user")
    assert pickled({"of jax": jax.lax.add_p, "step": 1}) is not None
    assert pickled(primitive) is None
    assert pickled(step) is None
    found = pickle.loads(pickled((jax.lax.add_p, np.float32)) or b"")
    assert found == (jax.lax.add_p, np.float32)
    traced = trace(step, arguments(), {})
    assert to_bytes(traced) is not None
    monkeypatch.setattr(registry, "_USER_RULES", {"of_the_user"})
    assert to_bytes(traced) is None


@pytest.mark.parametrize("is_elsewhere", covering([False, True]))
def test_functions_are_the_same_elsewhere(is_elsewhere: bool, tmp_path: Path) -> None:
    """Of a custom derivative, of 64-bit types, and of loops over layers."""
    files, expected = [], []
    for model in ("gpt-tiny", "mlp-data", "two-tower-tiny"):
        workload = models.get(model)
        files.append(tmp_path / model)
        with jax.enable_x64(model == "mlp-data"):
            traced = trace(workload.step, workload.abstract_args(), {})
            files[-1].write_bytes(to_bytes(traced) or b"")
            expected.append(fingerprint_of(traced))
    if is_elsewhere:
        code = "import sys; from tests.sweep.test_workers import read; "
        code += "[print(*read(file)) for file in sys.argv[1:]]"
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, files)],
            cwd=Path(__file__).parents[2],
            env=environment_of_worker(),
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == [str(x) for pair in expected for x in pair]
    else:
        assert [read(file) for file in files] == expected


def read(file: str | Path) -> tuple[str, int]:
    """Return the fingerprint of a function that was written to a file."""
    return fingerprint_of(of_bytes(Path(file).read_bytes()))


def fingerprint_of(traced: Traced) -> tuple[str, int]:
    made = reimported(traced.closed_jaxpr, traced.program)
    return fingerprint(made, ()), len(made.ops)
