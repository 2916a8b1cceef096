"""Plans are kept on disk, and found again only where they would be made again."""

from __future__ import annotations

import dataclasses
import os
import pickle
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.errors import RhinoWarning
from rhino_jax.plan.files import cache
from rhino_jax.plan.plan import PlanData
from tests.plan.samples import sample_plan


KEY = "0" * 64


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RHINO_CACHE", "1")
    monkeypatch.setenv("RHINO_CACHE_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


class Maker:
    def __init__(self, plan: PlanData | None = None) -> None:
        self.plan, self.count = plan or sample_plan(), 0

    def __call__(self) -> PlanData:
        self.count += 1
        return self.plan


def step(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w).sum()


def shapes(*dims: int) -> Any:
    return tuple(jax.ShapeDtypeStruct((d, 16), jnp.float32) for d in dims)


def planned(**options: Any) -> rhino.Plan:
    options = {"mesh": {"a": 2, "b": 4}, "hardware": "v5e:2x4", **options}
    fn = options.pop("fn", step)
    return rhino.plan(fn, *options.pop("args", shapes(16, 64)), **options)


def test_a_second_call_makes_nothing(folder: Path) -> None:
    make = Maker()
    first, second = cache.kept(KEY, make), cache.kept(KEY, make)
    assert make.count == 1
    assert first == second == make.plan
    assert not first.cached
    assert second.cached == str(next(folder.iterdir()))
    assert "searched once, read from" in rhino.Plan.of(second).table()


def test_what_was_searched_and_what_was_read_are_the_same_in_every_field(
    folder: Path,
) -> None:
    pins = {"w": P("b", None)}
    first, second = planned(pins=pins), planned(pins=pins)
    assert second.cached and not first.cached
    for item in dataclasses.fields(PlanData):
        if item.name not in ("cached", "origin", "traced"):  # each was traced
            assert getattr(first, item.name) == getattr(second, item.name), item.name


CHANGES: dict[str, dict[str, Any]] = {
    "mesh": {"mesh": {"a": 4, "b": 2}},
    "names of axes": {"mesh": {"a": 2, "c": 4}},
    "no mesh": {"mesh": None},
    "hardware": {"hardware": "v5p:2x2x2"},
    "budget": {"memory_budget_bytes": 2**30},
    "pins": {"pins": {"w": P("b", None)}},
    "level": {"level": "fast"},
    "seed": {"seed": 1},
    "time limit": {"time_limit_s": 60},
    "donation": {"donate_argnums": 0},
    "shapes": {"args": shapes(16, 128)},
    "operation": {"fn": lambda w, x: jnp.sin(x @ w).sum()},
    "parameter": {"fn": lambda v, x: step(v, x)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_is_asked_for_counts(folder: Path, change: str) -> None:
    planned()
    assert planned().cached
    assert not planned(**CHANGES[change]).cached
    assert planned(**CHANGES[change]).cached


def test_source_and_versions_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rhino_jax.plan.files import cache as cache_key

    planned()
    before = cache_key.made_with()
    for name in before:
        monkeypatch.setattr(
            cache_key, "made_with", lambda name=name: {**before, name: "other"}
        )
        assert not planned().cached, name
    assert len(before["source"]) == 64


@pytest.mark.parametrize("value", ["0", "false", "OFF"])
def test_it_can_be_turned_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("RHINO_CACHE", value)
    make = Maker()
    cache.kept(KEY, make)
    cache.kept(KEY, make)
    assert make.count == 2
    assert not folder.exists()


def test_it_is_where_the_user_keeps_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RHINO_CACHE", raising=False)
    monkeypatch.delenv("RHINO_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_dir() == tmp_path / "rhino_jax"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache.cache_dir() == Path("/home/someone/.cache/rhino_jax")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache.cache_dir() == Path("/home/someone/Library/Caches/rhino_jax")


def test_settings_that_cannot_be_used_are_reported_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache._warn.cache_clear()
    folder.parent.joinpath("file").write_text("")
    monkeypatch.setenv("RHINO_CACHE_DIR", str(folder.parent / "file" / "inside"))
    with pytest.warns(RhinoWarning, match="RHINO_CACHE_DIR") as seen:
        cache.kept(KEY, Maker())
        cache.kept(KEY, Maker())
    monkeypatch.setenv("RHINO_CACHE_DIR", str(folder))
    monkeypatch.setenv("RHINO_CACHE_BYTES", "2GB")
    with pytest.warns(RhinoWarning, match="'2GB' is no number") as also:
        cache.kept(KEY, Maker())
        cache.kept("f" * len(KEY), Maker())
    assert len(seen) == len(also) == 1


def damaged(content: bytes) -> list[bytes]:
    other = bytes([content[-1] ^ 1])  # of the checksum
    return [b"", b"not a plan", content[: len(content) // 2], content[:-1] + other]


@pytest.mark.parametrize("how", range(4))
def test_a_damaged_file_is_replaced(folder: Path, how: int) -> None:
    make = Maker()
    cache.kept(KEY, make)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damaged(whole)[how])
    assert cache.kept(KEY, make) == make.plan
    assert make.count == 2
    assert path.read_bytes() == whole


def test_a_plan_of_another_program_is_replaced(folder: Path) -> None:
    cache.kept(KEY, Maker(sample_plan(program_name="other")))
    make = Maker()
    found = cache.kept(KEY, make, belongs=lambda p: p.program_name == "train_step")
    assert found.program_name == "train_step"
    assert cache.kept(KEY, make).program_name == "train_step"
    assert make.count == 1


def test_what_is_not_worth_keeping_is_not_kept(folder: Path) -> None:
    cache.kept(KEY, Maker(), is_worth_keeping=lambda plan: False)
    assert not folder.exists()


def test_the_oldest_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Maker()
    for i in range(4):
        cache.kept(str(i), make)
        os.utime(folder / f"{i}.plan", (i, i))
    cache.kept("0", make)  # asked for: now the youngest
    size = (folder / "0.plan").stat().st_size
    monkeypatch.setenv("RHINO_CACHE_BYTES", str(3 * size))
    unfinished, writing = folder / ".a.tmp", folder / ".b.tmp"
    for path in (unfinished, writing):
        path.write_bytes(b"")
    os.utime(unfinished, (1, 1))
    cache.kept("4", make)
    assert sorted(p.name for p in folder.iterdir()) == [
        ".b.tmp", "0.plan", "3.plan", "4.plan"
    ]  # fmt: skip


def test_no_place_to_write_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RHINO_CACHE", "1")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RHINO_CACHE_DIR", str(tmp_path / "file" / "below"))
    make = Maker()
    assert cache.kept(KEY, make) == make.plan
    monkeypatch.setenv("RHINO_CACHE_DIR", str(tmp_path / "full"))

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert cache.kept(KEY, make) == make.plan
    assert list((tmp_path / "full").iterdir()) == []


def test_only_the_user_may_look_into_it(folder: Path) -> None:
    cache.kept(KEY, Maker())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


WRITER = """
import sys
from rhino_jax.errors import RhinoWarning
from rhino_jax.plan.files import cache
from tests.plan.samples import sample_plan
for i in range(30):
    made = sample_plan(notes=("x" * 200_000,))
    assert cache.kept("k%d" % (i % 3), lambda: made) == made
    cache._write(cache.cache_dir() / "k0.plan", made)
"""


@pytest.mark.slow
def test_writers_do_not_disturb_each_other(folder: Path) -> None:
    environment = {**os.environ, "RHINO_CACHE_BYTES": "3000"}
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER], env=environment)
        for _ in range(3)
    ]
    time.sleep(0.5)
    writers[0].kill()
    assert [w.wait(timeout=60) for w in writers[1:]] == [0, 0]
    assert not [p for p in folder.iterdir() if p.suffix == ".plan" and not read(p)]


def read(path: Path) -> PlanData | None:
    return cache._read(path)


SECOND = """
import sys
import jax, jax.numpy as jnp
import rhino_jax as rhino
def step(w, x):
    return jnp.tanh(x @ w).sum()
x = jax.ShapeDtypeStruct((64, 16), jnp.float32)
w = jax.ShapeDtypeStruct((16, 16), jnp.float32)
plan = rhino.plan(step, w, x, mesh={"a": 2, "b": 4}, hardware="v5e:2x4")
names = ("ortools", "rhino_jax.planner.search")
solver = [m for m in sys.modules if m.startswith(names)]
print(bool(plan.cached), len(solver))
"""


def test_a_second_process_imports_no_solver(folder: Path, tmp_path: Path) -> None:
    assert not planned().cached  # which is written for the second process
    assert any(m.startswith("ortools") for m in sys.modules)
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(SECOND))
    found = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True, text=True, timeout=120, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ).stdout.split()  # fmt: skip
    assert found == ["True", "0"]


def test_a_plan_can_be_pickled_and_copied() -> None:
    import copy

    plan = planned(mesh=dict(a=2, b=4), hardware="cpu")
    assert plan.mesh is not None
    back = pickle.loads(pickle.dumps(plan))
    assert back == dataclasses.replace(plan, mesh=None)
    assert back.with_mesh(plan.mesh).in_shardings == plan.in_shardings
    assert copy.deepcopy(plan) is plan is copy.copy(plan)
