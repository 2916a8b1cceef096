"""Muon on leaves, compiled: as fast as with the stack written by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from tests.passes.stacked import updates
from tests.verify.extras import skipped_without_extra


pytestmark = [pytest.mark.compile_only, pytest.mark.slow]


def by_hand(w: Any, m: Any, x: jax.Array, scale: Any) -> Any:
    """The step of `updates.step_of`, with leaves of one shape stacked and padded."""
    g = jax.grad(updates.loss)(w, x)
    m = jax.tree.map(lambda m, g: 0.9 * m + g, m, g)
    leaves, tree = jax.tree.flatten(w)
    moments, new = jax.tree.leaves(m), [*leaves]
    for shape in sorted({a.shape for a in leaves}):
        at = [i for i, a in enumerate(leaves) if a.shape == shape]
        stack = jnp.stack([moments[i] for i in at])
        stack = jnp.pad(stack, ((0, -len(at) % 8), (0, 0), (0, 0)))
        made = jax.vmap(updates.orthogonalized)(stack)
        for k, i in enumerate(at):
            new[i] = leaves[i] - 0.1 * scale * made[k]
    return jax.tree.unflatten(tree, new), m


@pytest.mark.parametrize("hardware", ["h100:8", "v5e:2x4"])
def test_as_fast_as_by_hand(hardware: str) -> None:
    S = jax.ShapeDtypeStruct
    w = jax.tree.map(
        lambda a: S((*(256 * n for n in a.shape),), jnp.bfloat16),
        updates.weights(4, 4, 8),
    )
    args = w, w, S((16384, 1024), jnp.bfloat16), S((), jnp.bfloat16)
    steps = {"leaves": updates.step_of(updates.orthogonalized), "by hand": by_hand}
    found = {}
    for name, step in steps.items():
        plan = rhino.plan(step, *args, hardware=hardware, donate_argnums=(0, 1))
        with skipped_without_extra():
            verified = plan.verify(step, *args, compile_for=hardware)
        assert verified.ok, verified.table()
        found[name] = verified.compiled.step_time_s
        print(f"\n{name}: {1e3 * found[name]:.3g} ms", plan.variants)
    assert found["leaves"] <= 1.05 * found["by hand"]
