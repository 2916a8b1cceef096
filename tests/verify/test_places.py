"""Where a plan is compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

import rhino_jax as rhino
from rhino_jax.errors import HardwareError
from rhino_jax.hardware import compile_only
from tests.verify.extras import skipped_without_extra


def step(x: jax.Array) -> jax.Array:
    return jnp.sum(x @ x.T)


SHAPE = jax.ShapeDtypeStruct((512, 512), jnp.float32)


def plan_for(hardware: str, **mesh: int) -> rhino.Plan:
    plan = rhino.plan(step, SHAPE, mesh=mesh, hardware=hardware)
    assert isinstance(plan.mesh, Mesh), "as many CPU devices as the plan has are here"
    return plan


@pytest.mark.compile_only
@pytest.mark.parametrize(
    ("hardware", "kind"),
    [("v5e:2x2", "(tpu)"), ("h100:1x4", "(gpu)")],
)
def test_a_plan_is_compiled_for_its_hardware_whatever_is_here(
    hardware: str, kind: str
) -> None:
    with skipped_without_extra():
        verified = plan_for(hardware, x=4).verify(step, SHAPE)
    assert verified.compiled.compute_s > 0
    assert f"compiled for  {hardware}" in verified.table()
    assert kind in verified.table()


def test_without_its_compiler_nothing_else_is_compiled_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A topology of no other test: devices are made once.
    plan = plan_for("v6e:1x6", x=6)
    monkeypatch.setattr(compile_only, "_find_spec", lambda m: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(HardwareError, match="libtpu is not installed") as info:
        plan.verify(step, SHAPE)
    assert "pip install 'rhino_jax[tpu]'" in info.value.fix
    assert plan.verify(step, SHAPE, compile_for="cpu").ok


def test_plans_for_devices_that_are_here_are_compiled_for_them() -> None:
    verified = plan_for("cpu:8", x=8).verify(step, SHAPE)
    assert "compiled for  cpu" in verified.table() and verified.ok
