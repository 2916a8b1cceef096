"""A plan that is found again shows the lines of the code as it is now."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.plan.plan import PlanData


CODE = """
def layer(w, x):
    return rhino.pin(jnp.tanh(x @ w), P("a"))

def train(params, x):
    loss = lambda p: (layer(p["b"], layer(p["a"], x)) ** 2).mean()
    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))
"""
MOVED = "# A comment.\n\n" + CODE.replace("def train", "\n\ndef train")
PARTED = CODE.replace("jnp.tanh(x @ w)", "jnp.tanh(\n        x @ w)")
MESH = {"a": 4, "b": 2}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RHINO_CACHE", "1")
    monkeypatch.setenv("RHINO_CACHE_DIR", str(tmp_path))
    return tmp_path


def function(code: str, file: str = "first.py") -> Any:
    names = {"jax": jax, "jnp": jnp, "rhino": rhino, "P": jax.P}
    exec(compile(code, file, "exec"), names)
    return names["train"]


def args() -> Any:
    w = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    return {"a": w, "b": w}, jax.ShapeDtypeStruct((4096, 512), jnp.float32)


def planned(code: str, file: str = "first.py") -> PlanData:
    return rhino.plan(function(code, file), *args(), mesh=MESH, hardware="v5e:2x4")


def without(plan: PlanData, *names: str) -> dict[str, Any]:
    fields = [f.name for f in dataclasses.fields(PlanData) if f.name not in names]
    return {name: getattr(plan, name) for name in fields}


@pytest.mark.parametrize("file", ["first.py", "second.py"])
@pytest.mark.parametrize("code", [MOVED, PARTED], ids=["moved", "parted"])
def test_the_cache_finds_what_has_only_moved(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, file: str
) -> None:
    before, found = planned(CODE), planned(code, file)
    assert found.cached and not before.cached
    monkeypatch.setenv("RHINO_CACHE", "0")
    anew = planned(code, file)
    # Everything is as if it were planned now, but the time that it took.
    differing = ["cached", "search", "traced", "origin"]
    if code is PARTED:  # of ops that shared a line, only what they send is told apart
        differing += ["pins", "lines", "line_times", "timeline"]
        differing += ["collectives", "at_peak"]
    assert without(found, *differing) == without(anew, *differing)
    assert [c.source for c in found.collectives] == [c.source for c in anew.collectives]
    assert any(str(file) in c.source for c in found.collectives)
    assert found.collectives != before.collectives
    assert next(iter(found.pins)).startswith(f"rhino.pin at {file}:")


@pytest.mark.parametrize(
    ("old", "new"),
    [("tanh", "sin"), ('P("a")', 'P("b")'), ('p["b"]', 'p["a"]'), ("- g", "+ g")],
)
def test_what_computes_something_else_is_not_found(
    folder: Path, old: str, new: str
) -> None:
    planned(CODE)
    assert planned(CODE).cached
    assert not planned(MOVED.replace(old, new)).cached


def test_a_saved_plan_shows_the_lines_of_the_function_that_it_is_given(
    tmp_path: Path,
) -> None:
    before, anew = planned(CODE), planned(MOVED, "second.py")
    before.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    assert loaded.collectives == before.collectives
    assert loaded.lines == before.lines
    mesh = jax.sharding.AbstractMesh(tuple(MESH.values()), tuple(MESH))
    moved = loaded.with_mesh(mesh).jit(function(MOVED, "second.py")).plan(*args())
    assert moved.collectives == anew.collectives
    assert moved.at_peak == anew.at_peak
    assert moved.pins == anew.pins
    assert moved.lines == anew.lines


def test_lines_inside_of_shard_map_move_too(folder: Path) -> None:
    code = """
def train(x):
    def body(x):
        x = jax.lax.psum(x, "b")
        return jax.lax.all_gather(x, "a")
    return jax.shard_map(
        body, mesh=mesh, in_specs=P("a"), out_specs=P(), check_vma=False)(x)
"""

    def sources(code: str) -> Any:
        kinds = (jax.sharding.AxisType.Auto,) * 2
        mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=kinds)
        names = {"jax": jax, "P": jax.P, "mesh": mesh}
        exec(compile(code, "first.py", "exec"), names)
        x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
        plan = rhino.plan(names["train"], x, mesh=MESH, hardware="v5e:2x4")
        return bool(plan.cached), {c.kind: c.source for c in plan.collectives}

    assert sources(code) == (
        False,
        {"all-reduce": "first.py:4 (body)", "all-gather": "first.py:5 (body)"},
    )
    assert sources(code.replace("        return", "\n\n        return")) == (
        True,
        {"all-reduce": "first.py:4 (body)", "all-gather": "first.py:7 (body)"},
    )
    assert not sources(code.replace('psum(x, "b")', 'pmax(x, ("a", "b"))'))[0]


def test_lines_that_begin_alike_are_not_mixed_up() -> None:
    plan = planned("\n" * 4 + CODE)
    many = planned("\n" * 60 + CODE)
    for text, op in plan.lines.items():
        assert text.startswith("first.py:")
        (now,) = [t for t, o in many.lines.items() if o == op]
        assert int(now.split(":")[1].split()[0]) == 56 + int(
            text.split(":")[1].split()[0]
        )


def test_lines_of_a_recipe_are_those_of_its_own_program():
    """What does not fit as it is written is recomputed, and its reductions deferred;
    recipes are those of the program without the latter."""

    def step(params, x):
        def layer(x, w):
            return x + jax.nn.gelu(jnp.tanh(x * w["gain"]) @ w["up"]) @ w["down"], None

        def loss(params):
            h = jax.lax.scan(layer, x, params)[0]
            return jnp.mean(h.astype(jnp.float32) ** 2)

        g = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, g)

    def bf16(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    params = {
        "gain": bf16(3, 256),
        "up": bf16(3, 256, 1024),
        "down": bf16(3, 1024, 256),
    }
    args = params, bf16(32, 128, 256)
    plan = rhino.plan(
        step,
        *args,
        mesh={"data": 8},
        hardware="h100:8",
        donate_argnums=0,
        memory_budget_bytes=22 << 20,
    )
    done = [t.name for t in plan.transforms]
    assert done[-2:] == ["recompute", "deferred reductions"]
    assert plan.recipe("fsdp").lines
    of = plan.origin.solved
    program = of.recipes.found.solved[0].mesh_problem.model.graph.program
    assert len(of.recipes.search.running.program.ops) == len(program.ops)
