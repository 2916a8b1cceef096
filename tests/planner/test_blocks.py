"""Fused weights in blocks: planned where it pays, and the same numbers on a mesh."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.ir.transform import stored_in_blocks
from tests.passes.interleaved.fused import (
    OPTIMIZERS,
    Shape,
    args_of,
    random_params,
    random_tokens,
    train_step_of,
)
from tests.runtime.stand_in import assert_close


ROWS, LENGTH = 8, 32
SHAPES = {
    "split": Shape(width=128, wide=256),
    "reshape": Shape("reshape", width=128, wide=256),
    "grouped": Shape("grouped", kv_heads=4, width=128, wide=256),
    "scanned": Shape(width=128, wide=256, layers=2, is_scanned=True),
}
UPDATES = {**OPTIMIZERS, "momentum": lambda: optax.sgd(1e-2, momentum=0.9)}


def sharded(shape: Shape, optimizer: Any, **said: Any) -> Any:
    said = {
        "storage": "blocks",
        "mesh": jax.make_mesh((2, 4), ("data", "model")),
    } | said
    return rhino.auto_shard(
        train_step_of(shape, optimizer),
        **said,
        donate_argnums=(0, 1),
        microbatches=1,
        level="fast",
        progress=False,
    )


def check_counts(plan: rhino.Plan) -> None:
    """Check that blocks are as many as some axes of the mesh have devices."""
    counts = {
        blocks.count
        for dims in stored_in_blocks(plan.transforms).values()
        for _, blocks in dims
    }
    assert counts and counts <= {2, 4, 8}  # Which, is a matter of cost.


# In the short run: tests/runtime/test_storage.py.
@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_fused_weights_are_stored_in_blocks(shape: str) -> None:
    model, update = SHAPES[shape], optax.sgd(0.01)
    plan = sharded(model, update).plan(*args_of(model, update, ROWS, LENGTH))
    check_counts(plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "optimizer"),
    [
        ("reshape", "momentum"),
        ("split", "clipped adamw"),
        ("grouped", "adafactor"),
        ("scanned", "clipped adamw"),
    ],
)
def test_three_steps_are_those_of_one_device(shape: str, optimizer: str) -> None:
    model, update = SHAPES[shape], UPDATES[optimizer]()
    step = sharded(model, update)
    plan = step.plan(*args_of(model, update, ROWS, LENGTH))
    check_counts(plan)
    params = jax.jit(random_params, static_argnums=0)(model)
    state, tokens = jax.jit(update.init)(params), random_tokens(model, ROWS, LENGTH)
    placed = plan.put((params, state))
    one = jax.jit(train_step_of(model, update))
    for _ in range(3):
        params, state, loss = one(params, state, tokens)
        *placed, loss_here = step(*placed, tokens)
        np.testing.assert_allclose(loss_here, loss, rtol=1e-4)
    assert_close(plan.as_written(placed[0]), params, rtol=1e-3, atol=1e-4)


def test_what_would_gain_nothing_stays_as_written() -> None:
    update = OPTIMIZERS["adamw"]()
    model = Shape(width=16, wide=16, heads=8, head=2, kv_heads=8)
    batch_alone = {"tokens": P("data")}
    mesh = jax.make_mesh((8,), ("data",))
    step = sharded(model, update, mesh=mesh, pins=batch_alone)
    plan = step.plan(*args_of(model, update, 256, 64))
    assert not stored_in_blocks(plan.transforms)
    as_written = sharded(
        model, update, mesh=mesh, pins=batch_alone, storage="as written"
    ).plan(*args_of(model, update, 256, 64))
    assert plan.in_specs == as_written.in_specs


@pytest.mark.slow
def test_activations_do_not_change_places() -> None:
    """Of a layout held fixed, as compiled for the devices here."""
    update, sent = optax.sgd(0.01), {}
    names = {"qkv": 1, "bias": 0, "up": 1}
    for how, storage in (
        ("apart", "as written"),
        ("split", "blocks"),
        ("split", "as written"),
    ):
        model = Shape(how, width=128, wide=256, held=P("data", None, None))
        pins = {
            f"*['{name}']": P(*[None] * (dim + (how == "apart")), "model")
            for name, dim in names.items()
        }
        pins |= {"*['out']": P("model"), "*['down']": P("model"), "tokens": P("data")}
        step = sharded(model, update, pins=pins, storage=storage)
        args = args_of(model, update, ROWS, LENGTH)
        seen = step.plan(*args).verify(step, *args)
        moved = Counter[str]()
        for c in seen.collectives:
            moved[c.kind] += c.bytes
        sent[how, storage] = moved["all-to-all"] + moved["collective-permute"]
        sent[how, storage, "all"] = moved.total()
    assert sent["split", "blocks"] <= sent["apart", "as written"]
    assert sent["split", "blocks", "all"] < 1.05 * sent["apart", "as written", "all"]
    assert sent["split", "as written", "all"] > 1.1 * sent["split", "blocks", "all"]
