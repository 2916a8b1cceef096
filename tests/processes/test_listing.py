"""What is compared between processes: all that is compiled, and no names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.frontend.trace import trace
from rhino_jax.runtime.processes.listing import (
    AgreedItem,
    digest,
    first_difference,
    from_bytes,
    of_plan,
    of_program,
    to_bytes,
)


def lines(fn: Any, *shapes: Any, **options: Any) -> list[AgreedItem]:
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes or ((8, 8), (8, 8))]
    return of_program(trace(fn, args, {}, **options), {})


def base(w: Any, x: Any) -> Any:
    @jax.jit
    def inner(a: Any) -> Any:
        return jnp.tanh(a * 2.0)

    out, _ = jax.lax.scan(lambda c, _: (inner(c @ w), None), x, None, length=3)
    return jax.lax.rev(out, (0,)).sum()


def renamed(w: Any, x: Any) -> Any:
    @jax.jit
    def another(b: Any) -> Any:
        with jax.named_scope("scope"):
            return jnp.tanh(b * 2.0)

    carry, _ = jax.lax.scan(lambda d, _: (another(d @ w), None), x, None, length=3)
    return jax.lax.rev(carry, (0,)).sum()


def test_names_and_lines_do_not_count() -> None:
    assert digest(lines(base)) == digest(lines(renamed))
    assert {line.where for line in lines(base)} != {
        line.where for line in lines(renamed)
    }


def literal(w: Any, x: Any) -> Any:
    step = jax.jit(lambda a: jnp.tanh(a * 3.0))
    out, _ = jax.lax.scan(lambda c, _: (step(c @ w), None), x, None, length=3)
    return jax.lax.rev(out, (0,)).sum()


def parameter(w: Any, x: Any) -> Any:
    step = jax.jit(lambda a: jnp.tanh(a * 2.0))
    out, _ = jax.lax.scan(lambda c, _: (step(c @ w), None), x, None, length=3)
    return jax.lax.rev(out, (1,)).sum()


@pytest.mark.parametrize(("fn", "name"), [(literal, "mul"), (parameter, "rev")])
def test_the_first_op_that_differs_is_found(fn: Any, name: str) -> None:
    found = first_difference(lines(base), lines(fn))
    assert found is not None
    one, other = found
    assert one.name == other.name and one.name.startswith(name)
    assert one.value != other.value
    assert other.where.startswith("test_listing.py:")


def test_shapes_and_donation_count() -> None:
    first = lines(base)
    assert digest(first) != digest(lines(base, (8, 8), (16, 8)))
    assert digest(first) != digest(lines(base, donate_argnums=1))


def test_one_that_ends_first_differs_there() -> None:
    first = lines(base)
    found = first_difference(first, first[:-1])
    assert found == (first[-1], AgreedItem("nothing", "the end"))
    assert first_difference(first, first) is None


def test_they_can_be_sent() -> None:
    assert from_bytes(to_bytes(lines(base))) == lines(base)


def test_every_spec_of_a_plan_counts() -> None:
    args = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2
    program = trace(base, args, {}).program
    plan = rhino.plan(base, *args, mesh={"a": 2, "b": 4}, hardware="cpu")
    mine = digest(of_plan(plan, program))
    decisions = plan.decisions
    kinds = [decisions.values, decisions.operands, decisions.region_outputs]
    for kind, of_kind in zip(
        ("values", "operands", "region_outputs"), kinds, strict=True
    ):
        for key, spec in of_kind.items():
            other = {**of_kind, key: (*spec, (0,))}
            (stage,) = plan.stages
            stage = replace(stage, decisions=replace(decisions, **{kind: other}))
            changed = replace(plan, stages=(stage,))
            assert digest(of_plan(changed, program)) != mine, (kind, key)
