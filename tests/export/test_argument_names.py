"""Exported code runs whatever the arguments of the function are called."""

from __future__ import annotations

import keyword
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.export.code import STYLES


NAMES = (
    *("p", "P", "jax", "mesh", "fn", "args", "result", "specs", "constraints"),
    *("patch", "donated", "cotangents", "count", "rules", "nn", "nnx", "to_mesh"),
    *("shardings", "jit", "in_specs", "AxisType", "NamedSharding", "leaf", "_"),
)


def exported(
    fn: Any, *args: Any, style: str, **kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    plan = rhino.plan(fn, *args, mesh={"d": 8}, progress=False, **kwargs)
    scope: dict[str, Any] = {}
    exec(plan.code(style), scope)
    return plan, scope


def step_of(first: str, second: str, *, by_keyword: bool = False) -> Any:
    """Return a function of two arguments with these names."""
    assert first.isidentifier() and not keyword.iskeyword(first)
    scope = {"numpy_": jnp, "map_": jax.tree.map}
    mark = "*, " if by_keyword else ""
    exec(
        f"def step({first}, {mark}{second}):\n"
        f"    return map_(lambda w: w - ({second}.T @ ({second} @ w)), {first})",
        scope,
    )
    return scope["step"]


def dims(specs: Any) -> list[list[Any]]:
    """Return the dims of all specs, without whole ones at the end."""
    found = []
    for spec in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, jax.P)):
        found.append(list(spec))
        while found[-1] and found[-1][-1] is None:
            found[-1].pop()
    return found


def test_names_of_helpers_are_free() -> None:
    tree = {k: jax.ShapeDtypeStruct((64, 64), "float32") for k in "ab"}
    rows = jax.ShapeDtypeStruct((128, 64), "float32")
    for name in NAMES:
        plan, scope = exported(step_of(name, "x"), tree, rows, style="constraints")
        assert dims(scope["in_specs"](tree, rows)) == dims(plan.in_specs), name
        with jax.set_mesh(scope["mesh"]):
            scope["jit"](step_of(name, "x"), tree, rows).lower(tree, rows)


@pytest.mark.parametrize("style", sorted(STYLES))
@pytest.mark.parametrize(("first", "second"), [("w", "W"), ("W", "X"), ("jax", "fn")])
def test_names_that_differ_in_case_alone_are_two(
    first: str, second: str, style: str
) -> None:
    shape = jax.ShapeDtypeStruct((64, 64), "float32")
    plan, scope = exported(step_of(first, second), shape, shape, style=style)
    assert dims(scope["in_specs"](shape, shape)) == dims(plan.in_specs)


@pytest.mark.parametrize("name", ["jax", "fn", "P"])
def test_arguments_by_keyword_keep_their_names(name: str) -> None:
    fn = step_of("w", name, by_keyword=True)
    w, rows = jnp.ones((64, 64)), jnp.ones((128, 64))
    plan = rhino.plan(fn, w, **{name: rows}, mesh={"d": 8}, progress=False)
    scope: dict[str, Any] = {}
    exec(plan.code("constraints"), scope)
    with jax.set_mesh(scope["mesh"]):
        made = scope["jit"](fn, w, rows)(w, rows)
    assert jnp.allclose(made, fn(w, **{name: rows}))
