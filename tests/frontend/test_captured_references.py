"""References that a function captures: read and written as under `jax.jit`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino


X = jnp.arange(16.0).reshape(16, 1) * jnp.ones(8)


def shard(fn: Any, **options: Any) -> Any:
    return rhino.auto_shard(fn, mesh={"a": 8}, level="fast", progress=False, **options)


def make() -> tuple[Any, dict[str, Any]]:
    """A step that reads `scale`, and reads and writes `total`, and `mean` in a loop."""
    scale, total = jax.new_ref(jnp.full(8, 0.5)), jax.new_ref(jnp.zeros(16))
    mean = jax.new_ref(jnp.ones(8))
    weights = jnp.linspace(0, 1, 8)

    def step(x: jax.Array) -> jax.Array:
        def body(h: jax.Array, _: Any) -> Any:
            mean[...] = 0.9 * mean[...] + 0.1 * h.mean(0)
            return jnp.tanh(h * scale[...] + mean[...]), None

        h, _ = jax.lax.scan(body, x * weights, length=3)
        total[...] += h.sum(1)
        return h.sum() + total[...].mean()

    return step, {"scale": scale, "total": total, "mean": mean}


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, ref in got.items():
        np.testing.assert_allclose(ref[...], expected[name][...], rtol=1e-5)


def test_they_are_read_and_written_as_under_jit() -> None:
    (step, got), (plain, expected) = make(), make()
    sharded, single = shard(step), jax.jit(plain)
    for x in (X, X + 1, X[:8].repeat(2, 0)):
        np.testing.assert_allclose(sharded(x), single(x), rtol=1e-5)
        assert_same(got, expected)
        for refs in (got, expected):  # a call reads what they hold by then
            refs["scale"][...] *= 1.5
    lowered = sharded.lower(X).compile()
    np.testing.assert_allclose(lowered(X), single(X), rtol=1e-5)
    assert_same(got, expected)


def test_a_plan_names_them_and_donates_what_is_replaced() -> None:
    step, refs = make()
    plan = shard(step).plan(X)
    assert {leaf.path: leaf.is_donated for leaf in plan.inputs[-3:]} == {
        "mean": True,
        "scale": False,
        "total": True,
    }
    assert [leaf.path for leaf in plan.outputs] == ["out", "out: mean", "out: total"]
    assert len(plan.in_specs) == 1 and plan.out_specs == jax.P()
    np.testing.assert_array_equal(refs["total"][...], np.zeros(16))


def test_what_is_written_has_the_sharding_of_what_it_replaces() -> None:
    step, refs = make()
    sharded = shard(step)
    sharded(X)
    plan = sharded.last_plan
    specs = {leaf.path: leaf.spec for leaf in plan.inputs}
    for leaf in plan.outputs[1:]:
        assert leaf.spec == specs[leaf.path.removeprefix("out: ")]
    placed = {name: ref[...].sharding for name, ref in refs.items()}
    sharded(X)
    assert {name: ref[...].sharding for name, ref in refs.items()} == placed


def test_what_the_user_holds_of_them_is_not_deleted() -> None:
    total = jax.new_ref(jnp.zeros(8))

    def fn(x: jax.Array) -> jax.Array:
        total[...] += x[0]
        return total[...]

    sharded = shard(fn)
    seen = [sharded(X + 1) for _ in range(3)]
    for k, value in enumerate(seen):
        np.testing.assert_array_equal(value, np.full(8, k + 1.0))


@pytest.mark.slow
def test_under_jit_they_are_those_of_outside() -> None:
    (step, got), (plain, expected) = make(), make()
    sharded = shard(step)
    sharded(X)  # to where all devices are
    plain(X)
    for _ in range(2):
        a = jax.jit(lambda x: sharded(x) + sharded(x))(X)
        b = jax.jit(lambda x: plain(x) + plain(x))(X)
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert_same(got, expected)


def test_a_check_changes_none() -> None:
    step, refs = make()
    report = shard(step).plan(X).check(step, X)
    assert report.ok
    assert {leaf.path for leaf in report.leaves} == {"out", "out: mean", "out: total"}
    np.testing.assert_array_equal(refs["total"][...], np.zeros(16))


def test_a_saved_plan_runs_with_them(tmp_path: Path) -> None:
    (step, _), (again, got), (plain, expected) = make(), make(), make()
    shard(step).plan(X).save(tmp_path / "plan.json")
    sharded = rhino.load_plan(tmp_path / "plan.json").jit(again)
    for _ in range(2):
        np.testing.assert_allclose(sharded(X), jax.jit(plain)(X), rtol=1e-5)
    assert_same(got, expected)


def test_beside_a_reference_among_the_arguments() -> None:
    captured = jax.new_ref(jnp.zeros(8))

    def fn(given: Any, x: jax.Array) -> jax.Array:
        given[...] += x[1]
        captured[...] += given[...]
        return captured[...].sum()

    sharded, given = shard(fn), jax.new_ref(jnp.zeros(8))
    assert [float(sharded(given, X)) for _ in range(2)] == [8.0, 24.0]
    np.testing.assert_array_equal(given[...], np.full(8, 2.0))
    np.testing.assert_array_equal(captured[...], np.full(8, 3.0))
    for call in (sharded, shard(fn)):
        with pytest.raises(rhino.TraceError, match="captures a reference") as caught:
            call(captured, X)
    assert caught.value.where == "captured"
    assert "argument alone" in caught.value.fix
    np.testing.assert_array_equal(captured[...], np.full(8, 3.0))


def test_two_of_one_name_have_two() -> None:
    def adds() -> Any:
        total = jax.new_ref(jnp.zeros(8))
        return lambda x: total.__setitem__(..., total[...] + x[0])

    one, other = adds(), adds()

    def both(x: jax.Array) -> None:
        one(x)
        other(x)

    plan = shard(both).plan(X)
    assert [leaf.path for leaf in plan.inputs] == ["x", "total", "total #2"]
