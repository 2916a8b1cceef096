"""Linear solves: planned through their solver, differentiated as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.sparse.linalg import cg
from jax.sharding import PartitionSpec as P

import rhino_jax as rhino


MESH = {"x": 2, "y": 4}
RNG = np.random.default_rng(0)
A = RNG.normal(size=(8, 4, 4)).astype(np.float32) + 4 * np.eye(4, dtype=np.float32)
B = RNG.normal(size=(8, 4)).astype(np.float32)


def solved(a: Any, b: Any) -> Any:
    return jnp.mean(jnp.linalg.solve(a, b[..., None]) ** 2)


def determinant(a: Any, b: Any) -> Any:
    return jnp.sum(jnp.linalg.slogdet(a)[1]) + jnp.sum(jnp.linalg.inv(a)) + jnp.sum(b)


def iterated(a: Any, b: Any) -> Any:
    def each(m: Any, b: Any) -> Any:
        return cg(lambda v: m @ v, b, maxiter=4)[0]

    return jnp.sum(jax.vmap(each)(a @ jnp.swapaxes(a, -1, -2), b) ** 2)


def in_a_loop(a: Any, b: Any) -> Any:
    def body(x: Any, _: Any) -> Any:
        return jnp.linalg.solve(a, x[..., None])[..., 0], None

    return jnp.sum(jax.lax.scan(body, b, None, length=2)[0] ** 2)


def close(got: Any, want: Any) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("loss", [solved, determinant, iterated, in_a_loop])
def test_a_batch_of_solves_is_sharded(loss: Callable[..., Any]) -> None:
    gradient = jax.value_and_grad(loss, (0, 1))
    step = rhino.auto_shard(
        gradient, mesh=MESH, pins={"a": P(("x", "y"))}, progress=False
    )
    close(step(A, B), jax.jit(gradient)(A, B))
    assert step.last_plan.coverage.ops == 1.0
    ops = {c.op.partition(" ")[0] for c in step.last_plan.collectives}
    assert not ops & {"lu", "triangular_solve", "while"}


@pytest.mark.slow
def test_a_solve_is_differentiated_from_outside() -> None:
    sharded = rhino.auto_shard(solved, mesh=MESH, progress=False)
    close(jax.hessian(sharded, 1)(A, B), jax.hessian(solved, 1)(A, B))


def test_a_solve_runs_in_micro_batches() -> None:
    def step(w: Any, a: Any, b: Any) -> Any:
        # As `cg` does: rows and scalars, put on the device together.
        a, b, _ = jax.device_put((a, b, jnp.float32(1)))
        value, gradient = jax.value_and_grad(lambda w: solved(a + w, b))(w)
        return w - 0.1 * gradient, value

    w = np.zeros((4, 4), np.float32)
    split = rhino.auto_shard(step, mesh=MESH, microbatches=2, progress=False)
    close(split(w, A, B), jax.jit(step)(w, A, B))


def test_right_hand_sides_of_a_triangular_solve_are_sharded() -> None:
    def solve(k: Any, b: Any) -> Any:
        return jax.scipy.linalg.solve_triangular(k, b, lower=True)

    k, b = np.tril(A[0]), RNG.normal(size=(4, 4096)).astype(np.float32)
    step = rhino.auto_shard(
        solve, mesh=MESH, pins={"b": P(None, ("x", "y"))}, progress=False
    )
    close(step(k, b), solve(k, b))
    assert not step.last_plan.collectives
    assert "all-gather" not in step.lower(k, b).compile().as_text()


@pytest.mark.parametrize("length", [5, 6])
def test_arrays_of_no_elements_are_sharded_along_their_other_dims(length: int) -> None:
    def scan(a: Any, b: Any) -> Any:
        def both(left: Any, right: Any) -> Any:
            return left[0] * right[0], left[1] * right[0] + right[1]

        return jax.lax.associative_scan(both, (a, b), axis=1)[1]

    x = jax.ShapeDtypeStruct((16, length, 64), "float32")
    plan = rhino.plan(scan, x, x, mesh=MESH, pins={"a": P("x")}, progress=False)
    assert not plan.collectives
