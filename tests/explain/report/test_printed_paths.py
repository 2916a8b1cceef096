"""Paths as tables print them are those that `why`, `pins=` and `--pins` take."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.commands.words import read_pins
from rhino_jax.explain.place import find_place
from rhino_jax.explain.report.tables import fold, value_sections
from rhino_jax.ir.places import path_glob
from rhino_jax.plan.resolved_pins import resolve_pins


MESH = {"data": 4, "model": 2}


class Moments(NamedTuple):
    mu: Any
    nu: Any


def step(params: Any, state: Moments, x: jax.Array) -> Any:
    def loss(p: Any) -> jax.Array:
        y = x @ p["in"]
        for layer in p["blocks"]:
            y = jnp.tanh(y @ layer["mlp"]["up"]) @ layer["mlp"]["down"]
        return jnp.mean(y**2)

    grads = jax.grad(loss)(params)
    mu = jax.tree.map(lambda m, g: 0.9 * m + g, state.mu, grads)
    return jax.tree.map(lambda p, m: p - m, params, mu), Moments(mu, state.nu), x[0]


def arguments() -> Any:
    def shape(*dims: int) -> Any:
        return jax.ShapeDtypeStruct(dims, "float32")

    blocks = [
        {"mlp": {"up": shape(64, n), "down": shape(n, 64)}}
        for n in (256, 128, 256, 128, 256, 128, 512, 512, 512)
    ]
    params = {"in": shape(64, 64), "blocks": blocks}
    return params, Moments(params, params), shape(512, 64)


@pytest.fixture(scope="module")
def plan() -> Any:
    return rhino.plan(step, *arguments(), mesh=MESH, level="fast", progress=False)


def printed(plan: Any, *, full: bool) -> list[tuple[str, str, int]]:
    """Each path and spec of the tables of values, with the number of arrays."""
    found = []
    for section in value_sections(plan, full=full):
        for table in (section.table, section.rest):
            for path, count, _, spec, _ in () if table is None else table.rows:
                found.append((path, spec, int(count[:-1]) if count else 1))
    return found


@pytest.mark.parametrize("full", [False, True])
def test_each_printed_path_is_taken_as_it_is(plan: Any, full: bool) -> None:
    program, axes = plan.traced.program, tuple(MESH.items())
    rows = printed(plan, full=full)
    assert full or any(count > 2 for *_, count in rows)
    text = plan.table(full=full)
    for path, spec, count in rows:
        assert path in text or not full
        place = find_place(path, program, "`plan.why`")
        assert max(len(place.inputs), len(place.outputs)) == count, path
        resolved = resolve_pins(read_pins([f"{path}={spec}"]), program, axes)
        for i, pinned in resolved.inputs.items():
            assert pinned == plan.inputs[i].spec
        assert max(len(resolved.inputs), len(resolved.outputs)) == count, path


def test_a_folded_row_is_asked_and_pinned_as_it_is_printed(plan: Any) -> None:
    rows = [path for path, _, count in printed(plan, full=False) if count == 3]
    key = "params['blocks'][0,2..4]['mlp']['up']"
    assert key in rows
    why = plan.why(key)
    assert why.layouts and "3 arrays" in why.name
    pinned = plan.with_(pins={key: jax.P("data")})
    specs = {leaf.path: leaf.spec for leaf in pinned.inputs}
    for i in (0, 2, 4):
        assert specs[f"params['blocks'][{i}]['mlp']['up']"] == ((0,), ())


@pytest.mark.parametrize("numbers", [range(4), range(9, 12), (0, 2, 4, 6), (3, 8, 13)])
def test_a_range_means_its_numbers_and_no_others(numbers: Any) -> None:
    (row,) = fold((f"h[{i}]['w']", ()) for i in numbers)
    pattern = path_glob(row.label)
    found = [i for i in range(40) if pattern.fullmatch(f"h[{i}]['w']")]
    assert found == list(numbers)
    assert pattern.fullmatch(f"h[0{numbers[0]}]['w']")
