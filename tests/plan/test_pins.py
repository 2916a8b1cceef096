"""Pins mean what they say, or are refused before any search."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from rhino_jax.errors import PinError
from rhino_jax.frontend.trace import trace
from rhino_jax.ir.program import Program
from rhino_jax.plan.resolved_pins import resolve_pins


AXES = (("data", 4), ("model", 2))


def program() -> Program:
    def step(params: Any, x: Any) -> Any:
        return jax.tree.map(lambda p: p * 2, params), x.sum(0)

    def f32(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {"blocks": [{"w": f32(8, 6), "b": f32(6)}, {"w": f32(8, 6), "b": f32(6)}]}
    return trace(step, (params, f32(12, 8)), {}).program


def inputs(pins: Any) -> dict[str, Any]:
    found = program()
    return {
        found.inputs[i].path: spec
        for i, spec in resolve_pins(pins, found, AXES).inputs.items()
    }


def test_a_path_pins_one_argument() -> None:
    found = inputs({"params['blocks'][0]['w']": P("data", "model")})
    assert found == {"params['blocks'][0]['w']": ((0,), (1,))}


def test_a_glob_pins_many_and_a_path_wins() -> None:
    found = inputs({
        "params['blocks'][1]['w']": P(None, "model"),
        "params['blocks'][?]['w']": P("data"),
        "*['b']": P("model"),
    })  # fmt: skip
    assert found == {
        "params['blocks'][0]['w']": ((0,), ()),
        "params['blocks'][1]['w']": ((), (1,)),
        "params['blocks'][0]['b']": ((1,),),
        "params['blocks'][1]['b']": ((1,),),
    }


def test_axes_share_a_dim_and_scalars_take_nothing() -> None:
    assert inputs({"x": P(None, ("data", "model"))}) == {"x": ((), (0, 1))}
    assert inputs({"x": P()}) == {"x": ((), ())}


def test_results_are_pinned_and_state_is_pinned_at_the_argument() -> None:
    found = program()
    resolved = resolve_pins({"out[1]": P("data")}, found, AXES)
    assert resolved.inputs == {}
    assert [found.outputs[i].path for i in resolved.outputs] == ["out[1]"]
    state = resolve_pins({"out: params['blocks'][0]['b']": P("model")}, found, AXES)
    assert [found.inputs[i].path for i in state.inputs] == ["params['blocks'][0]['b']"]


@pytest.mark.parametrize(
    ("pins", "what", "fix"),
    [
        ({"params['blocks'][0]['v']": P()}, "Did you mean \"params['blocks'][0]['", ""),
        ({"params": P("data")}, "matches no argument", "write 'params*'"),
        ({"x": P("dta")}, "Did you mean 'data'", "axis names"),
        ({"x": P("data", "data")}, "names an axis twice", ""),
        ({"x": P(None, None, "data")}, "more dims than", "at most 2"),
        ({"x": P(("data", "model"))}, "does not divide dim 0",
         "shard dim 0 over 'data'"),
        ({"params['blocks'][0]['w']": P(None, "data")}, "does not divide dim 1",
         "shard dim 1 over 'model' alone"),
        ({"x": "data"}, "not a PartitionSpec", "PartitionSpec("),
        ({"params['blocks'][0]['b']": P("model"),
          "out: params['blocks'][0]['b']": P()}, "contradict", "drop one"),
    ],
)  # fmt: skip
def test_bad_pins_say_what_where_numbers_and_fix(
    pins: Any, what: str, fix: str
) -> None:
    with pytest.raises(PinError) as caught:
        resolve_pins(pins, program(), AXES)
    assert what in caught.value.what and fix in caught.value.fix
    assert caught.value.where and caught.value.numbers


def test_numbers_of_a_pin_that_does_not_divide() -> None:
    with pytest.raises(PinError, match=r"12 over 8 devices \(data, model\)"):
        resolve_pins({"x": P(("data", "model"))}, program(), AXES)
