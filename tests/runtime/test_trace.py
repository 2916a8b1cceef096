"""Paths, leaves and state of traced functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rhino_jax.frontend.leaves import split_arguments
from rhino_jax.frontend.trace import trace


F = jax.ShapeDtypeStruct


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return F(shape, jnp.float32)


def ties(fn: Any, *args: Any, **options: Any) -> dict[str, str]:
    """Result paths → path of the argument that each replaces."""
    program = trace(fn, args, {}, **options).program
    return {
        out.path: program.inputs[out.state_of].path
        for out in program.outputs
        if out.state_of is not None
    }


PARAMS = {"w": f32(8, 8), "b": f32(8)}
BATCH = {"x": f32(4, 8), "y": f32(4, 8)}


def step(params: Any, opt: Any, batch: Any) -> Any:
    return params, {"mu": opt["mu"], "step": opt["step"] + 1}, batch["x"].sum()


OPT = {"mu": PARAMS, "step": F((), jnp.int32)}


@pytest.mark.parametrize("donate", [(), (0, 1), (0,)])
def test_state_is_found_with_and_without_donation(donate: Any) -> None:
    found = ties(step, PARAMS, OPT, BATCH, donate_argnums=donate)
    params = {"out: params['w']": "params['w']", "out: params['b']": "params['b']"}
    opt = {
        f"out: opt{k}": f"opt{k}" for k in ("['mu']['w']", "['mu']['b']", "['step']")
    }
    assert found == params | opt


def test_names_of_the_result_decide_between_equal_arguments() -> None:
    def swapped(params: Any, ema: Any) -> Any:
        return {"ema": ema, "params": params}

    assert ties(swapped, PARAMS, PARAMS)["out: ema['w']"] == "ema['w']"

    def ordered(params: Any, ema: Any) -> Any:
        return params, ema

    assert ties(ordered, PARAMS, PARAMS)["out: ema['w']"] == "ema['w']"


def test_a_loss_is_no_state_but_a_donated_scalar_is() -> None:
    def fn(params: Any, lr: Any) -> Any:
        return params, lr * 2

    args = (PARAMS, f32())
    assert "lr" not in ties(fn, *args).values()
    assert "lr" in ties(fn, *args, donate_argnums=1).values()

    def named(params: Any, lr: Any) -> Any:
        return {"params": params, "lr": lr * 2}

    assert "lr" in ties(named, *args).values()


X, W = f32(8, 8), f32(8, 8)


def test_a_name_comes_before_the_first_result_of_the_shape() -> None:
    def fn(params: Any, momentum: Any) -> Any:
        gradient = jax.tree.map(jnp.tanh, params)
        momentum = jax.tree.map(jnp.add, momentum, gradient)
        params = jax.tree.map(jnp.subtract, params, momentum)
        return {"gradient": gradient, "momentum": momentum, "params": params}

    found = ties(fn, PARAMS, PARAMS, donate_argnums=(0, 1))
    assert found["out: params['w']"] == "params['w']"
    assert found["out: momentum['w']"] == "momentum['w']"
    assert len(found) == 4


def test_an_argument_that_is_returned_replaces_no_other() -> None:
    def fn(frozen: Any, w: Any) -> Any:
        return frozen, w + frozen

    assert ties(fn, W, W, donate_argnums=1) == {"out: w": "w"}
    assert ties(fn, [W], [W], donate_argnums=1)["out: w[0]"] == "w[0]"

    def next_pair(a: Any, b: Any) -> Any:
        return b, a + b

    found = ties(next_pair, W, W, donate_argnums=(0, 1))
    assert found == {"out: b": "b", "out: a": "a"}


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (lambda x, w: jnp.tanh(x @ w), (X, W)),
        (lambda x, w: (jnp.tanh(x @ w), x.sum()), (X, W)),
        (lambda state, w: (state[0] @ w, [state[1] @ w]), ((X, X), W)),
        (lambda p, x: (p["b"], x @ p["w"]), (PARAMS, X)),
    ],
)
def test_equal_shapes_are_no_reason_for_a_tie(fn: Any, args: Any) -> None:
    assert ties(fn, *args) == {}


@pytest.mark.parametrize(
    ("fn", "args", "donated", "expected"),
    [
        (lambda x, w: jnp.tanh(x @ w), (X, W), (0,), {"out: x": "x"}),
        (lambda x, w: {"x": x @ w}, (X, W), (), {"out: x": "x"}),
        (lambda p, x: ({"w": p["w"]}, x), ({"w": W}, X), (), {"out: p['w']": "p['w']"}),
        (
            lambda p, x: [w - x for w in p],
            ([W, W], X),
            (),
            {"out: p[0]": "p[0]", "out: p[1]": "p[1]"},
        ),
    ],
)
def test_donation_names_and_structure_are_reasons(
    fn: Any, args: Any, donated: Any, expected: Any
) -> None:
    assert ties(fn, *args, donate_argnums=donated) == expected


def test_a_batch_that_is_not_returned_is_no_state() -> None:
    found = ties(lambda params, batch: (params, batch["x"].sum()), PARAMS, BATCH)
    assert set(found.values()) == {"params['w']", "params['b']"}


def test_state_inside_of_one_argument() -> None:
    def fn(carry: Any, batch: Any) -> Any:
        params, opt = carry
        return params, opt, batch["x"].sum()

    assert len(ties(fn, (PARAMS, OPT), BATCH)) == 5


def test_donated_leaves_are_matched_by_the_end_of_their_path() -> None:
    def fn(state: Any) -> Any:
        return {"new": {"w": state["w"] + 1}, "old": state["b"][:4]}

    found = ties(fn, PARAMS, donate_argnums=0)
    assert found == {"out: state['w']": "state['w']"}


def test_each_argument_is_used_once() -> None:
    def fn(params: Any) -> Any:
        return params, jax.tree.map(lambda p: p * 2, params)

    program = trace(fn, (PARAMS,), {}).program
    assert [o.path for o in program.outputs] == [
        "out: params['b']", "out: params['w']", "out[1]['b']", "out[1]['w']",
    ]  # fmt: skip


def test_paths_of_arguments() -> None:
    def fn(a: Any, *rest: Any, key: Any, **more: Any) -> Any:
        return a

    args = ({"p": [f32(2), (f32(3),)]}, f32(4), {"q": f32(5)})
    kwargs = {"key": f32(6), "other": {"z": f32(7)}}
    traced = trace(fn, args, kwargs)
    assert [i.path for i in traced.program.inputs] == [
        "a['p'][0]", "a['p'][1][0]", "rest[0]", "rest[1]['q']", "key", "other['z']",
    ]  # fmt: skip


def test_python_scalars_are_weak_arrays() -> None:
    traced = trace(lambda x, s: x * s, (f32(4), 2.0), {})
    assert traced.signature.arrays[1] == ((), jnp.dtype("float32"), True, False)


def test_scalars_beside_functions_are_static() -> None:
    leaves = split_arguments(
        ({"f": jnp.sin, "n": 3, "w": jnp.ones(2)}, {"n": 3}), {}, ("model", "other")
    )
    assert leaves.array_paths == ("model['w']", "other['n']")
    assert [s.value for _, s in leaves.statics] == [jnp.sin, 3]


def test_tracing_allocates_nothing_and_sees_no_values() -> None:
    def fn(x: Any) -> Any:
        assert isinstance(x, jax.core.Tracer)
        return x + 1

    big = F((2**20, 2**20), jnp.float32)
    traced = trace(fn, (big,), {})
    assert traced.program.values[0].shape == big.shape


def test_captured_arrays_become_inputs() -> None:
    table = jnp.ones((4, 4))
    program = trace(lambda x: x @ table, (f32(4, 4),), {}).program
    assert [i.is_const for i in program.inputs] == [False, True]
