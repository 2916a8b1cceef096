"""Processes that are left once another is lost end soon, with their own status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.processes.pool import free_port


pytestmark = [pytest.mark.processes, pytest.mark.slow]

LEFT = """
import os, signal, sys
import jax
i, port, kind = int(sys.argv[1]), *sys.argv[2:]
jax.distributed.initialize(f"localhost:{port}", 3, i)
import jax.numpy as jnp, numpy as np
import rhino_jax as rhino

def step(p, x):
    def loss(p):
        y = x
        for w in p:
            y = y + jnp.tanh(y @ w)
        return jnp.mean(y * y)
    value, g = jax.value_and_grad(loss)(p)
    return jax.tree.map(lambda a, b: a - 0.1 * b, p, g), value

p, x = [0.1 * np.eye(8, dtype=np.float32)] * 3, np.ones((24, 8), np.float32)
asked = {"stages": 3, "microbatches": 4}
if kind != "stages":
    mesh = jax.make_mesh((3,), ("d",))
    asked = {"mesh": mesh, "pins": {"x": jax.P("d")}}
run = rhino.auto_shard(step, progress=False, **asked)
try:
    for k in range(3):
        if i == 2 and k == 1:
            if kind == "raises":
                raise ValueError("of its own")
            os.kill(os.getpid(), signal.SIGKILL)
        p, loss = run(p, x)
        float(loss)
except rhino.ProcessError as error:
    if i == 0:
        sys.exit(3)
    raise
"""


@pytest.mark.parametrize("kind", ["stages", "one program", "raises"])
def test_they_do_not_wait_for_it_at_exit(kind: str) -> None:
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        "RHINO_LOST_AFTER_S": "3",
    }
    port = str(free_port())
    running = [
        subprocess.Popen(
            [sys.executable, "-c", LEFT, str(i), port, kind],
            env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for i in range(3)
    ]  # fmt: skip
    try:
        status = running[2].wait(timeout=200)
        assert status == (1 if kind == "raises" else -signal.SIGKILL)
        since = time.monotonic()
        statuses = [p.wait(timeout=60) for p in running[:2]]
        # JAX's own end takes 64 to 100 s, and is SIGABRT.
        assert time.monotonic() - since < 10
        assert statuses == [3, 1]
        assert "process 2 is lost" in running[1].communicate()[1]
    finally:
        for process in running:
            process.kill()
            process.communicate()
