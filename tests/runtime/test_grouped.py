"""The grouped matmul of GPUs gives the numbers of `ragged_dot`, interpreted on CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rhino_jax as rhino
from rhino_jax.frontend.rules.dot import RAGGED_DOTS, tiled_dims
from rhino_jax.runtime import grouped
from rhino_jax.runtime.grouped import tiled_product


ROWS, WIDTH, HIDDEN, GROUPS = 100, 40, 24, 5
DATA = np.random.default_rng(0)

SIZES = {
    "uneven": [20, 0, 30, 10, 40],
    "fewer than the rows": [20, 0, 30, 10, 15],
    "all in one": [0, 0, ROWS, 0, 0],
    "none": [0] * GROUPS,
    "one each": [1, 1, 1, 1, 96],
}


def equations(fn: Callable[..., Any], *args: Any) -> Iterator[Any]:
    for eqn in jax.make_jaxpr(fn)(*args).eqns:
        if eqn.primitive.name in RAGGED_DOTS:
            yield eqn


def normals(*shape: int, dtype: Any = np.float32) -> Any:
    return jnp.asarray(DATA.standard_normal(shape), dtype)


def check(fn: Callable[..., Any], x: Any, w: Any, sizes: Any) -> list[bool]:
    """Compare the kernel with JAX, of a product and its gradients; return for each
    whether it is by matrices."""
    checked = []

    def both(x: Any, w: Any) -> Any:
        y, pull = jax.vjp(lambda x, w: fn(x, w, sizes), x, w)
        return pull(jnp.sin(y))

    for eqn in equations(both, x, w):
        given = [normals(*v.aval.shape, dtype=v.aval.dtype) for v in eqn.invars[:2]]
        dims = tiled_dims(eqn.params, given[0].ndim, given[1].ndim)
        assert dims is not None
        dtype, precision = eqn.outvars[0].aval.dtype, eqn.params["precision"]
        run = partial(tiled_product, dims=dims, precision=precision, dtype=dtype)
        found = run(*given, sizes, interpret=True)
        wanted = eqn.primitive.bind(*given, sizes, **eqn.params)
        assert found.dtype == wanted.dtype
        tolerance = 1e-5 if dtype == np.float32 else 1e-2
        found, wanted = (np.asarray(x, np.float32) for x in (found, wanted))
        largest = np.abs(wanted).max(initial=1.0)
        np.testing.assert_allclose(found, wanted, atol=tolerance * largest)
        checked.append(dims.of_matrices)
    return checked


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_and_gradients(dtype: str, sizes: list[int]) -> None:
    x, w = (
        normals(ROWS, WIDTH, dtype=dtype),
        normals(GROUPS, WIDTH, HIDDEN, dtype=dtype),
    )
    assert sorted(check(lax.ragged_dot, x, w, jnp.array(sizes))) == [False, False, True]


def test_sums_of_bfloat16_are_kept_in_float32() -> None:
    x, w = normals(64, 16, dtype="bfloat16"), normals(2, 16, 16, dtype="bfloat16")
    wide = partial(lax.ragged_dot, preferred_element_type=jnp.float32)
    (eqn,) = equations(wide, x, w, jnp.array([30, 34]))
    dims = tiled_dims(eqn.params, 2, 3)
    assert dims is not None
    found = tiled_product(
        x, w, jnp.array([30, 34]), dims=dims, precision=None, dtype=jnp.float32,
        interpret=True,
    )  # fmt: skip
    np.testing.assert_allclose(found, wide(x, w, jnp.array([30, 34])), rtol=1e-5)


def numbers(contracted: Any, batch: Any, rows: int, group: int) -> Any:
    dims = contracted, batch
    return lax.RaggedDotDimensionNumbers(dims, [rows], [group])


@pytest.mark.parametrize("count", [1, 2])
def test_leading_dims_have_groups_of_their_own(count: int) -> None:
    rows = 20
    of_sizes = jnp.array([[3, 0, 10, 2, 5], [0, 18, 0, 0, 0]][:count])
    shared = numbers(((2,), (1,)), ((), ()), 1, 0)
    run = partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=shared)
    x, w = normals(count, rows, WIDTH), normals(GROUPS, WIDTH, HIDDEN)
    assert sorted(check(run, x, w, of_sizes)) == [False, False, True]
    # [S, P, rows, k] x [P, E / P, k, n]: batch dims come first.
    parts = numbers(((3,), (2,)), ((1,), (0,)), 2, 1)
    run = partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=parts)
    x, w = normals(count, 2, rows, WIDTH), normals(2, GROUPS, WIDTH, HIDDEN)
    of_sizes = jnp.asarray(DATA.integers(0, rows // GROUPS, (2, count, GROUPS)))
    assert sorted(check(run, x, w, of_sizes)) == [False, False, True]


def test_other_products_are_not_covered() -> None:
    two = numbers(((1, 2), (1, 2)), ((), ()), 0, 0)
    run = partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=two)
    x, w = normals(8, 4, 2), normals(2, 4, 2, 6)
    (eqn,) = equations(run, x, w, jnp.array([3, 5]))
    assert tiled_dims(eqn.params, 3, 4) is None


def interpreted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Run the kernel on CPU, and return the shapes of first operands as it is run."""
    shapes = []

    def always(*args: Any, cuda: Any, default: Any) -> Any:
        shapes.append(args[0].shape)
        return cuda(*args, interpret=True)

    monkeypatch.setattr(grouped.lax, "platform_dependent", always)
    return shapes


