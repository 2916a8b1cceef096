"""What a sharded function is called with, as `jax.jit` takes it."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from rhino_jax.errors import RhinoWarning, TraceError
from tests.runtime.stand_in import assert_close, mesh_of, normal, shard
from tests.runtime.training import (
    small_state,
    small_step,
    steps_of_one_device,
    train_step,
)


def test_keyword_arguments_in_any_order() -> None:
    def fn(x: Any, *, scale: Any, shift: Any = 0.0) -> Any:
        return x * scale["a"] + shift

    step = shard(fn)
    x = normal(0, 8, 8)
    want = fn(x, scale={"a": jnp.float32(2)}, shift=x)
    assert_close(step(x, scale={"a": jnp.float32(2)}, shift=x), want)
    assert_close(step(x, shift=x, scale={"a": jnp.float32(2)}), want)
    assert step.count == 1
    plan = step.plan(x, scale={"a": jnp.float32(2)}, shift=x)
    assert [leaf.path for leaf in plan.inputs] == ["x", "scale['a']", "shift"]


def test_donated_by_name() -> None:
    step = shard(lambda x, y: x + y, donate_argnames="y")
    x, y = normal(0, 8, 8), normal(1, 8, 8)
    step(x, y=y)
    assert y.is_deleted() and not x.is_deleted()


@pytest.mark.parametrize("options", [{"static_argnums": 1}, {"static_argnames": "n"}])
def test_static_arguments_are_python_values(options: Any) -> None:
    def fn(x: Any, n: int, *, mode: str = "add") -> Any:
        assert isinstance(n, int)
        return x * n if mode == "mul" else x + n

    step = shard(fn, **options)
    x = normal(0, 8, 8)
    assert_close(step(x, 3), x + 3)
    assert_close(step(x, n=4, mode="mul"), x * 4)
    assert_close(step(x, 3), x + 3)
    assert step.count == 2


def test_bad_static_and_donated_arguments() -> None:
    with pytest.raises(TraceError, match="Did you mean 'batch'") as caught:
        shard(train_step, donate_argnames="bach")
    assert "fix" in str(caught.value)
    with pytest.raises(TraceError, match="both static and donated"):
        shard(train_step, static_argnums=0, donate_argnames="params")
    with pytest.raises(TraceError, match="no argument 7"):
        shard(train_step, donate_argnums=7)


class Model:
    """An ordinary class; its instances are static."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def apply(self, params: Any, x: Any) -> Any:
        return x @ params * self.scale


def test_methods() -> None:
    Model.sharded = shard(Model.apply)  # type: ignore[attr-defined]
    a, b = Model(2.0), Model(3.0)
    w, x = normal(0, 8, 8), normal(1, 8, 8)
    assert_close(a.sharded(w, x), x @ w * 2.0)  # type: ignore[attr-defined]
    assert_close(b.sharded(w, x), x @ w * 3.0)  # type: ignore[attr-defined]
    plan = a.sharded.plan(w, x)  # type: ignore[attr-defined]
    assert [leaf.path for leaf in plan.inputs] == ["params", "x"]
    assert a.sharded.__name__ == "apply"  # type: ignore[attr-defined]
    assert_close(shard(a.apply)(w, x), x @ w * 2.0)


def test_jitted_functions_keep_their_static_and_donated_arguments() -> None:
    @functools.partial(jax.jit, static_argnames="n", donate_argnums=0)
    def fn(x: Any, n: int) -> Any:
        assert isinstance(n, int)
        return x * n

    step = shard(fn)
    x = normal(0, 8, 8)
    step(x, n=3)
    assert x.is_deleted()


def test_captured_arrays_are_arguments_placed_once() -> None:
    table, other = normal(0, 512, 64), np.ones((8, 64), np.float32)

    def fn(x: Any) -> Any:
        return x @ table + other

    step = shard(fn, seed=5)
    x = normal(1, 8, 512)
    assert_close(step(x), fn(x), rtol=2e-4, atol=1e-4)
    (bound,) = step._bounds.values()
    assert [c.shape for c in bound.consts] == [(512, 64), (8, 64)]
    assert "dense<" not in "".join(
        line for line in step.lower(x).as_text().splitlines() if "512x64" in line
    )
    assert [c.sharding for c in bound.consts] == bound.const_shardings
    # They are copies: what happens to the original does not matter.
    table.delete()
    step(x)


def test_captured_arrays_share_no_memory_with_the_originals() -> None:
    table = normal(0, 3)  # of three rows, so on every device whole
    step = shard(lambda x: x + table)
    step(normal(1, 8, 3))
    (bound,) = step._bounds.values()
    (const,) = bound.consts
    shards = {s.data.unsafe_buffer_pointer() for s in const.addressable_shards}
    assert len(shards) == 8 and table.unsafe_buffer_pointer() not in shards


def test_scalars_of_every_kind_compile_once() -> None:
    step = shard(lambda x, s: x * s)
    x = normal(0, 8, 8)
    for value in (2.0, 3.0, 4.0):
        assert_close(step(x, value), x * value)
    assert step.count == 1
    assert step._last is not None and step._last.executable.jitted._cache_size() == 1
    assert_close(step(x, np.float32(2)), x * 2)
    assert_close(step(x, 2), x * 2)


def test_prng_keys_are_arguments_and_results() -> None:
    def fn(key: Any, x: Any) -> Any:
        key, sub = jax.random.split(key)
        return key, x + jax.random.normal(sub, x.shape)

    mesh = mesh_of(sizes=(1, 2))
    step = shard(fn, mesh=mesh, seed=2, donate_argnums=(0, 1))
    key, x = jax.random.key(3), jnp.zeros((8, 64))
    want_key, want = key, x
    for _ in range(2):
        want_key, want = jax.jit(fn)(want_key, want)
    for _ in range(2):
        key, x = step(key, x)
    assert_close((key, x), (want_key, want))
    assert step.count == 1


def test_other_shapes_are_planned_again_and_said_once() -> None:
    step = shard(lambda x: x * 2)
    step(normal(0, 8, 8))
    with pytest.warns(
        RhinoWarning, match=r"`x` is float32\[16,8\], was float32\[8,8\]"
    ):
        step(normal(0, 16, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(normal(0, 24, 8))
        step(normal(0, 8, 8))
    assert step.count == 3


def test_a_plan_is_reused_where_the_program_is_the_same() -> None:
    step = shard(lambda x, s: (x * 2, s))
    x = normal(0, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(x, 2.0)
        step(x, jnp.float32(2.0))
    assert step.count == 1


def test_unhashable_static_values() -> None:
    with pytest.raises(TraceError, match="has no hash"):
        shard(lambda x, n: x, static_argnums=1)(normal(0, 8, 8), [1])


def test_arrays_committed_elsewhere_are_moved() -> None:
    step = shard(small_step)
    params, opt, batch = small_state()
    other = Mesh(np.array(jax.devices()).reshape(8), ("z",))
    params = jax.device_put(params, NamedSharding(other, P()))
    opt = jax.device_put(opt, jax.devices()[3])
    assert_close(step(params, opt, batch), steps_of_one_device("small", 1))


def test_no_arguments_and_no_results() -> None:
    assert_close(shard(lambda: jnp.ones((8, 8)))(), jnp.ones((8, 8)))
    assert shard(lambda x: None)(jnp.ones(8)) is None
