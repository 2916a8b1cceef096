"""`plan.check` runs what was planned beside one device, and tells what differs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.runtime.spmd import SpmdExecutable
from rhino_jax.verify.results.check import ComparedLeaf, compare
from tests.cases import covering


AXES = {"a": 2, "b": 4}


def step(state: Any, key: Any, x: Any, factor: int, *, scale: float = 1.0) -> Any:
    key, sub = jax.random.split(key)
    kept = jax.random.bernoulli(sub, 0.5, x.shape)
    h = jnp.where(kept, x, 0) @ state["w"] * scale
    state = {"w": state["w"] * 0.9 - h.mean(0), "n": state["n"] + factor}
    h = h.astype(jnp.bfloat16)
    return state, {"key": key, "h": h, "log": jnp.log(h), "name": "text"}


def args() -> Any:
    rng = np.random.default_rng(0)
    state = {"w": jnp.asarray(rng.normal(size=(16, 8)), jnp.float32), "n": 3}
    return state, jax.random.key(1), rng.normal(size=(64, 16)).astype(np.float32), 2


def planned(**options: Any) -> rhino.Plan:
    options = {"mesh": AXES, "hardware": "cpu", **options}
    return rhino.plan(step, *args(), static_argnums=3, scale=2.0, **options)


def checked(plan: rhino.Plan, fn: Any = step, **options: Any) -> Any:
    return plan.check(fn, *args(), static_argnums=3, scale=2.0, **options)


def test_donated_arguments_are_neither_consumed_nor_changed() -> None:
    """A key's memory is shared by what is made of it on more devices."""
    given = args()
    plan = planned(donate_argnums=(0, 1))
    assert any(leaf.is_donated for leaf in plan.inputs)
    assert plan.check(step, *given, static_argnums=3, scale=2.0).ok
    arrays = [x for x in jax.tree.leaves(given) if isinstance(x, jax.Array)]
    assert len(arrays) == 2 and not any(x.is_deleted() for x in arrays)
    np.testing.assert_array_equal(given[0]["w"], args()[0]["w"])


def test_every_result_is_compared_by_path() -> None:
    found = checked(planned())
    assert found.ok
    assert {leaf.path: leaf.dtype for leaf in found.leaves} == {
        "out[0]['n']": "int32",
        "out[0]['w']": "float32",
        "out[1]['h']": "bfloat16",
        "out[1]['key']": "key<fry>",
        "out[1]['log']": "bfloat16",
    }
    assert found.not_compared == (("out[1]['name']", "no array"),)
    assert found.devices == "8 cpu devices"
    assert "5 arrays agree" in str(found) and "out[1]['name']" in str(found)
    assert "5 arrays, 1 with NaN in both runs, ok" in repr(found)
    assert "<table" in found._repr_html_()


@pytest.mark.parametrize("hardware", covering(["v5e:4x4", "cpu"]))
def test_devices_that_are_not_there_are_emulated(hardware: str) -> None:
    """Sixteen, where this process has eight."""
    found = checked(planned(mesh={"a": 4, "b": 4}, hardware=hardware))
    assert found.ok
    assert found.devices == "16 emulated cpu devices"


def test_too_many_to_emulate() -> None:
    plan = replace(
        planned(), mesh=AbstractMesh((1 << 12,), ("a",)), mesh_axes=(("a", 1 << 12),)
    )
    with pytest.raises(rhino.MeshError, match="cannot be\n? ?emulated") as error:
        checked(plan)
    assert "4096" in error.value.numbers and error.value.fix


def test_what_goes_wrong_in_the_sharded_run_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    function = SpmdExecutable.function

    def wrong(self: SpmdExecutable) -> Any:
        run = function(self)

        def changed(*arrays: Any) -> Any:
            n, w, h, key, log = run(*arrays)
            return [n + 1, w.at[3, 5].add(0.5), h, jax.random.split(key)[0], log]

        return changed

    monkeypatch.setattr(SpmdExecutable, "function", wrong)
    found = checked(planned())
    assert not found.ok
    bad = {leaf.path: leaf for leaf in found.leaves if not leaf.ok}
    assert set(bad) == {"out[0]['n']", "out[0]['w']", "out[1]['key']"}
    assert bad["out[0]['w']"].worst == (3, 5)
    assert bad["out[0]['w']"].differing == 1
    assert bad["out[0]['w']"].absolute == pytest.approx(0.5, rel=1e-3)
    assert found.leaves[0].path in bad
    assert "3 of 5 arrays differ" in found.table() and "3 differ" in repr(found)


def test_it_takes_what_auto_shard_made_and_its_methods() -> None:
    sharded = rhino.auto_shard(step, mesh=AXES, static_argnums=3, donate_argnums=0)
    plan = sharded.plan(*args(), scale=2.0)
    assert plan.check(sharded, *args(), scale=2.0).ok


