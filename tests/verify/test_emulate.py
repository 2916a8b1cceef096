"""Compiling for more CPU devices than this process has."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.errors import MeshError
from rhino_jax.models import registry
from rhino_jax.verify import places
from rhino_jax.verify.compile import compile_lowered
from rhino_jax.verify.places import MAX_DEVICES, emulated_devices, emulated_mesh
from tests.cases import covering


def lower(mesh: Mesh) -> jax.stages.Lowered:
    """A step over axes x and y with donation and most kinds of collectives."""
    x, y = mesh.axis_sizes

    def step(w: jax.Array, data: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(w: jax.Array) -> jax.Array:
            def layer(c: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
                c = jnp.tanh(c @ w)
                c = jax.lax.with_sharding_constraint(c, NamedSharding(mesh, P("x")))
                return c, jnp.max(c)

            out, most = jax.lax.scan(layer, data, None, length=4)
            turned = jax.lax.with_sharding_constraint(
                out.T, NamedSharding(mesh, P("x", "y"))
            )
            return jnp.sum(turned[:, ::2]) + jnp.sum(most)

        value, grad = jax.value_and_grad(loss)(w)
        return w - grad, value

    w = jax.ShapeDtypeStruct(
        (8 * x, 8 * x), jnp.float32, sharding=NamedSharding(mesh, P(None, "y"))
    )
    data = jax.ShapeDtypeStruct(
        (4 * x * y, 8 * x), jnp.float32, sharding=NamedSharding(mesh, P("x", "y"))
    )
    return jax.jit(step, donate_argnums=0).lower(w, data)


def account(mesh: Mesh) -> dict[str, Any]:
    """What there is to say about the compiled step."""
    found = compile_lowered(lower(mesh), mesh=mesh)
    assert found.memory is not None
    memory = {name: getattr(found.memory, name) for name in found.memory.__slots__}
    # Of the text, tables of stack frames say who called.
    tables, frames = r"\nFileNames\n.*?\n\n(?=%|ENTRY)", r" stack_frame_id=\d+"
    text = re.sub(f"{tables}|{frames}", "", found.hlo_text, flags=re.DOTALL)
    assert len(text) > 0.8 * len(found.hlo_text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"memory": memory, "hlo": digest, "messages": len(found.messages)}


_ACCOUNT = """
import json, sys
import jax
from rhino_jax.verify.places import emulated_mesh
from tests.verify.test_emulate import account

x, y, own = map(int, sys.argv[1:])
assert len(jax.devices()) == own
print(json.dumps(account(emulated_mesh({"x": x, "y": y}))))
"""


def _account_of_process(x: int, y: int) -> dict[str, Any]:
    """Return the account of a process that has x·y devices of its own."""
    own = x * y
    count = "--xla_force_host_platform_device_count"
    flags = re.sub(rf"{count}=\d+", f"{count}={own}", os.environ["XLA_FLAGS"])
    done = subprocess.run(
        [sys.executable, "-c", _ACCOUNT, str(x), str(y), str(own)],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout))


# 24 devices are some of a client's 32.
@pytest.mark.parametrize(
    ("x", "y"), covering([(6, 4), (4, 4), (16, 4), (16, 16), (32, 16)])
)
def test_programs_are_those_of_a_process_with_as_many_devices(x: int, y: int) -> None:
    assert len(jax.devices()) == 8
    assert account(emulated_mesh({"x": x, "y": y})) == _account_of_process(x, y)


def test_the_step_has_what_is_to_be_compared() -> None:
    mesh = emulated_mesh({"x": 4, "y": 4})
    text = compile_lowered(lower(mesh), mesh=mesh).hlo_text
    for what in ("all-reduce(", "all-gather(", "input_output_alias", "while("):
        assert what in text
    assert "num_partitions=16" in text


def test_the_process_keeps_its_own_devices() -> None:
    before = jax.devices()
    mesh = emulated_mesh({"x": 64})
    assert mesh.axis_types == (AxisType.Auto,) and mesh.size == 64
    assert jax.devices() == before
    assert set(mesh.devices.flat).isdisjoint(before)
    assert float(jnp.sum(jnp.ones(3))) == 3.0


def test_own_devices_are_used_where_they_are_enough() -> None:
    mesh = emulated_mesh({"data": 2, "model": 4})
    assert list(mesh.devices.flat) == jax.devices("cpu")[:8]
    assert emulated_mesh([("x", 4)]).devices.tolist() == jax.devices("cpu")[:4]


def test_meshes_are_the_same_every_time() -> None:
    # Caches of JAX's and of ours are keyed by meshes.
    assert emulated_mesh({"x": 12}) == emulated_mesh({"x": 12})
    assert emulated_devices(9) == emulated_devices(16)[:9]


def test_a_planned_function_compiles_for_an_emulated_mesh() -> None:
    mesh = emulated_mesh({"data": 8, "model": 4})
    work = registry.get("mlp-tiny")
    step = rhino.auto_shard(
        work.step, mesh=mesh, donate_argnums=work.donate_argnums, progress=False
    )
    found = compile_lowered(step.lower(*work.abstract_args()), mesh=mesh)
    assert "num_partitions=32" in found.hlo_text


def test_the_most_devices_compile() -> None:
    mesh = emulated_mesh({"x": MAX_DEVICES})
    x = jax.ShapeDtypeStruct(
        (MAX_DEVICES, 2), jnp.float32, sharding=NamedSharding(mesh, P("x"))
    )
    found = compile_lowered(jax.jit(jnp.sum).lower(x), mesh=mesh)
    assert "all-reduce(" in found.hlo_text
    assert f"num_partitions={MAX_DEVICES}" in found.hlo_text


def test_more_devices_are_refused() -> None:
    with pytest.raises(MeshError, match="more devices than XLA:CPU") as info:
        emulated_mesh({"x": MAX_DEVICES, "y": 2})
    assert f"4096 devices, at most {MAX_DEVICES}" in info.value.numbers
    assert "compile_for=" in info.value.fix


def test_too_few_threads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_thread_room", lambda: 500)
    # A size that no other test makes.
    with pytest.raises(MeshError, match="not start enough threads") as info:
        emulated_mesh({"x": 1024})
    assert "1024 devices" in info.value.numbers and "500" in info.value.numbers
    assert info.value.fix


def test_there_is_room_for_threads_here() -> None:
    assert 0 < places._thread_room() < 2**31
