"""Pins inside of a program: `rhino.pin`, source lines and scopes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.ir.program import PIN
from rhino_jax.ir.spec import format_spec
from tests.runtime.stand_in import assert_close, normal


MESH = {"data": 4, "model": 2}


@functools.cache
def args() -> tuple[Any, Any]:
    params = {"w1": normal(0, 64, 128) * 0.1, "w2": normal(1, 128, 64) * 0.1}
    return params, normal(2, 32, 64)


def sharded(fn: Callable[..., Any], **options: Any) -> Any:
    return rhino.auto_shard(fn, **({"mesh": MESH, "progress": False} | options))


def specs_of_pins(step: Any, plan: rhino.Plan) -> list[str]:
    """How the results of all pins in the program are held."""
    names = [name for name, _ in plan.mesh_axes]
    (traced,) = [b.traced for b in step._bounds.values()]
    return [
        format_spec(plan.decisions.values[op.results[0]], names)
        for op in traced.program.ops
        if op.name == PIN
    ]


def loss(params: Any, x: Any) -> Any:
    h = rhino.pin(jnp.tanh(x @ params["w1"]), P("data", "model"))
    with jax.named_scope("head"):
        y = h @ params["w2"]
    return jnp.mean(y**2)


def train(params: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def line_of(fn: Any, text: str) -> str:
    lines, first = inspect.getsourcelines(fn)
    (at,) = [i for i, line in enumerate(lines) if text in line]
    return f"test_interior_pins.py:{first + at}"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"level": "fast"},
        {"mesh": {"data": 2, "z": 2, "model": 2}},
        {"pins": {"params": {"w1": P("model"), "w2": None}}},
    ],
)
def test_a_pin_is_kept_with_its_cotangent(options: Any) -> None:
    step = sharded(train, **options)
    plan = step.plan(*args())
    assert specs_of_pins(step, plan) == ["P('data', 'model')"] * 2
    (shown,) = [v for k, v in plan.pins.items() if k.startswith("rhino.pin at test_")]
    assert shown == "P('data', 'model')"
    assert_close(step(*args()), jax.jit(train)(*args()))


def test_the_compiled_program_says_it() -> None:
    fn = lambda x: rhino.pin(x * 2, P(None, "model")) + 1  # noqa: E731
    step = sharded(fn, pins={"x": P("data"), "out": P("data")})
    text = step.lower(normal(0, 16, 16)).as_text()
    assert '[{}, {"model"}]' in text or "devices=[1,2,4]" in text


def test_orders_of_axes_and_open_dims() -> None:
    mesh = {"a": 2, "b": 2, "c": 2}
    step = sharded(lambda x: rhino.pin(x * 2, P(("c", "a"))) + 1, mesh=mesh)
    assert specs_of_pins(step, step.plan(normal(0, 16, 16))) == ["P(('c', 'a'))"]
    free = P(P.UNCONSTRAINED, "b")
    step = sharded(lambda x: rhino.pin(x * 2, free) + 1, mesh=mesh, pins={"x": P("a")})
    plan = step.plan(normal(0, 16, 16))
    assert specs_of_pins(step, plan)[0].endswith("'b')")
    assert "UNCONSTRAINED, 'b'" in str(plan.pins)


def test_it_is_the_identity_elsewhere() -> None:
    params, x = args()
    free = {"w1": params["w1"], "w2": params["w2"]}

    def plain(params: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"]) ** 2)

    def transformed(fn: Any) -> Any:
        """Return gradients, and results of `vmap` and `jvp`."""
        rows = jax.vmap(fn, (None, 0))(params, x[:, None])
        grads = jax.value_and_grad(fn)(free, x)
        return grads, rows, jax.jvp(fn, (free, x), (free, x))

    got, expected = (jax.jit(lambda fn=fn: transformed(fn))() for fn in (loss, plain))
    assert_close(got, expected)
    assert rhino.pin(np.ones(3), P("nowhere")).shape == (3,)
    pinned = rhino.pin({"a": x, "b": [x]}, {"a": P("data"), "b": None})
    assert pinned["b"][0] is x


def deep(params: Any, x: Any) -> Any:
    @jax.checkpoint
    def layer(h: Any, w: Any) -> Any:
        return rhino.pin(jnp.tanh(h @ w), P("data", "model")), None

    def total(params: Any) -> Any:
        return jax.lax.scan(layer, x, params)[0].sum()

    return jax.grad(total)(params)


def test_in_scans_remat_vmap_and_jit() -> None:
    stack = normal(3, 3, 64, 64) * 0.1
    step = sharded(deep, recompute="as written")
    plan = step.plan(stack, normal(2, 32, 64))
    found = specs_of_pins(step, plan)
    assert len(found) >= 2 and set(found) == {"P('data', 'model')"}
    assert_close(step(stack, normal(2, 32, 64)), deep(stack, normal(2, 32, 64)))
    each = jax.jit(jax.vmap(lambda x: rhino.pin(jnp.sin(x), P("model"))))
    step = sharded(lambda x: each(x), pins={"x": P("data")})
    plan = step.plan(normal(0, 32, 64))
    (spec,) = specs_of_pins(step, plan)
    assert spec.endswith("'model')")
    assert_close(step(normal(0, 32, 64)), jnp.sin(normal(0, 32, 64)))


def plain_loss(params: Any, x: Any) -> Any:
    with jax.named_scope("encoder"):
        with jax.named_scope("layer_0"):
            h = jnp.tanh(x @ params["w1"])
    with jax.named_scope("head"):
        y = h @ params["w2"]
    return jnp.mean(y**2)


def plain_train(params: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(plain_loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.mark.parametrize(
    "key", ["encoder/layer_*", "encoder", "*/layer_0", line_of(plain_loss, "tanh")]
)
def test_lines_and_scopes(key: str) -> None:
    step = sharded(plain_train, pins={key: P(None, "model")})
    plan = step.plan(*args())
    assert plan.pins == {key: "P(None, 'model')"}
    (bound,) = step._bounds.values()
    held = [
        plan.decisions.values[op.results[0]]
        for op in bound.traced.program.ops
        if op.name == "tanh"
    ]
    assert held == [((), (1,))]
    assert_close(step(*args()), jax.jit(plain_train)(*args()))


inner = jax.jit(lambda h: jnp.tanh(h) * 2)


def calls(x: Any) -> Any:
    h = inner(x)
    return h + 1


def test_calls_are_looked_into() -> None:
    x = normal(0, 16, 16)
    plan = sharded(calls, pins={line_of(calls, "return"): P("model")}).plan(x)
    assert plan.out_specs == P("model")
    for key in (line_of(calls, "inner(x)"), line_of(inner, "tanh")):
        plan = sharded(calls, pins={key: P(None, "model"), "out": P("data")}).plan(x)
        assert plan.pins[key] == "P(None, 'model')"
        assert ((), (1,)) in plan.decisions.values.values()


@pytest.mark.parametrize(
    ("pins", "match"),
    [
        ({"encodr": P()}, "Did you mean 'encoder'"),
        (
            {"test_interior_pins.py:1": P()},
            r"no source line and no scope\. Did you mean",
        ),
        ({"encoder": P("dta")}, "Did you mean 'data'"),
        ({"encoder": P(None, None, "data")}, "more dims than"),
        ({"head": P(("data", "model"), ("data",))}, "names an axis twice"),
        ({"encoder": P("data"), "encoder/layer_0": P("model")}, "contradict"),
    ],
)
def test_errors_of_lines_and_scopes(pins: Any, match: str) -> None:
    with pytest.raises(rhino.PinError, match=match) as caught:
        sharded(plain_train, pins=pins).plan(*args())
    assert caught.value.where and caught.value.numbers and caught.value.fix


def other_mesh() -> Any:
    return jax.make_mesh((8,), ("z",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (P("dta"), "names an axis that the mesh does not have: 'dta'"),
        (P(("data", "model")), "does not divide dim 0"),
        (P(None, None, "data"), "more dims than"),
        ("data", "not a PartitionSpec"),
        (NamedSharding(other_mesh(), P("z")), "another mesh"),
        ([P(), P()], "do not have the shape"),
    ],
)
def test_errors_of_rhino_pin(spec: Any, match: str) -> None:
    with pytest.raises(rhino.PinError, match=match) as caught:
        sharded(lambda x: rhino.pin(x * 2, spec)).plan(normal(0, 12, 16))
    assert caught.value.where and caught.value.numbers and caught.value.fix


def test_another_pin_is_another_program(tmp_path: Any) -> None:
    def pinned(axis: str) -> Any:
        def fn(x: Any) -> Any:
            return rhino.pin(x * 2, P(axis)) + 1

        return fn

    x = normal(0, 16, 16)
    plan = rhino.plan(pinned("data"), x, mesh=MESH, progress=False)
    plan.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    assert loaded.pins == plan.pins
    assert_close(loaded.jit(pinned("data"))(x), x * 2 + 1)
    with pytest.raises(rhino.PlanFileError):
        loaded.jit(pinned("model"))(x)


def test_a_constraint_in_the_program_is_told_of_rhino_pin() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    said = NamedSharding(mesh, P("data"))
    plan = rhino.plan(
        lambda x: jax.lax.with_sharding_constraint(x * 2, said) + 1,
        normal(0, 16, 16), mesh=mesh, progress=False,
    )  # fmt: skip
    assert any("rhino.pin(x, spec)" in note for note in plan.notes)


def test_a_pin_that_costs_too_much_memory_is_named() -> None:
    with pytest.raises(rhino.InfeasiblePlanError) as caught:
        sharded(
            lambda x: rhino.pin(jnp.sin(x) @ x.T, P()).sum(0),
            memory_budget_bytes="600kB", pins={"x": P("data")}, microbatches=1,
        ).plan(normal(0, 512, 16))  # fmt: skip
    assert "drop the pin rhino.pin at test_interior_pins.py" in caught.value.fix