def test_shapes_and_other_programs_are_refused() -> None:
    plan = planned()
    state, *rest = args()
    state["w"] = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    with pytest.raises(rhino.TraceError, match="in place of an array") as error:
        plan.check(step, state, *rest, static_argnums=3, scale=2.0)
    assert error.value.where == "state['w']"
    with pytest.raises(rhino.PlanFileError):
        plan.check(lambda *a, **k: a[0], *args(), static_argnums=3, scale=2.0)


def test_programs_that_say_sharding_themselves() -> None:
    mesh = jax.make_mesh((2, 4), ("a", "b"))

    def said(w: Any, x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x @ w, P("a", None)).sum(0)

    arrays = jnp.ones((8, 8)), jnp.ones((16, 8))
    plan = rhino.plan(said, *arrays, mesh=mesh)
    assert plan.check(said, *arrays).ok


def test_nnx_objects_stay_what_they_are() -> None:
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    before = np.asarray(model.kernel[...])

    def update(m: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(m)
        m.kernel[...] = m.kernel[...] - 0.1 * grads["kernel"][...]
        return loss

    x = jnp.ones((16, 8))
    plan = rhino.plan(update, model, x, mesh=AXES)
    found = plan.check(update, model, x)
    assert found.ok
    assert any("kernel" in leaf.path for leaf in found.leaves)
    np.testing.assert_array_equal(np.asarray(model.kernel[...]), before)


def leaf_of(a: Any, b: Any, tolerance: float | None = None) -> ComparedLeaf:
    return compare("x", jnp.asarray(a), jnp.asarray(b), tolerance)


INF, NAN = np.inf, np.nan


@pytest.mark.parametrize(
    ("planned", "single", "ok", "absolute"),
    [
        ([1.0, 2.0], [1.0, 2.0], True, 0.0),
        ([1.0, 2.0], [1.0, 2.001], False, 1e-3),
        ([1e-5, 1.0], [2e-5, 1.0], True, 1e-5),  # beside what is large it is nothing
        ([1e-3, 1.0], [2e-3, 1.0], False, 1e-3),
        ([NAN, 1.0], [NAN, 1.0], True, 0.0),
        ([NAN, 1.0], [1.0, NAN], False, NAN),
        ([INF, -INF], [INF, -INF], True, 0.0),
        ([INF, 1.0], [-INF, 1.0], False, NAN),
        ([1e-9, 0.0], [-1e-9, 0.0], True, 2e-9),  # the rounding of a zero
        ([3, 4], [3, 4], True, 0.0),
        ([3, 4], [3, 6], False, 2.0),
        ([True, False], [True, True], False, 1.0),
        (np.zeros((0, 3)), np.zeros((0, 3)), True, 0.0),
        (2.0, 2.0, True, 0.0),
    ],
)
def test_what_counts_as_equal(
    planned: Any, single: Any, ok: bool, absolute: float
) -> None:
    found = leaf_of(planned, single)
    assert found.ok is ok
    assert found.absolute == pytest.approx(absolute, rel=1e-2, nan_ok=True)
    assert (found.relative <= found.tolerance) is ok


def test_nan_in_both_runs_is_reported_first() -> None:
    def fn(w: Any, x: Any) -> Any:
        return {"log": jnp.log(w), "fine": x + 1}

    w = jnp.ones((8, 8)).at[2].set(-1.0)
    plan = rhino.plan(fn, w, w, mesh={"x": 8}, progress=False)
    found = plan.check(fn, w, w)
    assert found.ok
    assert [(leaf.path, leaf.not_numbers) for leaf in found.with_nan] == [
        ("out['log']", 8)
    ]
    first = str(found).splitlines()[1]
    assert first.split()[:4] == ["NaN", "in", "both", "runs,"]
    assert "out['log'] (8 of 64 elements)" in first
    assert "1 with NaN in both runs" in repr(found)


def test_the_tolerance_is_by_type_or_as_given() -> None:
    one, off = np.ones(4), np.array([1, 1, 1.01, 1])
    assert not leaf_of(one.astype(np.float32), off.astype(np.float32)).ok
    assert leaf_of(jnp.asarray(one, jnp.bfloat16), jnp.asarray(off, jnp.bfloat16)).ok
    assert leaf_of(one.astype(np.float32), off.astype(np.float32), 0.1).ok
    assert not leaf_of([1], [2], 10.0).ok  # integers are equal or not


def test_roundings_of_16_bits_are_allowed_and_no_more() -> None:
    single, rounded = np.array([1.0, 0.1, 0.0]), np.array([1.0, 0.1, 0.01])

    def off_by(error: float) -> ComparedLeaf:
        planned = jnp.asarray([1.0, 0.1, error])
        return compare("x", planned, single, rounded=[single, rounded])

    assert not leaf_of([1.0, 0.1, 0.02], single).ok
    assert off_by(0.015).ok and off_by(0.015).rounding == pytest.approx(0.01)
    assert off_by(0.2).differing == 1 and not off_by(NAN).ok


def test_what_rounding_alone_decides_is_allowed_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums of almost zero divided by their size, as adamw's first updates are."""

    def signs(x: jax.Array, scale: jax.Array) -> Any:
        total = (x * scale).sum(0)
        return {"sum": total, "sign": total / (jnp.abs(total) + 1e-9), "x": x[0] * 2}

    half = np.random.default_rng(0).normal(size=(32, 512)).astype(np.float32)
    x = np.concatenate([half, -half[::-1]])
    plan = rhino.plan(signs, x, x[0] ** 0, mesh={"a": 8}, pins={"x": P("a")})
    found = plan.check(signs, x, x[0] ** 0)
    assert found.ok, found
    (sign,) = (leaf for leaf in found.leaves if leaf.path == "out['sign']")
    assert sign.relative > sign.tolerance and sign.rounding > 0.1

    function = SpmdExecutable.function

    def off(self: SpmdExecutable) -> Any:
        run = function(self)
        return lambda *arrays: [a * (1 + 3e-4) for a in run(*arrays)]

    monkeypatch.setattr(SpmdExecutable, "function", off)
    bad = [leaf.path for leaf in plan.check(signs, x, x[0] ** 0).leaves if not leaf.ok]
    assert bad == ["out['x']"]


def test_a_right_program_of_16_bits_is_right_and_a_wrong_one_is_not() -> None:
    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            y = jnp.bfloat16(x) @ jnp.bfloat16(w)
            y = (y - y.mean(0)) / (y.std(0) + jnp.bfloat16(1e-3))
            return jnp.mean(jnp.tanh(y).astype(jnp.float32))

        return jax.grad(loss)(w)

    rng = np.random.default_rng(0)
    w = rng.normal(size=(16, 16)).astype(np.float32)
    x = rng.normal(size=(64, 16)).astype(np.float32) + 4
    plan = rhino.plan(step, w, x, mesh={"x": 8}, pins={"x": P("x")}, progress=False)
    found = plan.check(step, w, x)
    (leaf,) = found.leaves
    assert leaf.ok
    right = step(w, x)
    assert not compare("x", 4 * right, right, rounded=[right + leaf.rounding]).ok


def test_adapters_in_float32_of_a_frozen_model_of_16_and_8_bits_agree() -> None:
    """Gradients in float32 differ from one device's by the order of sums in 16 bits,
    which no option of the compiler changes there."""

    def step(lora: Any, base: Any, x: Any) -> Any:
        @jax.checkpoint
        def layer(x: Any, p: Any) -> Any:
            (q, s), (a, b) = p
            a, b = jnp.bfloat16(a), jnp.bfloat16(b)
            size = jnp.mean(jnp.square(jnp.float32(x)), -1, keepdims=True)
            h = x * jax.lax.rsqrt(size + 1e-6).astype(x.dtype)
            return x + h @ (q.astype(x.dtype) * s) + (h @ a) @ b, None

        def loss(lora: Any) -> Any:
            y, _ = jax.lax.scan(layer, jnp.bfloat16(x), (base, lora))
            return jnp.mean(jnp.float32(y) ** 2)

        return jax.value_and_grad(loss)(lora)

    rng = np.random.default_rng(0)
    lora = [rng.normal(size=s) * 0.1 for s in ((3, 32, 2), (3, 2, 32))]
    lora = [x.astype(np.float32) for x in lora]
    base = rng.integers(-127, 127, (3, 32, 32), np.int8), jnp.full((3, 1, 32), 0.002)
    base = base[0], base[1].astype(jnp.bfloat16)
    x = rng.normal(size=(64, 32)).astype(np.float32)
    pins = {"x": P("a"), "base[0]": P(None, "b"), "lora[0]": P(None, "b")}
    plan = rhino.plan(step, lora, base, x, mesh=AXES, pins=pins, progress=False)
    found = plan.check(step, lora, base, x)
    assert found.ok, found
    grads = [leaf for leaf in found.leaves if leaf.shape]
    assert any(leaf.relative > leaf.tolerance for leaf in grads)
    _, right = step(lora, base, x)
    scale = max(float(jnp.abs(x).max()) for x in right)
    assert all(0 < 2 * leaf.rounding < 0.3 * scale for leaf in grads)
