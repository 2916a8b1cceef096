"""State of weak types: the second call runs what the first compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax.frontend.trace import trace
from rhino_jax.frontend.weak_types import compute_the_same


def step(c: Any, w: Any, x: Any, change: Callable[[Any], Any]) -> Any:
    w = w - 0.001 * (x.T @ x)
    return (change(c), w), jnp.sum(w * c), w.astype(jnp.bfloat16) * c


STATES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "int": (0, lambda c: c + 1),
    "float": (0.5, lambda c: c * 1.5),
    "bool": (True, jnp.logical_not),
    "np.int64": (np.int64(3), lambda c: c + 1),
    "np.float64": (np.float64(3), lambda c: c * 2),
    "weak array": ("full", lambda c: c + 1),
}


@pytest.mark.parametrize("kind", STATES)
def test_numbers_and_weak_arrays_compile_once(kind: str) -> None:
    c, change = STATES[kind]
    compare(lambda c, w, x: step(c, w, x, change), c, compiled=1, programs=1)


TURNING: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "int": (0, lambda c: c + jnp.int32(1)),
    "array": ("full", lambda c: c * jnp.float32(1.5)),
}


@pytest.mark.parametrize("kind", TURNING)
def test_weak_state_that_comes_back_strong_compiles_once(kind: str) -> None:
    c, change = TURNING[kind]

    def run(c: Any, w: Any, x: Any) -> Any:
        return (*step(c, w, x, change)[:2], 0.0)

    compare(run, c, compiled=1, programs=2)


def test_where_weakness_changes_a_type_it_is_another_program() -> None:
    c, change = TURNING["array"]
    # bfloat16 times weak float32 is bfloat16, times strong float32 is float32.
    compare(lambda c, w, x: step(c, w, x, change), c, compiled=2, programs=2)


def compare(fn: Any, c: Any, *, compiled: int, programs: int) -> None:
    """Four calls as `jax.jit` makes them."""
    x = np.ones((32, 16), np.float32)
    sharded = rhino.auto_shard(fn, progress=False, donate_argnums=(0, 1))
    single = jax.jit(fn)
    ours, theirs = (
        (jnp.full((16,), 0.5) if c == "full" else c, jnp.eye(16)) for _ in range(2)
    )
    for _ in range(4):
        ours, *results = sharded(*ours, x)
        theirs, *expected = single(*theirs, x)
        for a, b in zip(
            jax.tree.leaves((ours, results)),
            jax.tree.leaves((theirs, expected)),
            strict=True,
        ):
            assert a.dtype == b.dtype and a.weak_type == b.weak_type
            np.testing.assert_allclose(*map(np.float32, (a, b)), rtol=1e-5)
    bounds = list(sharded._bounds.values())
    assert len(bounds) == programs
    jitted = {id(b.executable.jitted): b.executable.jitted for b in bounds}
    assert len(jitted) == compiled
    assert all(j._cache_size() == 1 for j in jitted.values())


def test_stages_whose_weights_come_back_strong_compile_once() -> None:
    def step(ws: Any, x: Any) -> Any:
        def loss(ws: Any) -> Any:
            h = x
            for w in ws:
                h = jnp.tanh(h @ w)
            return jnp.mean(h**2)

        value, grads = jax.value_and_grad(loss)(ws)
        return [w - jnp.float32(0.1) * g for w, g in zip(ws, grads, strict=True)], value

    ws, x = [jnp.full((8, 8), 0.1) for _ in range(2)], np.ones((4, 8), np.float32)
    sharded = rhino.auto_shard(step, mesh={"stage": 2}, microbatches=2, progress=False)
    assert ws[0].weak_type
    ws, _ = sharded(ws, x)
    assert not ws[0].weak_type
    events: list[str] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.block_until_ready(sharded(ws, x))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not [event for event in events if "backend_compile" in event]


def test_a_number_that_stays_is_placed_once_and_another_is_seen() -> None:
    sharded = rhino.auto_shard(lambda x, rate: x / rate, progress=False)
    rates = (2.0, 2.0, 3.0, 0.0, -0.0, 0.0)
    found = [float(np.asarray(sharded(jnp.ones(16), r))[0]) for r in rates]
    np.testing.assert_allclose(found, [0.5, 0.5, 1 / 3, np.inf, -np.inf, np.inf])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (lambda c, x: x * c, lambda c, x: x * c, True),
        (lambda c, x: jax.lax.cond(x[0] > 0, lambda: x * c, lambda: x), None, True),
        (lambda c, x: x * c, lambda c, x: x * (c + 1), False),
        (lambda c, x: x * c * 2.0, lambda c, x: x * c * 3.0, False),
    ],
)
def test_traces_are_compared_by_what_they_compute(
    one: Any, other: Any, same: bool
) -> None:
    x = jax.ShapeDtypeStruct((8,), "float32")
    weak = jax.ShapeDtypeStruct((), "float32", weak_type=True)
    strong = jax.ShapeDtypeStruct((), "float32")
    pair = trace(one, (weak, x), {}), trace(other or one, (strong, x), {})
    assert compute_the_same(*pair) == same
