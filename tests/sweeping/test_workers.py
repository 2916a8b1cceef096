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
from rhino_jax.children import environment_of_child
from rhino_jax.errors import ProcessError, RhinoError
from rhino_jax.frontend import registry
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target
from rhino_jax.models import registry as models
from rhino_jax.plan.fingerprint import fingerprint
from rhino_jax.sweeping.children import Children, _Child
from rhino_jax.sweeping.meshes import Meshes
from rhino_jax.sweeping.searching import Searching
from rhino_jax.sweeping.whole import to_bytes
from rhino_jax.transform.retraced import imported_again
from tests.sweeping.test_sweep import arguments, staged, step


LISTS: dict[str, Any] = {
    "hardware": ["v5e", "h100", load_target("v5p").replace(launch_s=1e-5)],
    "devices": [4, 8],
    "memory_budget_bytes": [None, "1MiB", "1KiB"],
    "batch": [512, 1024],
    "microbatches": [2, 600],
}


def swept(workers: int | None, **lists: Any) -> Any:
    return rhino.sweep(
        step, *arguments(), donate_argnums=0, progress=False, workers=workers, **lists
    )


def test_processes_find_what_one_finds() -> None:
    alone, several = swept(1, **LISTS), swept(2, **LISTS)
    assert len(alone) == 72
    assert several.points == alone.points
    assert {p.fits for p in alone} == {True, False}
    point = several.best
    assert point is not None
    plan = point.plan()
    assert plan.predicted.step_time_s == pytest.approx(point.step_s)
    assert plan.mesh_axes == point.mesh


def test_progress_counts_what_processes_answer() -> None:
    told: list[tuple[int, int, float]] = []
    found = rhino.sweep(
        step,
        *arguments(),
        hardware="v5e",
        devices=[2, 4, 8],
        workers=2,
        progress=lambda done, of, best: told.append((done, of, best.step_s)),
    )
    assert found.best is not None
    assert [t[:2] for t in told] == [(1, 3), (2, 3), (3, 3)]
    assert [t[2] for t in told] == sorted((t[2] for t in told), reverse=True)
    assert told[-1][2] == found.best.step_s


def test_small_sweeps_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(_Child, "__init__", lambda self, *of: started.append(of))
    swept(None, hardware="v5e", devices=[2, 4])
    assert started == []


def test_long_sweeps_start_as_many_as_there_are_cores() -> None:
    with Searching(Meshes(), None, 100) as searching:
        searching._longest_s = 0.01
        assert not searching._is_worth_it()
        searching._longest_s = 1.0
        assert searching._is_worth_it() == (searching._most > 1)


def test_a_process_that_fails_names_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search that raises what is no error of the user's."""
    ask = Children.ask

    def broken(self: Children, key: int, task: Any) -> None:
        asked, of = task
        if asked.target.name == "h100:8":
            asked = replace(asked, level="none")
        ask(self, key, (asked, of))

    monkeypatch.setattr(Children, "ask", broken)
    with pytest.raises(ProcessError, match="a search failed") as raised:
        swept(2, hardware=["v5e", "h100"], devices=[4, 8], microbatches=2)
    said = str(raised.value)
    assert "KeyError" in said and "8 devices of h100:8, microbatches 2" in said
    assert "Traceback" in "".join(raised.value.__notes__)


def test_a_process_that_is_killed_names_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask = Children.ask

    def killing(self: Children, *of: Any) -> None:
        for child in self._children:
            child._process.kill()
        ask(self, *of)

    monkeypatch.setattr(Children, "ask", killing)
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
        env=environment_of_child(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    out, err = started(tmp_path, 0).communicate(timeout=120)
    assert out.splitlines() == ["script", "done 1", "done 2", "done 3", "3 found"], err


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


@pytest.mark.parametrize("model", ["gpt-tiny", "mlp-data", "two-tower-tiny"])
def test_functions_are_the_same_elsewhere(model: str, tmp_path: Path) -> None:
    """Of a custom derivative, of 64-bit types, and of loops over layers."""
    workload = models.get(model)
    with jax.enable_x64(model == "mlp-data"):
        traced = trace(workload.step, workload.abstract_args(), {})
        (tmp_path / "function").write_bytes(to_bytes(traced) or b"")
        made = imported_again(traced.closed_jaxpr, traced.program)
    script = textwrap.dedent(ELSEWHERE)
    out = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "function")],
        env=environment_of_child(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.split() == [fingerprint(made, ()), str(len(made.ops))]


ELSEWHERE = """
import sys
from pathlib import Path
from rhino_jax.plan.fingerprint import fingerprint
from rhino_jax.sweeping.whole import of_bytes
from rhino_jax.transform.retraced import imported_again

traced = of_bytes(Path(sys.argv[1]).read_bytes())
made = imported_again(traced.closed_jaxpr, traced.program)
print(fingerprint(made, ()), len(made.ops))
"""
