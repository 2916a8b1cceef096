"""Emulated devices: threads enough for what waits inside of XLA:CPU, and a watchdog."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from rhino_jax.hardware.emulated import THREADS_PER_DEVICE, Watchdog


@pytest.mark.skipif(
    bool({"PJRT_NPROC", "NPROC"} & {*os.environ}), reason="the pool's size was chosen"
)
def test_the_pool_has_more_threads_than_devices() -> None:
    count = len(jax.devices())
    names = [p.read_text().strip() for p in Path("/proc/self/task").glob("*/comm")]
    assert names.count("tf_XLAEigen") == THREADS_PER_DEVICE * count


def test_a_call_that_uses_no_cpu_time_is_reported_once() -> None:
    told: list[str] = []
    watchdog = Watchdog(after_s=0.1, report=told.append)
    with watchdog.watching(lambda: "`step`"):
        time.sleep(0.7)
    assert len(told) == 1
    assert told[0].startswith("RhinoWarning: `step` makes no progress")
    assert "PJRT_NPROC=" in told[0]


def test_a_call_that_works_is_not_reported() -> None:
    told: list[str] = []
    watchdog = Watchdog(after_s=0.1, report=told.append)
    with watchdog.watching(lambda: "`step`"):
        until = time.monotonic() + 0.7
        while time.monotonic() < until:
            pass
    time.sleep(0.3)  # nothing is called
    assert told == []


ENERGY = """
import jax, jax.numpy as jnp, numpy as np, sys
import rhino_jax as rhino

def log_psi(p, x):
    _, log = jnp.linalg.slogdet(jnp.tanh(x @ p["a"]) @ p["b"])
    return log - (x**2).sum()

def energy(p, x):
    flat = x.reshape(-1)
    grad = jax.grad(lambda y: log_psi(p, y.reshape(6, 3)))
    return -0.5 * (jnp.trace(jax.jacfwd(grad)(flat)) + (grad(flat) ** 2).sum())

def step(p, x):
    e = jax.lax.stop_gradient(jax.vmap(lambda x: energy(p, x))(x))
    log = jax.vmap(log_psi, (None, 0))
    g = jax.grad(lambda p: jnp.mean((e - e.mean()) * log(p, x)))(p)
    return jax.tree.map(lambda p, g: p - 0.01 * g, p, g), e.mean(), e.var()

rng = np.random.default_rng(0)
p = {"a": rng.normal(size=(3, 24)), "b": rng.normal(size=(24, 6))}
p = jax.tree.map(jnp.float32, p)
x = rng.normal(size=(64, 6, 3)).astype(np.float32)
run = rhino.auto_shard(step, hardware=sys.argv[1], progress=False)
for _ in range(3):
    jax.block_until_ready(run(p, x))
"""
CHEAP_LINKS = """
name = "cpu"
device_kinds = ["cpu"]
matmul_efficiency = 1.0
memory_efficiency = 1.0
launch_s = 1e-12
[peak_flops_per_s]
float32 = 2.5e6
[memory]
hbm_bytes = 17_179_869_184
hbm_bytes_per_s = 1e7
[[tiers]]
name = "shared_memory"
topology = "barrier"
alpha_s = 1e-12
bytes_per_s = 1e12
"""


@pytest.mark.slow
def test_batched_solves_after_collectives_return(tmp_path: Path) -> None:
    file = tmp_path / "cpu.toml"
    file.write_text(CHEAP_LINKS)
    # With as many threads as devices, this waited for ever.
    environment = {
        k: v for k, v in os.environ.items() if k not in ("PJRT_NPROC", "NPROC")
    }
    subprocess.run(
        [sys.executable, "-c", ENERGY, str(file)],
        env=environment, timeout=120, check=True,
    )  # fmt: skip
