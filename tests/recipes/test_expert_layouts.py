"""Recipes of mixtures of experts, as MaxText lays them out: batch over all axes, each
expert on one device of the expert axes, all other weights FSDP."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import rhino_jax as rhino


S, TOKENS, WIDTH, HIDDEN, EXPERTS, CHOICES = jax.ShapeDtypeStruct, 2048, 64, 32, 8, 2


def axes_of(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def gathers_of(plan: Any, *weights: str) -> list[Any]:
    starts = tuple(f"gathers p['{name}']" for name in weights)
    gathers = [c for c in plan.collectives if c.kind == "all-gather"]
    return [c for c in gathers if c.reason.startswith(starts)]


def shapes(*names: str) -> dict[str, Any]:
    every = {
        "dense": (WIDTH, WIDTH),
        "router": (WIDTH, EXPERTS),
        "up": (EXPERTS, WIDTH, HIDDEN),
        "down": (EXPERTS, HIDDEN, WIDTH),
    }
    return {k: S(every[k], jnp.float32) for k in names or every}


def ragged(p: Any, x: Any) -> Any:
    """Tokens are sorted by expert, and none is dropped."""
    rows = x.reshape(-1, WIDTH)
    weights, chosen = lax.top_k(jax.nn.softmax(rows @ p["router"]), CHOICES)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS)
    y = jax.nn.silu(lax.ragged_dot(rows[order // CHOICES], p["up"], sizes))
    y = lax.ragged_dot(y, p["down"], sizes) * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(rows).at[order // CHOICES].add(y).reshape(x.shape)


def dispatched(p: Any, x: Any) -> Any:
    """Experts have a capacity, and tokens are sent by one-hot products."""
    gates = jax.nn.softmax(x @ p["router"])
    mask = jax.nn.one_hot(gates.argmax(-1), EXPERTS)
    slot = (jnp.cumsum(mask, axis=1) * mask).sum(-1).astype(jnp.int32) - 1
    sent = mask[..., None] * jax.nn.one_hot(slot, 16)[..., None, :]
    rows = jnp.einsum("bsec,bsd->ebcd", sent, x)
    y = jnp.einsum("ebcd,edf->ebcf", rows, p["up"])
    y = jnp.einsum("ebcf,efd->ebcd", jax.nn.silu(y), p["down"])
    return jnp.einsum("bsec,ebcd->bsd", sent * gates[..., None], y)


def heads(p: Any, x: Any) -> Any:
    """Heads with matrices of their own, which only weights contract."""
    q = jnp.einsum("bsd,edf->besf", x, p["up"])
    q = jnp.einsum("besf,efd->besd", q, p["down"])
    scores = jax.nn.softmax(jnp.einsum("besd,btd->best", q, x))
    mixed = jnp.einsum("best,btd->bsed", scores, x)
    absorbed = jnp.einsum("bsed,edf->bsef", mixed, p["up"])
    return jnp.einsum("bsef,efd->bsd", absorbed, p["down"])


@cache
def planned(layer: Any, *sizes: int) -> Any:
    def step(p: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            y = x + jnp.tanh(x @ p["dense"]) if "dense" in p else x
            return jnp.mean(jnp.square(y + layer(p, y)))

        value, grads = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda a, b: a - 0.1 * b, p, grads), value

    args = shapes(), S((16, TOKENS // 16, WIDTH), jnp.float32)
    if layer is heads:
        args = shapes("up", "down"), args[1]
    mesh = dict(zip("xyz", sizes, strict=False))
    options: Any = {"hardware": "v5e:2x4", "level": "fast", "progress": False}
    return rhino.plan(step, *args, mesh=mesh, **options)


@pytest.mark.parametrize("layer", [ragged, dispatched])
@pytest.mark.parametrize(
    ("name", "sizes", "axes"),
    [
        ("experts", (8,), ("x",)),
        pytest.param("experts", (2, 4), ("x", "y"), marks=pytest.mark.slow),
        ("fsdp+experts", (2, 4), ("y",)),
        ("megatron+experts", (2, 4), ("x",)),
        pytest.param("fsdp+experts", (2, 2, 2), ("y", "z"), marks=pytest.mark.slow),
    ],
)
def test_experts_are_sharded_over_their_axes(
    layer: Any, name: str, sizes: tuple[int, ...], axes: tuple[str, ...]
) -> None:
    recipe = planned(layer, *sizes).recipe(name)
    params, data = recipe.in_specs
    assert all(set(axes) <= {*axes_of(params[k][0])} for k in ("up", "down"))
    model = sizes[-1:] if name.startswith("megatron") else ()
    batch = "xyz"[: len(sizes) - len(model)]
    assert {*axes_of(data[0])} == {*batch}
    gathered = {a for c in gathers_of(recipe, "up", "down") for a in c.axes}
    assert not gathered & {*axes}


def test_programs_without_experts_have_no_such_recipe() -> None:
    plan = planned(heads, 2, 4)
    assert not [name for name in plan.recipes if "experts" in name]
    with pytest.raises(rhino.RhinoError, match="nothing that 'experts' could shard"):
        plan.recipe("experts")
    assert "fsdp+experts" not in planned(ragged, 8).recipes
