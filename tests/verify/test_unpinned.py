"""A function without its user's shardings computes the same, and says none."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from rhino_jax.verify.audit import without_constraints


MESH = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def pin(x: jax.Array, *spec: Any) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def everywhere(w: jax.Array, x: jax.Array, *, names: str) -> dict[str, Any]:
    """Constraints in a scan, under remat, in a branch, in a while and in a jit."""

    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return pin(jnp.tanh(h @ w), "x"), None

    def loss(w: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(jax.checkpoint(layer), x, w)
        h = jax.lax.cond(h.sum() > 0, lambda h: pin(h, None, "y"), lambda h: -h, h)
        _, h = jax.lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, pin(c[1] * 0.5, "y")), (0, h)
        )
        inner = jax.jit(lambda h: h * 2, in_shardings=NamedSharding(MESH, P("x")))
        return jnp.sum(inner(h))

    return {"loss": loss(w), "grad": jax.jacfwd(loss)(w), "names": names}


def test_it_computes_the_same_and_holds_no_sharding() -> None:
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(3, 4, 4)), "float32")
    x = jnp.asarray(rng.normal(size=(8, 4)), "float32")
    free = without_constraints(everywhere)

    def arrays(fn: Any) -> Any:
        def run(w: jax.Array, x: jax.Array) -> list[jax.Array]:
            out = fn(w, x, names="kept")
            assert out.pop("names") == "kept"
            return jax.tree.leaves(out)

        return run

    for a, b in zip(
        jax.jit(arrays(everywhere))(w, x), jax.jit(arrays(free))(w, x), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    pinned = str(jax.make_jaxpr(arrays(everywhere))(w, x))
    without = str(jax.make_jaxpr(arrays(free))(w, x))
    assert pinned.count("sharding_constraint") >= 4 and "in_shardings" in pinned
    assert "sharding_constraint" not in without and "in_shardings" not in without
    # Loops and branches stay what they are.
    for word in ("scan", "cond", "while"):
        assert word in without


def test_shard_map_stays() -> None:
    def summed(x: jax.Array) -> jax.Array:
        body = jax.shard_map(
            lambda x: jax.lax.psum(x, "x"), mesh=MESH, in_specs=P("x"), out_specs=P()
        )
        return body(pin(x, "x"))

    text = str(jax.make_jaxpr(without_constraints(summed))(jnp.ones(8)))
    assert "shard_map" in text and "sharding_constraint" not in text
