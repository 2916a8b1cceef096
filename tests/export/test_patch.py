"""The diff that an audit proposes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.export.constraints import node_at


PROGRAM = """import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P


def by_hand(params, batch):
    h = jax.lax.with_sharding_constraint(batch @ params["up"], P(None, "model"))
    return jnp.mean((jax.nn.relu(h) @ params["down"]) ** 2)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    file = tmp_path / "by_hand.py"
    file.write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("by_hand", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "by_hand", module)
    spec.loader.exec_module(module)
    return module.by_hand


def test_an_audit_changes_the_users_own_constraint(program: Any) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def array(*shape: int, spec: P) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)

    params = {"up": array(64, 128, spec=P()), "down": array(128, 64, spec=P())}
    batch = array(4096, 64, spec=P("data"))
    pins = {"batch": P(("data", "model"))}
    found = rhino.audit(program, params, batch, mesh=mesh, pins=pins, progress=False)
    patch = found.patch()
    (changed,) = (
        line for line in patch.splitlines() if line.startswith("+") and "up" in line
    )
    assert changed.count("with_sharding_constraint(") == 1
    assert 'P(None, "model")' not in changed
    assert 'jax.P(("data", "model"))' in changed
    assert "audit.patch()" in found.table()


def test_spans_count_bytes_as_ast_does(tmp_path: Path) -> None:
    file = tmp_path / "wide.py"
    file.write_text('x = "é" + f(1)\n')
    node = node_at(str(file), (1, 11, 1, 15))
    assert node is not None
