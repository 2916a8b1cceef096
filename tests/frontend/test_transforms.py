"""What is done to a program before it is planned, and told of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax.frontend.trace import trace
from rhino_jax.frontend.tracing.open_moves import with_open_moves
from rhino_jax.ir.transform import Transform


X = jax.ShapeDtypeStruct((8, 16, 32), jnp.float32)


def names(fn: Any, *args: Any) -> list[str]:
    return [t.name for t in trace(fn, args, {}).program.transforms]


def plain(x: Any) -> Any:
    return jnp.tanh(x)


def with_dead_code(x: Any) -> Any:
    jnp.exp(x).sum()
    return jnp.tanh(x)


def with_merged_dims(x: Any, w: Any) -> Any:
    return (x.reshape(-1, 32) @ w).reshape(8, 16, 32)


def with_a_reference(x: Any) -> Any:
    ref = jax.new_ref(jnp.zeros(()))
    ref[...] += x.sum()
    return x * ref[...]


def test_what_changes_nothing_is_not_told() -> None:
    assert trace(plain, (X,), {}).program.transforms == ()


def test_dead_code_is_told_with_what_it_took() -> None:
    program = trace(with_dead_code, (X,), {}).program
    assert program.transforms == (Transform("dead code", 3, 1),)
    assert len(program.ops) == 1


def test_every_pass_is_told_in_order() -> None:
    w = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    assert names(with_merged_dims, X, w) == ["merged dims"]
    assert names(with_a_reference, X)[0] == "references as values"


def test_they_stand_in_the_plan_and_are_no_part_of_what_it_fits() -> None:
    options = {"mesh": {"a": 8}, "hardware": "cpu", "progress": False}
    found, same = (rhino.plan(fn, X, **options) for fn in (with_dead_code, plain))
    assert found.transforms == (Transform("dead code", 3, 1),)
    assert same.transforms == () and same.decisions == found.decisions
    found.jit(plain)(jnp.ones(X.shape))


ROWS = 8
TABLE = np.random.default_rng(0).normal(size=(ROWS, 6, 4)).astype("f")
I = np.random.default_rng(1).integers(-7, 8, size=(ROWS, 3)).astype("i")  # noqa: E741
ROW = np.arange(ROWS)[:, None]

ROWS_OF_THEIR_OWN: dict[str, Callable[..., Any]] = {
    "numpy": lambda x, i: x[ROW, i],
    "between": lambda x, i: x[jnp.arange(ROWS), :, i[:, 0]],
    "second": lambda x, i: x.transpose(1, 0, 2)[i.T, jnp.arange(ROWS)],
    "filled": lambda x, i: x.at[jnp.arange(ROWS)[:, None], i].get(mode="fill"),
    "clipped": lambda x, i: x.at[jnp.arange(ROWS)[:, None], i].get(mode="clip"),
    "added": lambda x, i: x.at[jnp.arange(ROWS)[:, None], i].add(1.0),
    "set": lambda x, i: x.at[jnp.arange(ROWS)[:, None], i, i % 4].set(1.0),
    "bytes": lambda x, i: x[jnp.arange(ROWS, dtype=jnp.uint8), i[:, 0]],
    "two": lambda x, i: x[
        jnp.arange(ROWS)[:, None, None], jnp.arange(6)[:, None], i[:, None] % 4
    ],
    "vmapped": lambda x, i: jax.vmap(lambda x, i: x[jnp.arange(6), i % 4])(x, i[:, :1]),
    "gradient": lambda x, i: jax.grad(
        lambda x: jnp.sin(x[jnp.arange(ROWS), i[:, 0]]).sum()
    )(x),
    "of a scan's gradient": lambda x, i: jax.grad(
        lambda x: jax.lax.scan(
            lambda x, k: (jnp.sin(x).at[ROW, k].add(x[ROW, k]), None), x, i[None]
        )[0].sum()
    )(x),
    "scanned": lambda x, i: jax.lax.scan(
        lambda x, k: (x.at[jnp.arange(ROWS), k].mul(2.0), x[jnp.arange(ROWS), k]),
        x,
        i.T,
    ),
}
OTHERS: dict[str, Callable[..., Any]] = {
    "fewer": lambda x, i: x[jnp.arange(ROWS - 1), i[1:, 0]],
    "shifted": lambda x, i: x[jnp.arange(ROWS) - 1, i[:, 0]],
    "reversed": lambda x, i: x[jnp.arange(ROWS)[::-1], i[:, 0]],
}


def evaluated(closed: Any) -> list[Any]:
    return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, TABLE, I)


@pytest.mark.parametrize("name", [*ROWS_OF_THEIR_OWN, *OTHERS])
def test_row_numbers_become_batching_dims(name: str) -> None:
    before = jax.make_jaxpr({**ROWS_OF_THEIR_OWN, **OTHERS}[name])(TABLE, I)
    after = with_open_moves(before)
    assert (after is not before) == (name in ROWS_OF_THEIR_OWN)
    for a, b in zip(evaluated(before), evaluated(after), strict=True):
        np.testing.assert_array_equal(a, b)


def test_rows_are_sharded_without_communication() -> None:
    def step(x: Any, w: Any, i: Any) -> Any:
        row = jnp.arange(x.shape[0])[:, None]
        return x.at[row, i].add(jnp.tanh(x[row, i] @ w))

    shapes = ((512, 64, 256), jnp.float32), ((256, 256), jnp.float32)
    args = [jax.ShapeDtypeStruct(*s) for s in (*shapes, ((512, 16), jnp.int32))]
    plan = rhino.plan(step, *args, mesh={"x": 8}, hardware="h100:8", progress=False)
    assert not plan.collectives
