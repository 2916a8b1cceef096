"""Pallas kernels are cut along parallel axes of their grids; others bring a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.frontend.trace import trace
from tests.cases import covering
from tests.runtime.stand_in import assert_close, normal


MESH = {"data": 4, "model": 2}
BLOCK = 8


def rule_of(fn: Callable[..., Any], *args: Any) -> str:
    ops = trace(fn, args, {}).program.ops
    (op,) = [op for op in ops if op.name == "pallas_call"]
    return str(op.rule) if op.is_known else "opaque"


def matmul(x: Any, w: Any) -> Any:
    """Blocks of rows times blocks of columns, summed over blocks of the third axis."""

    def kernel(x_ref: Any, w_ref: Any, o_ref: Any) -> None:
        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...] @ w_ref[...]

    (m, k), n, b = x.shape, w.shape[1], BLOCK
    return pl.pallas_call(
        kernel,
        grid=(m // b, n // b, k // b),
        in_specs=[
            pl.BlockSpec((b, b), lambda i, j, k: (i, k)),
            pl.BlockSpec((b, b), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((b, b), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        interpret=True,
        name="blocked_matmul",
    )(x, w)


def args() -> tuple[Any, Any]:
    return normal(0, 64, 32), normal(1, 32, 48)


def test_axes_that_results_have_are_parallel() -> None:
    assert rule_of(matmul, *args()) == "(a c!) d!, e! (b f!) -> (a g!) (b h!)"


@pytest.mark.parametrize(
    ("pins", "specs"),
    covering(
        [
            ({"out": P("data", "model")}, (P("data"), P(None, "model"))),
            ({"out": P(None, "model"), "x": P("data")}, None),
            ({"out": P(("data", "model"))}, (P(("data", "model")), P())),
        ],
        2,
    ),
)
def test_shards_of_the_grid_equal_one_device(pins: Any, specs: Any) -> None:
    step = rhino.auto_shard(matmul, mesh=MESH, pins=pins, progress=False)
    plan = step.plan(*args())
    if specs is not None:
        assert plan.in_specs == specs
        assert plan.predicted.flops_per_device * 8 == pytest.approx(
            trace(matmul, args(), {}).program.ops[0].flops
        )
        assert "shard_map" in str(step.trace(*args()).jaxpr)
    assert_close(step(*args()), matmul(*args()))


def test_in_a_loop_and_on_explicit_axes() -> None:
    def fn(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda c, _: (jnp.tanh(matmul(c, w)), None), x, None, 3)[0]

    x, w = normal(0, 64, 32), normal(1, 32, 32) * 0.1
    kinds = (AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
    step = rhino.auto_shard(fn, mesh=mesh, pins={"x": P("data")}, progress=False)
    assert_close(step(x, w), fn(x, w))


def test_the_rule_is_true() -> None:
    report = rhino.check_rule(matmul, *args(), max_pairs=2)
    assert report.num_strategies >= 4 and report.unknown == ()


def one(
    body: Callable[..., None], index: Callable[[Any], Any], **options: Any
) -> Callable[[Any], Any]:
    """A kernel over rows of blocks, one result of the same shape."""

    def call(x: Any) -> Any:
        kept = {"grid": (8,), "in_specs": [pl.BlockSpec((BLOCK, 16), index)]}
        kept["out_specs"] = pl.BlockSpec((BLOCK, 16), lambda i: (i, 0))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(
            body, out_shape=shape, interpret=True, **(kept | options)
        )(x)  # fmt: skip

    return call


def double(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] * 2


def numbered(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] + pl.program_id(0).astype(x_ref.dtype)


def counted(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] * pl.num_programs(0)


@pytest.mark.parametrize(
    ("fn", "rule"),
    [
        (one(double, lambda i: (i, 0)), "(a b!) c! -> (a d!) e!"),
        (one(double, lambda i: (0, 0)), "b! c! -> (a d!) e!"),
        (one(double, lambda i: (7 - i, 0)), "opaque"),
        (one(double, lambda i: (i // 2, 0)), "opaque"),
        (one(numbered, lambda i: (i, 0)), "opaque"),
        # Its size is in the kernel's text, and stays that of the whole grid.
        (one(counted, lambda i: (i, 0)), "(a b!) c! -> (a d!) e!"),
        (one(double, lambda i: (i, 0), grid=(4,)), "opaque"),  # writes half
        (one(double, lambda i: (i, 0), input_output_aliases={0: 0}), "opaque"),
    ],
)
def test_what_is_no_part_of_the_same_kernel_is_opaque(fn: Any, rule: str) -> None:
    x = normal(0, 64, 16)
    assert rule_of(fn, x) == rule
    step = rhino.auto_shard(fn, mesh={"d": 8}, progress=False, pins={"x": P("d")})
    got, want = step(x), fn(x)
    rows = 32 if "half" in str(fn) else 64
    assert_close(got[:32], want[:32])
    assert got.shape[0] == 64 and rows


def test_scratch_needs_the_authors_word() -> None:
    from jax.experimental.pallas import tpu as pltpu

    def kernel(x_ref: Any, o_ref: Any, kept_ref: Any) -> None:
        kept_ref[...] = x_ref[...]
        o_ref[...] = kept_ref[...]

    def call(**options: Any) -> Any:
        scratch = [pltpu.VMEM((BLOCK, 16), jnp.float32)]
        return one(kernel, lambda i: (i, 0), scratch_shapes=scratch, **options)

    x = normal(0, 64, 16)
    assert rule_of(call(), x) == "opaque"
    said = pltpu.CompilerParams(dimension_semantics=("parallel",))
    assert rule_of(call(compiler_params=said), x) == "(a b!) c! -> (a d!) e!"


def looked_up(places: Any, x: Any, **options: Any) -> Any:
    """Blocks of rows in the order that scalars say, times the first of these."""
    from jax.experimental.pallas import tpu as pltpu

    def kernel(places_ref: Any, x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * (places_ref[0] + 1).astype(x_ref.dtype)

    rows, columns = x.shape
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(rows // BLOCK, columns // BLOCK),
        in_specs=[pl.BlockSpec((BLOCK, BLOCK), lambda i, j, p: (p[i], j))],
        out_specs=pl.BlockSpec((BLOCK, BLOCK), lambda i, j, p: (i, j)),
    )
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(
        kernel, grid_spec=grid, out_shape=shape, interpret=True, **options
    )(places, x)


def shifted(places: Any, x: Any) -> Any:
    """The same rows, and columns by where scalars say."""
    from jax.experimental.pallas import tpu as pltpu

    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(8, 4),
        in_specs=[pl.BlockSpec((BLOCK, BLOCK), lambda i, j, p: (i, (j + p[0]) % 4))],
        out_specs=pl.BlockSpec((BLOCK, BLOCK), lambda i, j, p: (i, j)),
    )
    return pl.pallas_call(
        lambda p_ref, x_ref, o_ref: o_ref.__setitem__(..., x_ref[...]),
        grid_spec=grid,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=True,
    )(places, x)


PLACES = jnp.array([3, 1, 0, 2, 7, 7, 5, 4])


def along(fn: Callable[..., Any], *in_axes: Any) -> Callable[..., Any]:
    return lambda *args: jax.vmap(fn, in_axes)(*args)


TOGETHER: dict[str, tuple[Any, Any, str]] = {
    "under vmap": (
        along(one(double, lambda i: (i, 0)), 0),
        (normal(0, 4, 64, 16),),
        "a (b c!) d! -> a (b e!) f!",
    ),
    "its own axis is asked for": (
        along(one(numbered, lambda i: (i, 0)), 0),
        (normal(0, 4, 64, 16),),
        "a b! c! -> a d! e!",
    ),
    "one operand for all": (
        along(matmul, 0, None),
        (normal(0, 4, 16, 16), normal(1, 16, 48)),
        "a (b d!) e!, f! (c g!) -> a (b h!) (c i!)",
    ),
    "twice under vmap": (
        along(along(matmul, None, 0), 0, None),
        (normal(0, 4, 16, 16), normal(1, 2, 16, 16)),
        "a (c e!) f!, b g! (d h!) -> a b (c i!) (d j!)",
    ),
    "rows are looked up": (
        looked_up,
        (PLACES, normal(0, 64, 32)),
        "b!, c! (a d!) -> e! (a f!)",
    ),
    "columns are looked up": (
        shifted,
        (PLACES, normal(0, 64, 32)),
        "b!, (a c!) d! -> (a e!) f!",
    ),
    "looked up under vmap": (
        along(looked_up, None, 0),
        (PLACES, normal(0, 4, 64, 32)),
        "c!, a d! (b e!) -> a f! (b g!)",
    ),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_added_axes_and_scalars_read_before(name: str) -> None:
    fn, args, rule = TOGETHER[name]
    assert rule_of(fn, *args) == rule


@pytest.mark.parametrize(
    "name", covering(TOGETHER, ["under vmap", "rows are looked up"])
)
def test_added_axes_and_scalars_equal_one_device(name: str) -> None:
    fn, args, _ = TOGETHER[name]
    want = fn(*args)
    for pin in (P("data"), P(*[None] * (want.ndim - 2), ("data", "model"))):
        if all(
            n % 8 == 0 or by in (None, "data")
            for n, by in zip(want.shape, pin, strict=False)
        ):
            step = rhino.auto_shard(fn, mesh=MESH, pins={"out": pin}, progress=False)
            assert_close(step(*args), want)


def test_an_added_axis_cuts_a_kernel_that_keeps_something() -> None:
    from jax.experimental.pallas import tpu as pltpu

    def kernel(x_ref: Any, o_ref: Any, kept_ref: Any) -> None:
        kept_ref[...] = x_ref[...]
        o_ref[...] = kept_ref[...]

    scratch = [pltpu.VMEM((BLOCK, 16), jnp.float32)]
    call = one(kernel, lambda i: (i, 0), scratch_shapes=scratch)
    x = normal(0, 4, 64, 16)
    assert rule_of(along(call, 0), x) == "a b! c! -> a d! e!"
    step = rhino.auto_shard(
        along(call, 0), mesh=MESH, pins={"out": P("data")}, progress=False
    )
    assert step.plan(x).in_specs == (P("data"),)
    assert "shard_map" in str(step.trace(x).jaxpr)
    assert_close(step(x), x)


@jax.custom_vjp
def product(x: Any, w: Any) -> Any:
    return matmul(x, w)


product.defvjp(
    lambda x, w: (matmul(x, w), (x, w)),
    lambda kept, g: (matmul(g, kept[1].T), matmul(kept[0].T, g)),
)


@pytest.mark.slow
@pytest.mark.parametrize("pins", [{"w": P(None, "model"), "x": P("data")}, {}])
def test_training_with_a_kernel_equals_one_device(pins: Any) -> None:
    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            body = jax.checkpoint(lambda h, w: (jnp.tanh(product(h, w)), None))
            return (jax.lax.scan(body, x, w)[0] ** 2).mean()

        value, grads = jax.value_and_grad(loss)(w)
        return w - 0.1 * grads, value

    w, x = normal(0, 2, 32, 32) * 0.2, normal(1, 64, 32)
    run = rhino.auto_shard(step, mesh=MESH, pins=pins, progress=False)
    assert run.plan(w, x).coverage.flops == 1
    assert_close(run(w, x), jax.jit(step)(w, x))


def brought(fn: Any, rule: str, reduces: bool = False, **factors: Any) -> Any:
    """Return `fn` with a rule; its partial results are summed where it `reduces`."""
    made = custom_partitioning(fn)

    def partition(mesh: Any, ins: Any, out: Any) -> Any:
        axes = [a for dim in ins[-1].sharding.spec[:1] if dim for a in (dim,)]

        def local(*arrays: Any) -> Any:
            result = fn(*arrays)
            return jax.lax.psum(result, axes) if reduces and axes else result

        return mesh, local, out.sharding, tuple(x.sharding for x in ins)

    made.def_partition(partition, sharding_rule=rule, **factors)
    return made


def normed(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


NORM = brought(normed, "... d, d -> ... d", need_replication_factors=("d",))
PRODUCT = brought(lambda x, w: x @ w, "i k, k j -> i j", True, reduction_factors=("k",))
MISFIT = brought(lambda x, y: x + y, "i, i -> i")


@pytest.mark.parametrize(
    ("fn", "args", "rule"),
    [
        (
            NORM,
            (normal(0, 8, 4, 16), normal(1, 16)),
            "…0.0 …0.1 d!, d! -> …0.0 …0.1 d!",
        ),
        (PRODUCT, (normal(0, 8, 16), normal(1, 16, 4)), "i k, k j -> i j"),
        (MISFIT, (normal(0, 8), normal(1, 1)), None),
    ],
)
def test_the_rule_of_a_function_is_the_one_that_it_brings(
    fn: Any, args: Any, rule: str | None
) -> None:
    (op,) = trace(fn, args, {}).program.ops
    assert (str(op.rule) if op.is_known else None) == rule
    assert rhino.check_rule(fn, *args).strategies == ()


@pytest.mark.parametrize("pin", [P("data", None), P(None, "data")])
def test_it_runs_sharded_as_it_states(pin: P) -> None:
    def step(x: Any, scale: Any, w: Any) -> Any:
        return PRODUCT(rhino.pin(NORM(x, scale), P()), rhino.pin(w, pin))

    args = normal(0, 8, 16), normal(1, 16), normal(2, 16, 4)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    sharded = rhino.auto_shard(step, mesh=mesh, progress=False)
    assert_close(sharded(*args), step(*args))


def test_rows_are_sharded_where_a_kernel_allows_it() -> None:
    args = normal(0, 64, 8, 64), normal(1, 64)
    plan = rhino.plan(NORM, *args, mesh={"data": 4}, hardware="v5e:2x2", progress=False)
    assert "data" in str(plan.out_specs)
    assert not plan.collectives
