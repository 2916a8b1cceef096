"""What an audit may be given, and what it refuses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import rhino_jax as rhino
from tests.verify.audited import (
    MESH,
    audit,
    mlp_args,
    mlp_step,
    moved,
    shape,
)


def test_bare_specs_and_other_devices_need_mesh() -> None:
    def pinned(x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.with_sharding_constraint(x * 2, P("data")))

    x = shape(16, 32, spec=P("data"))
    found = audit(pinned, x, mesh=MESH)
    assert moved(found) == {("all-reduce", ("data",)): 4}
    with jax.set_mesh(MESH):
        assert moved(audit(pinned, x)) == moved(found)
    abstract = AbstractMesh((2, 4), ("data", "model"))
    x = jax.ShapeDtypeStruct(
        (16, 32), "float32", sharding=NamedSharding(abstract, P("data"))
    )
    assert moved(audit(pinned, x, mesh=MESH)) == moved(found)


def test_explicit_axes_are_audited_and_planned_where_that_can_be() -> None:
    kinds = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=kinds)
    w, x = (
        shape(64, 64, spec=P("model"), mesh=mesh),
        shape(32, 64, spec=P("data", "model"), mesh=mesh),
    )

    def summed(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.einsum("bd,df->bf", x, w, out_sharding=P("data")) ** 2)

    with jax.set_mesh(mesh):
        found = audit(summed, w, x)
    assert ("all-reduce", ("model",)) in moved(found)
    assert found.plan is None and any("Auto axes" in note for note in found.notes)
    gathered = audit(
        lambda w, x: jnp.sum((x @ w) ** 2), shape(64, 64, spec=P(), mesh=mesh), x
    )
    assert gathered.plan is not None and gathered.gain is not None


def test_python_scalars_and_keyword_arguments() -> None:
    def scaled(x: jax.Array, rate: float, *, w: Any, twice: bool) -> jax.Array:
        return jnp.sum(x @ w) * rate * (2 if twice else 1)

    found = audit(
        scaled,
        shape(32, 64, spec=P("data")),
        0.1,
        w=shape(64, 64, spec=P()),
        twice=True,
        static_argnames="twice",
    )
    assert ("all-reduce", ("data",)) in moved(found)


def test_without_a_mesh_the_error_says_what_to_pass() -> None:
    with pytest.raises(rhino.MeshError, match="no mesh to audit `mlp_step` on") as e:
        audit(mlp_step, *jax.tree.map(lambda x: shape(*x.shape), mlp_args(*[P()] * 3)))
    assert "NamedSharding" in e.value.fix
    abstract = AbstractMesh((2, 4), ("data", "model"))
    with pytest.raises(rhino.MeshError, match="no devices") as e:
        audit(lambda x: x, shape(8, spec=P("data"), mesh=abstract))  # type: ignore[arg-type]
    assert "compile_target" in e.value.fix


def test_two_meshes_are_refused() -> None:
    other = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    with pytest.raises(rhino.MeshError, match="more than one mesh"):
        audit(
            lambda x, y: x + y,
            shape(8, spec=P("data")),
            shape(8, spec=P("x"), mesh=other),
        )


def test_rhinos_own_functions_are_sent_to_verify() -> None:
    sharded = rhino.auto_shard(mlp_step, mesh=MESH, progress=False)
    with pytest.raises(rhino.RhinoError, match="sharded by rhino") as e:
        audit(sharded, *mlp_args(P(), P(), P("data")))
    assert "verify" in e.value.fix
