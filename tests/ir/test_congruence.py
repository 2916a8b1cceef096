"""Values of two traces of one function, paired by the ops that make them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.errors import InternalError
from rhino_jax.frontend.regions import ops_and_equations
from rhino_jax.frontend.trace import trace
from rhino_jax.ir.congruence import pair_regions


def layers(scale, x):
    """Cast a scalar to float32: an op of the trace where it is weakly typed."""

    def layer(carry, _):
        carry = jnp.sin(carry * jax.lax.convert_element_type(scale, jnp.float32))
        return carry, jnp.cos(carry)

    x = x + jax.lax.convert_element_type(scale, jnp.float32)
    return jax.lax.scan(layer, x, None, length=2)


def traces():
    x = jnp.ones(3)
    return [trace(layers, (s, x), {}) for s in (0.5, jnp.float32(0.5))]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_values_of_loops_are_paired_though_one_trace_has_more_ops(order):
    a, b = (traces()[k].program for k in order)
    assert len(a.ops) != len(b.ops)
    ids: dict[int, int] = {}
    pair_regions(a, a.body, b, b.body, ids)
    for name in ("sin", "cos", "scan", "add"):
        mine, its = (next(op for op in p.ops if op.name == name) for p in (a, b))
        assert [ids[v] for v in mine.results] == list(its.results)


def test_values_that_only_one_program_makes_are_not_paired():
    a, b = (trace(f, (jnp.ones(3),), {}).program for f in (jnp.sin, jnp.cos))
    ids: dict[int, int] = {}
    pair_regions(a, a.body, b, b.body, ids)
    assert ids == {a.body.inputs[0]: b.body.inputs[0]}


def test_a_jaxpr_of_another_trace_is_refused():
    weak, strong = traces()
    program = weak.program
    with pytest.raises(InternalError, match="not its own") as caught:
        list(ops_and_equations(program, program.body, strong.closed_jaxpr))
    assert "equations" in caught.value.numbers
    assert isinstance(caught.value, rhino.RhinoError)
