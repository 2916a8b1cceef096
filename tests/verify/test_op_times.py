"""The compute of a compiled program is divided among the ops that were planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.cost.corrections import OpKey
from rhino_jax.verify.matching.division import op_times
from rhino_jax.verify.refine import programs_of


def chain(w: jax.Array, x: jax.Array) -> jax.Array:
    y = x @ w
    z = jnp.sin(y) * 2
    return z @ w


def looped(w: jax.Array, x: jax.Array) -> jax.Array:
    def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        y = x @ w
        return jnp.sin(y), None

    return jax.lax.scan(body, x @ w, None, length=7)[0]


class Layer:
    """A layer whose ops are on lines of a method, as those of Flax and Equinox."""

    def __call__(self, w: jax.Array, x: jax.Array) -> jax.Array:
        y = x @ w
        return jnp.sin(y) @ w


def divided(
    fn: Callable[..., Any], planned: Callable[[OpKey], float]
) -> tuple[Counter[str], float, float]:
    """Return primitive and line → seconds, those of no op, and those of the program."""
    args = jnp.ones((512, 512)), jnp.ones((1024, 512))
    plan = rhino.plan(fn, *args, mesh={"x": 8}, hardware="cpu", progress=False)
    program = programs_of(plan.traced, "`test`", rhino.load_target("cpu"))(plan)
    ops = plan.traced.program.ops
    keys = {(str(op.source), "forward", op.name) for op in ops}
    planned_s = {key: planned(key) for key in keys}
    found, rest_s = op_times(program.reading.kernels, planned_s)
    assert set(found) <= keys
    by_op = Counter({f"{k[2]} {k[0]}": s for k, s in found.items()})
    return by_op, rest_s, program.reading.compiled.compute_s


@pytest.mark.parametrize("fn", [chain, looped, Layer().__call__])
def test_every_second_belongs_to_an_op_or_to_none(fn: Callable[..., Any]) -> None:
    found, rest_s, whole_s = divided(fn, lambda key: 1.0)
    assert sum(found.values()) + rest_s == pytest.approx(whole_s)
    assert rest_s < 0.1 * whole_s
    dots = [s for op, s in found.items() if op.startswith("dot_general")]
    assert len(dots) == 2 and sum(dots) > 0.5 * whole_s


def test_ops_of_loops_count_their_trips() -> None:
    found, _, _ = divided(looped, lambda key: 1.0)
    inside, outside = sorted(
        (s for op, s in found.items() if op.startswith("dot_general")), reverse=True
    )
    assert inside == pytest.approx(7 * outside, rel=0.05)


def test_a_fusion_is_divided_as_it_was_planned() -> None:
    """`sin` and `mul` are one kernel."""
    found, _, _ = divided(chain, lambda key: {"sin": 3.0, "mul": 1.0}.get(key[2], 0.0))
    sin, mul = (next(s for op, s in found.items() if n in op) for n in ("sin ", "mul "))
    assert sin == pytest.approx(3 * mul)
