"""Values of two traces of one function, paired by the ops that make them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.errors import InternalError
from rhino_jax.frontend.regions import ops_and_equations
from rhino_jax.frontend.trace import trace
from rhino_jax.ir.congruence import pair_regions


def layers(x, turns):
    """Two layers in a loop; where it turns, with more ops in and after the loop."""

    def layer(carry, _):
        turned = jnp.tan(carry) if turns else carry
        return jnp.sin(carry), (jnp.cos(carry), turned)

    carry, (stacked, turned) = jax.lax.scan(layer, x + 1, None, length=2)
    return carry * 2, stacked, (jnp.tan(turned) if turns else turned)


def traces():
    x = (jnp.ones(3),)
    return [trace(partial(layers, turns=turns), x, {}) for turns in (True, False)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_values_of_loops_are_paired_though_one_trace_has_more_ops(order):
    a, b = (traces()[k].program for k in order)
    assert len(a.ops) != len(b.ops)
    ids: dict[int, int] = {}
    pair_regions(a, a.body, b, b.body, ids)
    for name in ("sin", "cos", "scan", "mul"):
        mine, its = (next(op for op in p.ops if op.name == name) for p in (a, b))
        assert [ids[v] for v in mine.results] == list(its.results)


def test_values_that_only_one_program_makes_are_not_paired():
    a, b = (trace(f, (jnp.ones(3),), {}).program for f in (jnp.sin, jnp.cos))
    ids: dict[int, int] = {}
    pair_regions(a, a.body, b, b.body, ids)
    assert ids == {a.body.inputs[0]: b.body.inputs[0]}


def test_a_jaxpr_of_another_trace_is_refused():
    more, less = traces()
    program = more.program
    with pytest.raises(InternalError, match="not its own") as caught:
        list(ops_and_equations(program, program.body, less.closed_jaxpr))
    assert "equations" in caught.value.numbers
    assert isinstance(caught.value, rhino.RhinoError)
