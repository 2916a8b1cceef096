"""Whatever was decided, a program computes what it computes on one device."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import rhino_jax as rhino
from rhino_jax._compat import is_jaxpr, open_jaxpr
from rhino_jax.frontend.trace import trace
from rhino_jax.plan.decisions import Decisions
from rhino_jax.runtime.interpret import constrained
from tests.cases import covering
from tests.runtime.programs import (
    DIFFERENTIABLE,
    PROGRAMS,
    arguments,
    loss_of,
    nested_jit,
    reversed_scan,
    scanned,
)
from tests.runtime.stand_in import (
    SIZES,
    assert_close,
    mesh_of,
    normal,
    random_decisions,
    shard,
)
from tests.verify.extras import mesh_of_target


@pytest.mark.parametrize(
    ("name", "seed"),
    covering(
        [(name, seed) for seed in (0, 1) for name in PROGRAMS],
        [(name, 0) for name in ("looped", "sorted_rows")],
    ),
)
def test_numbers_do_not_depend_on_the_decisions(name: str, seed: int) -> None:
    fn, args = PROGRAMS[name], arguments()
    assert_close(shard(fn, seed=seed)(*args), jax.jit(fn)(*args))


@cache
def on_one_device(name: str) -> Any:
    fn = jax.value_and_grad(loss_of(PROGRAMS[name]), argnums=(0, 1))
    return jax.jit(fn)(*arguments())


# On one device, as gradients are a matter of what is interpreted; slow on eight.
INSIDE, OUTSIDE = (
    covering(
        [*((n, (1, 1)) for n in on_one), *((n, SIZES) for n in DIFFERENTIABLE)],
        lambda case: case[1] == (1, 1) or case[0] == "custom_backward",
    )
    for on_one in (
        ["branched", "rematted", "custom_forward", "nested_jit"],
        ["remat_scan", "custom_forward"],
    )
)


@pytest.mark.parametrize(("name", "sizes"), INSIDE)
def test_gradients_inside_keep_custom_rules(name: str, sizes: tuple[int, int]) -> None:
    fn = jax.value_and_grad(loss_of(PROGRAMS[name]), argnums=(0, 1))
    got = shard(fn, seed=3, mesh=mesh_of(sizes=sizes))(*arguments())
    assert_close(got, on_one_device(name), rtol=2e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "sizes"), OUTSIDE)
def test_gradients_from_outside_keep_custom_rules(
    name: str, sizes: tuple[int, int]
) -> None:
    loss = shard(loss_of(PROGRAMS[name]), seed=4, mesh=mesh_of(sizes=sizes))
    got = jax.grad(loss, argnums=(0, 1))(*arguments())
    assert_close(got, on_one_device(name)[1], rtol=2e-4, atol=1e-4)


def _inner(params: Any) -> list[Any]:
    flat = [v for p in params.values() for v in (p if isinstance(p, tuple) else (p,))]
    return [v for v in flat if is_jaxpr(v)]


def _eqns(jaxpr: Any, name: str) -> list[Any]:
    found = []
    for eqn in open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name == name:
            found.append(eqn)
        for inner in _inner(eqn.params):
            found += _eqns(inner, name)
    return found


def _applied(fn: Any, decisions: Decisions | None = None) -> Any:
    traced = trace(fn, arguments(), {})
    if decisions is None:
        decisions = random_decisions(traced.program, 0)
    run = constrained(traced.closed_jaxpr, traced.program, decisions, mesh_of())
    return jax.make_jaxpr(run)(*arguments(), *traced.consts), traced


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_pads_between_rows_are_right_in_every_layout(rows: int) -> None:
    def padded(x: Any) -> Any:
        pads = (((1, 0, 1), (0, 0, 0)), ((0, 1, 1), (0, 0, 0)))
        return [jnp.cos(jax.lax.pad(jnp.sin(x), 0.0, pad)) for pad in pads]

    x = normal(0, rows, 8)
    for seed in range(4):
        got = shard(padded, mesh=mesh_of(sizes=(2, 4)), seed=seed)(x)
        assert_close(got, padded(x))


def test_parameters_of_loops_stay() -> None:
    jaxpr, _ = _applied(reversed_scan)
    (scan,) = _eqns(jaxpr, "scan")
    assert scan.params["reverse"] is True
    jaxpr, _ = _applied(scanned)
    (scan,) = _eqns(jaxpr, "scan")
    assert scan.params["unroll"] == 2


def test_constraints_are_placed_inside_of_loop_bodies() -> None:
    jaxpr, traced = _applied(scanned)
    (scan,) = _eqns(jaxpr, "scan")
    assert len(_eqns(scan.params["jaxpr"], "sharding_constraint")) >= 3
    (op,) = [op for op in traced.program.ops if op.name == "scan"]
    assert op.call is not None


def test_a_value_without_decision_gets_no_constraint() -> None:
    jaxpr, _ = _applied(scanned, Decisions())
    assert _eqns(jaxpr, "sharding_constraint") == []


def test_operands_are_resharded_only_for_the_op_that_says_so() -> None:
    def two(x: Any, w: Any) -> Any:
        return x @ w, x + w

    traced = trace(two, arguments(), {})
    dot = traced.program.ops[0]
    spec = ((1,), (0,))
    jaxpr, _ = _applied(two, Decisions(operands={(dot.id, 0): spec}))
    (found,) = _eqns(jaxpr, "sharding_constraint")
    assert found.params["sharding"].spec == P("y", "x")
    dot_eqn, add_eqn = open_jaxpr(jaxpr).eqns[1:3]
    assert dot_eqn.invars[0] is found.outvars[0]
    assert add_eqn.invars[0] is open_jaxpr(jaxpr).invars[0]


def test_partial_sums_pass_through_every_stop() -> None:
    def product(x: Any, w: Any) -> Any:
        return x @ w

    traced = trace(product, arguments(), {})
    (value,) = traced.program.ops[0].results
    decisions = Decisions(
        values={value: ((0,), (1,))}, waypoints={value: (((), (1,)),)}
    )
    jaxpr, _ = _applied(product, decisions)
    first, last = _eqns(jaxpr, "sharding_constraint")
    assert first.params["sharding"].spec == P(None, "y")
    assert last.params["sharding"].spec == P("x", "y")
    assert last.invars[0] is first.outvars[0]


def test_a_dim_of_fewer_elements_than_pieces_is_left_open() -> None:
    def small(x: Any, w: Any) -> Any:
        return x[:3] * 2.0

    traced = trace(small, arguments(), {})
    (value,) = traced.program.ops[-1].results
    jaxpr, _ = _applied(small, Decisions(values={value: ((1,), (0,))}))
    (found,) = _eqns(jaxpr, "sharding_constraint")
    assert found.params["sharding"].spec == P(P.UNCONSTRAINED, "x")


def test_names_and_source_lines_of_the_user_stay() -> None:
    def step(x: Any, w: Any) -> Any:
        with jax.named_scope("attention"):
            return nested_jit(x, w) + jnp.sin(x)

    text = shard(step).lower(*arguments()).compile().as_text()
    assert "jit(step)/attention/sin" in text
    assert "jit(step)/attention/jit(inner)" in text
    assert "programs.py" in text


def test_the_compiled_program_has_the_functions_name() -> None:
    def my_step(x: Any, w: Any) -> Any:
        return x @ w

    assert "jit_my_step" in shard(my_step).lower(*arguments()).as_text()


def test_the_plan_takes_the_place_of_the_users_own_constraints() -> None:
    mesh = mesh_of()
    first, second = mesh.axis_names[:2]
    by_hand = NamedSharding(mesh, P(None, second))

    def fn(x: Any, w: Any) -> Any:
        return jax.lax.with_sharding_constraint(x @ w, by_hand) + 1.0

    args = (jnp.ones((16, 8)), jnp.ones((8, 16)))
    plan = rhino.plan(fn, *args, mesh=mesh, pins={"w": P(first)}, progress=False)
    assert any("says itself: 1" in note for note in plan.notes)
    step = plan.jit(fn)
    text = step.lower(*args).as_text()
    assert f'[{{}}, {{"{second}"}}]' not in text
    assert_close(step(*args), fn(*args))


@pytest.mark.slow
@pytest.mark.compile_only
@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 4, "model": 2}])
def test_a_broadcast_for_two_layouts_is_gathered_for_none(axes: dict[str, int]) -> None:
    """XLA:TPU shards the one that it shares, and gathers it for the whole layout."""
    shapes = (4096, 256), (1, 256), (4096, 256)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def fn(x: Any, scale: Any, y: Any) -> Any:
        return jnp.sin(x * scale), jnp.sin(y * scale)

    mesh, traced = mesh_of_target("v5e:2x4", axes), trace(fn, arrays, {})
    program = traced.program
    body = program.body
    cut = {body.inputs[2], body.outputs[1]}
    cut |= {
        program.ops[o].operands[0] for o in body.ops if cut & {*program.ops[o].results}
    }
    values = {v.id: ((0,), ()) if v.id in cut else ((), ()) for v in program.values}
    run = constrained(traced.closed_jaxpr, program, Decisions(values), mesh)
    placed = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(arrays, (P(), P(), P("data")), strict=True)
    ]
    compiled = jax.jit(run).lower(*placed).compile()
    assert "all-gather" not in compiled.as_text()
