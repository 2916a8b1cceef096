"""Programs that their user sharded by hand, audited quietly."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.verify.results.audit import Audit


MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
DIM, HIDDEN, BATCH = 512, 2048, 64
F32 = 4


def shape(*dims: int, spec: P | None = None, mesh: Mesh = MESH) -> Any:
    sharding = None if spec is None else NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(dims, "float32", sharding=sharding)


def pin(x: jax.Array, *spec: Any) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def mlp_step(params: Any, batch: Any) -> Any:
    def loss(p: Any) -> jax.Array:
        h = jax.nn.relu(batch["x"] @ p["w1"])
        return jnp.mean((h @ p["w2"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def mlp_args(w1: P, w2: P, batch: P) -> tuple[Any, Any]:
    params = {"w1": shape(DIM, HIDDEN, spec=w1), "w2": shape(HIDDEN, DIM, spec=w2)}
    data = {"x": shape(BATCH, DIM, spec=batch), "y": shape(BATCH, DIM, spec=batch)}
    return params, data


def audit(fn: Any, *args: Any, **options: Any) -> Audit:
    return rhino.audit(fn, *args, progress=False, **options)


def moved(found: Audit) -> dict[tuple[str, tuple[str, ...]], int]:
    sums: dict[tuple[str, tuple[str, ...]], int] = {}
    for c in found.collectives:
        sums[c.kind, c.axes] = sums.get((c.kind, c.axes), 0) + c.bytes
    return sums
