"""Notes on arguments that take more memory than they need."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import rhino_jax as rhino


ARRAY = jax.ShapeDtypeStruct


def train(params: Any, moments: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        hidden = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
        return jnp.mean((hidden - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments, value


def notes(rows: int, mesh: Any, donated: tuple[int, ...]) -> list[str]:
    params = {"up": ARRAY((64, 128), "float32"), "down": ARRAY((128, 64), "float32")}
    batch = {name: ARRAY((rows, 64), "float32") for name in "xy"}
    plan = rhino.plan(
        train, params, params, batch, mesh=mesh, progress=False,
        hardware="h100:8", donate_argnums=donated, level="fast", microbatches=1,
        pins={"params*": P(), "moments*": P()},
    )  # fmt: skip
    return [n for n in plan.notes if "donated" in n or "divide" in n]


@pytest.mark.parametrize(
    ("donated", "names", "size"),
    [
        ((), "`params`, `moments` come back and are not", "128 KiB more"),
        ((0,), "`moments` comes back and is not", "64.0 KiB more"),
    ],
)
def test_state_that_is_not_donated_is_named_with_its_bytes(
    donated: tuple[int, ...], names: str, size: str
) -> None:
    found = notes(64, {"x": 8}, donated)
    assert len(found) == 1
    assert names in found[0] and size in found[0]


@pytest.mark.parametrize(
    ("rows", "mesh", "says"),
    [
        (64, {"x": 8}, None),
        (63, {"x": 8}, "63 rows do not divide over x=8: 31.5 KiB"),
        (62, {"a": 4, "b": 2}, "62 rows do not divide over a=4, b=2: 31.0 KiB"),
        (4, {"x": 8}, None),  # there is nothing to pad to
    ],
)
def test_a_batch_that_does_not_divide_is_named_with_its_bytes(
    rows: int, mesh: Any, says: str | None
) -> None:
    found = notes(rows, mesh, (0, 1))
    if says is None:
        assert not found
    else:
        assert len(found) == 1 and says in found[0]
        assert "`batch['x']`, `batch['y']` lie whole" in found[0]
        assert "Pad it to 64 rows" in found[0]


def test_parameters_of_a_forward_pass_are_no_batch() -> None:
    def forward(x: Any, params: Any) -> Any:
        return x @ params["w"] + params["b"]

    params = {"w": ARRAY((64, 1003), "float32"), "b": ARRAY((1003,), "float32")}
    x = ARRAY((64, 64), "float32")
    options = {"mesh": {"x": 8}, "hardware": "h100:8", "progress": False}
    plan = rhino.plan(forward, x, params, **options)
    assert not [n for n in plan.notes if "do not divide" in n]
