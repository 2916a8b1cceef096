"""References of JAX as arguments, and those that a function makes itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino


def step(total: Any, state: Any, x: jax.Array) -> jax.Array:
    total[...] = total[...] * 0.9 + x.sum(0)
    state["count"][...] += 1
    state["row"][0] = total[...].sum()
    return total[...].sum()


def make() -> tuple[Any, Any, jax.Array]:
    state = {"count": jax.new_ref(jnp.zeros(8)), "row": jax.new_ref(jnp.zeros(16))}
    return jax.new_ref(jnp.zeros(16)), state, jnp.ones((16, 16))


def values(tree: Any) -> Any:
    is_ref = lambda x: isinstance(x, jax.Ref)  # noqa: E731
    return jax.tree.map(lambda r: np.asarray(r[...]), tree, is_leaf=is_ref)


def assert_close(got: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, expected
    )


def shard(fn: Any, **options: Any) -> Any:
    return rhino.auto_shard(fn, mesh={"a": 8}, progress=False, **options)


def test_references_are_read_and_written_as_under_jit() -> None:
    sharded, single = shard(step, pins={"total": jax.P("a")}), jax.jit(step)
    (*got, x), (*expected, _) = make(), make()
    for _ in range(3):
        assert_close(sharded(*got, x), single(*expected, x))
        assert_close(values(got), values(expected))
        assert got[0].sharding.spec == jax.P("a")
    assert_close(sharded.lower(*got, x).compile()(*got, x), single(*expected, x))
    assert_close(values(got), values(expected))


def test_a_plan_names_references_and_donates_what_they_held() -> None:
    plan = shard(step).plan(*make())
    inputs = {leaf.path: leaf.is_donated for leaf in plan.inputs}
    assert inputs == {
        "total": True,
        "state['count']": True,
        "state['row']": True,
        "x": False,
    }
    assert [leaf.path for leaf in plan.outputs][1:] == [
        f"out: {path}" for path in inputs if path != "x"
    ]
    assert set(plan.in_specs[1]) == {"count", "row"}
    assert plan.out_specs == jax.P()


def test_one_reference_at_two_places_is_one() -> None:
    def both(a: Any, b: Any) -> None:
        a[...] += 1
        b[...] *= 2

    one = jax.new_ref(jnp.ones(8))
    shard(both)(one, one)
    np.testing.assert_array_equal(one[...], np.full(8, 4.0))


def test_arrays_and_references_are_two_signatures() -> None:
    double = shard(lambda x: x[...] * 2)
    for x in (jnp.ones(8), jax.new_ref(jnp.ones(8)), jnp.ones(8)):
        np.testing.assert_array_equal(double(x), np.full(8, 2.0))


def test_under_jit_they_are_those_of_outside() -> None:
    sharded = shard(step)
    (*got, x), (*expected, _) = make(), make()
    sharded(*got, x)  # to where all devices are
    step(*expected, x)
    jax.jit(lambda t, s, x: sharded(t, s, x) + sharded(t, s, x))(*got, x)
    jax.jit(lambda t, s, x: step(t, s, x) + step(t, s, x))(*expected, x)
    assert_close(values(got), values(expected))


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Explicit])
def test_on_an_explicit_mesh(kind: Any) -> None:
    mesh = jax.make_mesh((8,), ("a",), axis_types=(kind,))
    sharded = rhino.auto_shard(step, mesh=mesh, progress=False)
    (*got, x), (*expected, _) = make(), make()
    for _ in range(2):
        assert_close(sharded(*got, x), jax.jit(step)(*expected, x))
    assert_close(values(got), values(expected))


def accumulate(x: jax.Array, w: jax.Array) -> jax.Array:
    total = jax.new_ref(jnp.zeros(()))

    def body(h: jax.Array, _: Any) -> Any:
        h = jnp.tanh(h @ w)
        total[...] += (h**2).sum()
        return h, None

    h, _ = jax.lax.scan(body, x, length=3)
    jax.lax.cond(
        h.sum() > 0, lambda: total.__setitem__(..., total[...] * 2), lambda: None
    )
    return h.sum() + jax.freeze(total)


def test_references_that_a_function_makes_are_planned_as_values() -> None:
    x, w = jnp.ones((16, 16)), jnp.eye(16) * 0.5
    sharded = shard(accumulate)
    assert_close(sharded(x, w), jax.jit(accumulate)(x, w))
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((65536, 256), (256, 256))]
    plan = shard(accumulate, hardware="v5e").plan(*shapes)
    assert plan.coverage.unknown == ()
    assert plan.in_specs[0] == jax.P("a")