P = jax.sharding.PartitionSpec


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()])
@pytest.mark.parametrize("sizes", ["fewer than the rows", "all in one"])
def test_planned_for_gpus_shards_give_the_numbers_of_one_device(
    spec: Any, sizes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def expert(w: Any, x: Any, sizes: Any) -> Any:
        def loss(w: Any, x: Any) -> Any:
            out = rhino.pin(lax.ragged_dot(x, w["up"], sizes), spec)
            return jnp.square(lax.ragged_dot(jax.nn.silu(out), w["down"], sizes)).mean()

        return jax.value_and_grad(loss, (0, 1))(w, x)

    counts = jnp.array(SIZES[sizes]) * 64 // ROWS
    w = {"up": normals(GROUPS, 16, 32), "down": normals(GROUPS, 32, 16)}
    x = normals(64, 16)
    wanted = jax.jit(expert)(w, x, counts)
    step = rhino.auto_shard(expert, mesh={"x": 4}, hardware="h100:4", progress=False)
    shapes = interpreted(monkeypatch)
    found = step(w, x, counts)
    check_equal = partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-4)
    jax.tree.map(check_equal, found, wanted)
    assert len(shapes) == 6
    assert shapes[0] == ((16, 16) if spec == P("x") else (64, 16))
    monkeypatch.undo()
    plan = step.plan(w, x, counts)
    assert plan.decisions.lowering.tiles_groups
    assert any("Triton kernel" in note for note in plan.notes)
    assert "rhino's kernel of grouped matmuls" in plan.code("specs")
    left = plan.with_(grouped="as written")
    assert not left.decisions.lowering.tiles_groups
    assert not any("Triton kernel" in note for note in left.notes)


def test_one_device_runs_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = normals(64, 16), normals(GROUPS, 16, 32)
    counts = jnp.array([10, 0, 20, 30, 1])
    step = rhino.auto_shard(
        lax.ragged_dot, mesh={"x": 1}, hardware="h100:1", progress=False
    )
    shapes = interpreted(monkeypatch)
    found = step(x, w, counts)
    assert shapes == [(64, 16)]
    np.testing.assert_allclose(
        found, lax.ragged_dot(x, w, counts), rtol=1e-4, atol=1e-4
    )


def test_a_planned_function_is_differentiated_from_outside() -> None:
    x, w, counts = normals(64, 16), normals(GROUPS, 16, 32), jnp.full(GROUPS, 12)

    def loss(x: Any, w: Any, sizes: Any) -> Any:
        return jnp.sin(lax.ragged_dot(x, w, sizes)).sum()

    planned = rhino.auto_shard(loss, mesh={"x": 4}, hardware="h100:4", progress=False)
    found, wanted = (jax.grad(f, (0, 1))(x, w, counts) for f in (planned, loss))
    check_equal = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(check_equal, found, wanted)


def test_saved_plans_run_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, counts = normals(64, 16), normals(GROUPS, 16, 32), jnp.full(GROUPS, 12)
    plan = rhino.plan(
        lax.ragged_dot, x, w, counts, mesh={"x": 4}, hardware="h100:4", progress=False
    )
    plan.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    assert loaded.decisions == plan.decisions
    shapes = interpreted(monkeypatch)
    found = loaded.jit(lax.ragged_dot)(x, w, counts)
    assert len(shapes) == 1
    np.testing.assert_allclose(
        found, lax.ragged_dot(x, w, counts), rtol=1e-4, atol=1e-4
    )


def test_tiles_of_a_program_are_of_one_group_each() -> None:
    sizes = np.array([SIZES["uneven"], SIZES["fewer than the rows"], SIZES["none"]])
    for tile in (16, 32):
        given = jnp.asarray(sizes[:, None])  # three batches of one set
        first, stop, matrix = map(np.asarray, grouped._tiles(given, ROWS, tile))
        every = [
            (row, int(m))
            for a, b, m in zip(first, stop, matrix, strict=True)
            for row in range(a, b)
        ]
        assert [row for row, _ in every] == list(range(3 * ROWS))
        wanted = []
        for batch, own in enumerate(sizes):
            behind = ROWS - own.sum()
            wanted += np.repeat(np.arange(GROUPS) + batch * GROUPS, own).tolist()
            wanted += [-1] * behind
        assert [m for _, m in every] == wanted
