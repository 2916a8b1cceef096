"""Where rhino cuts small programs, beside plans of all cuts there are."""

from __future__ import annotations

import inspect
import itertools

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.errors import PinError, StageError


BATCH = 131072


def row(params, x):
    """Layers one after another, of unequal widths."""
    h = jnp.tanh(x @ params[0])
    h = jnp.tanh(h @ params[1])
    h = jnp.tanh(h @ params[2])
    h = jnp.tanh(h @ params[3])
    h = jnp.tanh(h @ params[4])
    return jnp.mean((h @ params[5]) ** 2)


def skips(params, x):
    """Down and up again, as a U-Net: what the first layers make is read by the last."""
    a = jnp.tanh(x @ params[0])
    b = jnp.tanh(a @ params[1])
    c = jnp.tanh(b @ params[2])
    d = jnp.tanh(c @ params[3]) + b
    e = jnp.tanh(d @ params[4]) + a
    return jnp.mean((e @ params[5]) ** 2)


def towers(params, x):
    """Two that meet at the end, either of which may come first."""
    a = jnp.tanh(x @ params[0])
    a = jnp.tanh(a @ params[1])
    b = jnp.tanh(x @ params[2])
    b = jnp.tanh(b @ params[3])
    c = jnp.concatenate([a, b], axis=1)
    return jnp.mean((c @ params[4]) ** 2)


CASES = {
    row: [(256, 2048), (2048, 512), (512, 512), (512, 1024), (1024, 512), (512, 64)],
    skips: [(256, 1024), (1024, 512), (512, 256), (256, 512), (512, 1024), (1024, 64)],
    towers: [(256, 1024), (1024, 1024), (256, 512), (512, 512), (1536, 256)],
}
"""Loss → shapes of its weights."""


def planned(loss, **options):
    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return [p - 0.01 * g for p, g in zip(params, grads, strict=True)], value

    params = [jax.ShapeDtypeStruct(s, "float32") for s in CASES[loss]]
    x = jax.ShapeDtypeStruct((BATCH, 256), "float32")
    return rhino.plan(
        step,
        params,
        x,
        mesh={"stage": 2},
        hardware="h100:2",
        microbatches=8,
        schedule="1f1b",
        donate_argnums=(0,),
        progress=False,
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("loss", CASES, ids=lambda loss: loss.__name__)
def test_no_cut_is_faster(loss):
    """Layers pinned in all ways that their order allows. A cut within a layer, as
    between a product and what follows, may be faster than all of these."""
    first = inspect.getsourcelines(loss)[1]
    count = len(CASES[loss])
    text = inspect.getsource(loss).splitlines()
    lines = [n for n, line in enumerate(text) if "@" in line]
    assert len(lines) == count
    seconds = {}
    for stages in itertools.product(range(2), repeat=count):
        pins = {
            f"test_every_cut.py:{first + n}": stage
            for n, stage in zip(lines, stages, strict=True)
        }
        try:
            seconds[stages] = planned(loss, pins=pins).predicted.step_time_s
        except (PinError, StageError):
            continue
    best = min(seconds, key=seconds.get)
    found = planned(loss).predicted.step_time_s
    print(f"{loss.__name__}: {found / seconds[best]:.3f} of the best of {len(seconds)}")
    assert len(seconds) >= count - 1
    # Stages are chosen by costs of their parts, before each is planned as a program:
    # 1.012 of the best with skips, 1.003 in a row.
    assert found <= 1.015 * seconds[best]
