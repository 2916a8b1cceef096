"""Every pass shows what it gives, and the package's walk-through is what happens."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target
from rhino_jax.models import registry
from rhino_jax.planner.search import folding
from rhino_jax.planner.search.driver import find
from rhino_jax.planner.search.passes import FOLD, PASSES, PRICE, READ_BACK, SOLVE
from rhino_jax.planner.search.records import LIMITS, Request


WALK = rhino.__doc__ or ""
CODE = re.compile(r"((?:    .*\n|\n)+)\n`(?:frontend|passes)")


def walked(folder: Path) -> tuple[rhino.Plan, rhino.Plan]:
    """Run the walk-through's own code; return its plans on one mesh and in stages."""
    blocks = [re.sub("^    ", "", found, flags=re.M) for found in CODE.findall(WALK)]
    assert len(blocks) == 3
    code = "\n".join(blocks)
    names = {"jax": jax, "jnp": jnp, "rhino": rhino}
    for name in ("passes", "microbatches", "stages"):
        assert code.count(f'dump="{name}"') == 1
        code = code.replace(f'dump="{name}"', f"dump={str(folder / name)!r}")
    exec(compile(code, "walk.py", "exec"), names)
    return names["plan"], names["staged"]


def said_of_files() -> dict[str, list[str]]:
    """File → the lines that the walk-through shows of it."""
    found: dict[str, list[str]] = {}
    for name, block in re.findall(r"\((\d\d_\w+\.txt)\)\n\n((?:    .*\n)+)", WALK):
        found[name] = [line.strip() for line in block.strip().split("\n")]
    return found


def nodes(path: Path) -> set[str]:
    """Return the op, type and trip count of each node of a dumped graph."""
    node = re.compile(
        r"  n\d+ (\w+) %\d+(: \S+)(?:  reads n\d+(?: n\d+)*)?((?:  \d+ times)?)"
    )
    found = (node.match(line) for line in path.read_text().split("\n"))
    return {"".join(m.groups()) for m in found if m}


def test_the_walk_through_is_what_happens(tmp_path: Path) -> None:
    plan, staged = walked(tmp_path)
    shown = said_of_files()
    names = [p.name.replace(" ", "_") for p in PASSES]
    assert sorted(shown) == [f"{i:02}_{name}.txt" for i, name in enumerate(names)]
    folder = tmp_path / "passes"
    assert sorted(p.name for p in folder.iterdir()) == sorted(shown)
    for name, lines in shown.items():
        text = (folder / name).read_text()
        for line in lines:
            assert any(row.strip().startswith(line) for row in text.split("\n")), (
                f"{name}: {line}"
            )
    for block in re.findall(r"\(\w+/\*_inline\.txt\)\n\n((?:    .*\n)+)", WALK):
        kinds = ("microbatches", "stages")
        texts = [nodes(p) for k in kinds for p in (tmp_path / k).glob("*_inline.txt")]
        lines = {line.strip() for line in block.strip().split("\n")}
        assert any(lines <= text for text in texts), block
    (table,) = re.findall(r"table\(\)\)\n\n((?:    .*\n)+)", WALK)
    rows = staged.simulate().table().split("\n")
    for line in table.strip().split("\n"):
        assert any(line.strip() in row for row in rows), line
    w = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((65536, 8192), jnp.bfloat16)
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w).sum()

    lowered = plan.with_mesh(mesh).jit(step).lower(w, x)
    assert "16384,8192" in lowered.compile().as_text()


def test_forms_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass was called, and what it gave leads to the plan."""
    monkeypatch.setattr(folding, "LIMITS", replace(LIMITS, unfolded_s=0.0))
    work = registry.get("mlp-tiny", depth=8)
    program = trace(work.step, work.abstract_args(), {}).program
    seen: dict[str, object] = {}
    request = Request(2**34, {}, {}, watch=lambda p, form: seen.update({p.name: form}))
    axes = [("a", 4), ("b", 2)]
    plan = find(program, [axes], load_target("v5e:4x2"), request).plan()
    assert list(seen) == [p.name for p in PASSES if p.name != "trace"]
    model, folded, found = (seen[p.name] for p in (PRICE, FOLD, SOLVE))
    labels = found.solution.labels
    assert len(labels) == len(model.options) == len(model.graph.nodes)
    few = folded.symmetry.contract(labels)
    assert len(few) < len(labels)
    assert len(few) == len(folded.folded.problem.costs) <= len(labels)
    if np.array_equal(folded.symmetry.expand(few), labels):
        whole, part = folded.overlap.step_s(labels), folded.folded.step_s(few)
        assert part == pytest.approx(whole)
    assert seen[READ_BACK.name] is not plan  # notes are added
    assert seen[READ_BACK.name].decisions == plan.decisions


def test_text_of_a_problem_has_every_option(tmp_path: Path) -> None:
    def dense(w: jax.Array, x: jax.Array) -> jax.Array:
        return x @ w

    f32 = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    for mesh in ({"a": 2}, {"a": 2, "b": 2}):
        folder = tmp_path / str(len(mesh))
        rhino.plan(dense, f32, f32, mesh=mesh, hardware="h100", dump=folder)
        text = (folder / "03_price.txt").read_text()
        options = text[text.index("n2 dot_general") :].split("\n  n")[0]
        # Every axis cuts m, k, n or nothing; sums over k are kept whole or cut again.
        found = re.findall(r"^    \d+  (.*?)  (?:summed|\d)", options, re.M)
        assert len(found) == len(set(re.findall(r"^    (\d+) ", options, re.M)))
        wanted = {"P('a'), P() -> P('a')", "P(), P(None, 'a') -> P(None, 'a')"}
        assert wanted <= set(found)


def test_the_same_request_gives_the_same_text(tmp_path: Path) -> None:
    work = registry.get("mlp-tiny")
    texts = []
    for k in range(2):
        folder = tmp_path / str(k)
        rhino.plan(
            work.step,
            *work.abstract_args(),
            hardware="h100:8",
            dump=folder,
            progress=False,
        )
        texts.append({p.name: p.read_text() for p in folder.iterdir()})
    assert texts[0] == texts[1]
    # Meshes are compared: each is priced.
    assert sum("_price" in name for name in texts[0]) > 1


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    f32 = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    with pytest.raises(rhino.RhinoError, match="cannot be written") as caught:
        rhino.plan(
            jnp.sin, f32, mesh={"a": 2}, hardware="h100", dump=tmp_path / "file" / "x"
        )
    assert caught.value.fix and caught.value.numbers
    with pytest.raises(rhino.RhinoError, match="cannot be written"):
        rhino.plan(jnp.sin, f32, mesh={"a": 2}, hardware="h100", dump=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
