"""Exported code makes the mesh of the plan, without rhino."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

import rhino_jax as rhino
from rhino_jax.export.meshes import mesh_source
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.layout import mesh_shapes
from rhino_jax.hardware.ordering import device_mesh
from tests.hardware.test_ordering import TOPOLOGIES, torus_devices


def _plan(**options: Any) -> Any:
    return rhino.plan(lambda x: jnp.tanh(x @ x.T), jnp.ones((64, 64)), **options)


_AXES = "from jax.sharding import AxisType, Mesh\n"


@pytest.fixture(scope="module")
def small() -> Any:
    return _plan(mesh={"x": 2, "y": 4})


def _made(code: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The devices of an exported module's mesh, which may be objects."""
    monkeypatch.setattr(jax.sharding, "Mesh", lambda devices, *_, **__: devices)
    found: dict[str, Any] = {}
    exec(compile(code, "plan_code.py", "exec"), found)
    return found["mesh"]


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_mesh_of_every_shape_on_a_torus(
    name: str, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = torus_devices(name)
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    create = mesh_utils.create_device_mesh
    given = functools.partial(create, devices=devices)
    splits = devices[0].device_kind in ("TPU v5 lite", "TPU v5e")

    def made_by_jax(sizes: Any, names: Any, axis_types: Any) -> Any:
        # `jax.make_mesh`, which asks for real devices only to make a `Mesh` of them.
        return create(sizes, devices, allow_split_physical_axes=splits)

    monkeypatch.setattr(jax, "make_mesh", made_by_jax)
    for shape in mesh_shapes(load_target(name), len(devices)):
        for first in ("x", "stage"):
            axes = tuple(zip((first, "y", "z"), shape, strict=False))
            plan = dataclasses.replace(small, mesh_axes=axes, hardware=name, mesh=None)
            code = "".join(("import jax\n", _AXES, *mesh_source(plan, "Auto")))
            with monkeypatch.context() as patch:
                patch.setattr(mesh_utils, "create_device_mesh", given)
                made = _made(code, patch)
            wanted = device_mesh(shape, devices, is_staged=first == "stage")
            assert (made == wanted).all(), axes


@pytest.mark.parametrize("order", ["reversed", "the last four", "usual"])
def test_the_mesh_that_the_user_gives(order: str) -> None:
    devices = np.array(jax.devices()[:8])
    chosen = {"reversed": devices[::-1], "the last four": devices[4:]}
    own = chosen.get(order, devices).reshape(2, -1)
    kinds = (AxisType.Auto,) * 2
    plan = _plan(mesh=Mesh(own, ("data", "model"), axis_types=kinds))
    for style in ("specs", "explicit"):
        code = plan.code(style)
        assert ("jax.make_mesh" in code) == (order == "usual")
        found: dict[str, Any] = {}
        exec(compile(code, "plan_code.py", "exec"), found)
        assert (found["mesh"].devices == own).all()
        if style == "explicit":
            assert (found["inside"].devices == own).all()
