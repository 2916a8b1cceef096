"""`shard_map` over the plan's own mesh: held as its specs say, priced per device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import rhino_jax as rhino
from tests.apply.stand_in import assert_close, normal


MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def product(x: Any, w: Any) -> Any:
    """Rows over "data", the contracted dim over "model", summed by hand."""
    return jax.shard_map(
        lambda x, w: jax.lax.psum(x @ w, "model"),
        mesh=MESH,
        in_specs=(P("data", "model"), P("model", None)),
        out_specs=P("data", None),
    )(x, w)


def gradients(x: Any, w: Any) -> Any:
    return jax.grad(lambda x, w: (product(x, w) ** 2).sum(), argnums=(0, 1))(x, w)


def looped(x: Any, w: Any) -> Any:
    def body(c: Any, _: Any) -> Any:
        return product(c, w) @ w.T * 0.01, None

    return jax.grad(lambda x: jax.lax.scan(body, x, None, 3)[0].sum())(x)


def args() -> tuple[Any, Any]:
    return normal(0, 64, 32), normal(1, 32, 16)


@pytest.mark.parametrize("mesh", [MESH, {"data": 4, "model": 2}, None])
def test_specs_are_the_rule(mesh: Any) -> None:
    step = rhino.auto_shard(product, mesh=mesh, progress=False)
    plan = step.plan(*args())
    assert plan.mesh_axes == (("data", 4), ("model", 2))
    assert plan.in_specs == (P("data", "model"), P("model"))
    assert plan.out_specs == P("data")
    assert plan.predicted.flops_per_device == 2 * 64 * 32 * 16 / 8
    assert plan.coverage.ops == 1
    assert any("test_by_hand.py" in n and "not priced" in n for n in plan.notes)
    assert_close(step(*args()), product(*args()))


@pytest.mark.parametrize("fn", [gradients, looped])
def test_gradients_and_loops_equal_one_device(fn: Any) -> None:
    want = jax.jit(fn)(*args())
    for pins in ({}, {"x": P(None, "data"), "w": P("data")}):
        step = rhino.auto_shard(fn, mesh=MESH, progress=False, pins=pins)
        assert_close(step(*args()), want)


def test_as_many_results_as_operands_are_not_those() -> None:
    def fn(x: Any, w: Any) -> Any:
        return jax.shard_map(
            lambda x, w: (x @ w, w * 2), mesh=MESH,
            in_specs=(P("data", None), P()), out_specs=(P("data", None), P()),
        )(x, w)  # fmt: skip

    plan = rhino.plan(fn, *args(), mesh=MESH, progress=False)
    assert plan.in_specs == (P("data"), P()) and plan.out_specs == (P("data"), P())
    # "model" does the same twice, and so does all of it with `w`.
    assert plan.predicted.flops_per_device == 2 * 64 * 32 * 16 / 4 + 32 * 16


def test_two_ways_of_one_shape_are_told_apart() -> None:
    def both(x: Any) -> Any:
        def by(spec: Any) -> Any:
            return jax.shard_map(
                jnp.sin, mesh=MESH, in_specs=spec, out_specs=spec
            )(x)  # fmt: skip

        return by(P("data")), by(P(None, "model"))

    plan = rhino.plan(both, normal(0, 16, 16), mesh=MESH, progress=False)
    assert plan.out_specs == (P("data"), P(None, "model"))


def test_axes_that_it_leaves_free() -> None:
    def fn(x: Any) -> Any:
        return jax.shard_map(
            lambda x: x * 2, mesh=MESH, in_specs=P("data"), out_specs=P("data"),
            axis_names={"data"},
        )(x)  # fmt: skip

    step = rhino.auto_shard(fn, mesh=MESH, progress=False)
    assert_close(step(normal(0, 16, 16)), 2 * normal(0, 16, 16))


def test_over_another_mesh_it_is_opaque_and_said_so() -> None:
    with pytest.warns(rhino.RhinoWarning):
        plan = rhino.plan(product, *args(), mesh={"a": 4, "b": 2}, progress=False)
    assert plan.in_specs == (P(), P())
    (note,) = [n for n in plan.notes if "shard_map" in n]
    assert "over another mesh (data=4, model=2)" in note and "test_by_hand.py" in note
