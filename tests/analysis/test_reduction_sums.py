"""Partial results that are only added to one another are reduced as one sum."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.analysis.inline_regions import inline_regions
from rhino_jax.analysis.reduction_sums import find_sums
from rhino_jax.frontend.trace import trace
from tests.verify.extras import skipped_without_extra


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


A, B, R = f32(512, 1024), f32(1024, 256), f32(512, 256)
ROWS, AT = f32(2048, 256), jax.ShapeDtypeStruct((2048,), jnp.int32)


def put(at: Any, rows: Any) -> Any:
    return jnp.zeros((512, 256)).at[at].add(rows)


def queries_keys_values(x: Any, *weights: Any) -> Any:
    def loss(x: Any) -> Any:
        q, k, v = (x @ w for w in weights)
        return jnp.sum(jnp.tanh(q) * jnp.sin(k) * v)

    return jax.grad(loss)(x)


def used_twice(w: Any, x: Any) -> Any:
    return jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w)))(w)


def tied(table: Any, at: Any) -> Any:
    def loss(table: Any) -> Any:
        return jax.nn.logsumexp(jnp.tanh(table[at]) @ table.T, -1).sum()

    return jax.grad(loss)(table)


def embedded_twice(table: Any, at: Any, other: Any) -> Any:
    return jax.grad(lambda t: jnp.tanh(t[at]).sum() + jnp.sin(t[other]).sum())(table)


Form = tuple[Callable[..., Any], tuple[Any, ...], list[int]]

FORMS: dict[str, Form] = {
    "products": (lambda a, b, c, d: a @ b + c @ d, (A, B, A, B), [2]),
    "three": (queries_keys_values, (R, *[f32(256, 1024)] * 3), [3]),
    "weight": (used_twice, (f32(256, 256), ROWS), [2]),
    "transposed": (lambda a, b, c, d: (a @ b).T + (c @ d).T, (A, B, A, B), [2]),
    "maxima": (lambda x, y: jnp.maximum(x.max(0), y.max(0)), (ROWS, ROWS), [2]),
    "sum and product": (
        lambda a, b, x: a @ b + x.sum(0),
        (A, B, f32(8, 512, 256)),
        [2],
    ),
    "look-ups": (embedded_twice, (R, AT, AT), [2]),
    "scatters apart": (
        lambda x, i, j, s, t: (put(i, s) + x) + put(j, t),
        (R, AT, AT, ROWS, ROWS),
        [2],
    ),
    "products apart": (
        lambda a, b, c, d, i, s: (a @ b + put(i, s)) + c @ d,
        (A, B, A, B, AT, ROWS),
        [2],
    ),
    "tied": (tied, (R, AT), []),
    "converted": (
        lambda a, b, c, d: (a @ b).astype("float32") + (c @ d).astype("float32"),
        (bf16(512, 1024), bf16(1024, 256)) * 2,
        [],
    ),
    "scaled": (lambda a, b, c, d: 2 * (a @ b) + c @ d, (A, B, A, B), []),
    "residual first": (
        lambda a, b, c, d, r: (r + a @ b) + c @ d,
        (A, B, A, B, R),
        [],
    ),
    "read twice": (
        lambda a, b, c, d: jnp.tanh(u := a @ b) + (u + c @ d),
        (A, B, A, B),
        [],
    ),
    "sum of maxima": (lambda x, y: x.max(0) + y.max(0), (ROWS, ROWS), []),
}  # fmt: skip
"""Name → function, arguments, sizes of its sums."""


@pytest.mark.parametrize("name", FORMS)
def test_which_results_are_reduced_as_one(name: str) -> None:
    fn, shapes, expected = FORMS[name]
    graph = inline_regions(trace(fn, shapes, {}).program)
    sums = {id(together): together for together in find_sums(graph).values()}
    assert [len(together) for together in sums.values()] == expected


def spec_of(shape: tuple[int, ...]) -> P:
    """The spec of an argument that leaves all reduced results partial."""
    if shape in [R.shape, (256, 256)]:
        return P()
    return P(*[None] * [A.shape, (256, 1024)].count(shape), "m")


@pytest.mark.compile_only
@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["v5e:2x4", "h100:8"])
@pytest.mark.parametrize("name", FORMS)
def test_compilers_reduce_as_many_bytes(name: str, hardware: str) -> None:
    fn, shapes, _ = FORMS[name]
    with skipped_without_extra():
        mesh = rhino.compile_target(hardware, {"m": 8})
    specs = tuple(NamedSharding(mesh, spec_of(s.shape)) for s in shapes)
    jitted = jax.jit(fn, in_shardings=specs, out_shardings=NamedSharding(mesh, P()))
    text = jitted.lower(*shapes).compile().as_text()
    reduced = re.findall(r"= (.*?) all-reduce(?:-start)?\(", text)
    arrays = [
        found for line in reduced for found in re.findall(r"(\w+)\[([\d,]*)\]", line)
    ]
    sent = sum(
        {"f32": 4, "bf16": 2}[dtype] * math.prod(map(int, dims.split(",")))
        for dtype, dims in arrays
    )
    assert sent == expected_bytes(name)


def expected_bytes(name: str) -> float:
    """The bytes of the reduced results, which are of the size of the function's, those
    of one sum counted once."""
    fn, shapes, _ = FORMS[name]
    graph = inline_regions(trace(fn, shapes, {}).program)
    sums, found = find_sums(graph), 0.0
    whole = math.prod(jax.eval_shape(fn, *shapes).shape)
    for node in graph.nodes:
        rule, value = (
            node.op.rule if node.op else None,
            graph.program.values[node.value],
        )
        if rule and any(map(rule.partial_results, range(len(rule.factors)))):
            if math.prod(value.shape) == whole:
                found += value.bytes / len(sums.get(node.id, "1"))
    return found


def recurrent(params: Any, xs: Any) -> Any:
    def loss(params: Any) -> Any:
        h = jnp.zeros((4096, 512))
        for k in range(6):
            h = jnp.tanh(h @ params["w"] + xs[:, k] @ params["u"])
        return jnp.mean(h**2)

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


LAYER = {"w": f32(512, 512), "u": f32(512, 512)}


def data_parallel(hardware: str) -> rhino.Plan:
    plan = rhino.plan(
        recurrent, LAYER, f32(4096, 6, 512), hardware=hardware, mesh={"data": 8}
    )
    return plan.recipe("dp")


def sent_bytes(plan: rhino.Plan) -> int:
    return sum(c.bytes for c in plan.collectives)


def test_a_gradient_is_sent_once_and_by_the_cpu_compiler_every_time() -> None:
    once, each = (sent_bytes(data_parallel(name)) for name in ("v5e:2x4", "cpu:8"))
    assert once == pytest.approx(2 * 512 * 512 * 4 * 2 * 7 / 8, rel=0.01)
    assert each == pytest.approx(6 * once, rel=0.01)


@pytest.mark.compile_only
@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["v5e:2x4", "h100:8"])
def test_a_recurrent_network_is_predicted_as_compiled(hardware: str) -> None:
    with skipped_without_extra():
        found = data_parallel(hardware).verify(
            recurrent, LAYER, f32(4096, 6, 512), compile_for=hardware
        )
    assert found.planned_wire_bytes == pytest.approx(found.wire_bytes, rel=0.01)
    assert found.time_ok, found
