"""`python -m rhino_jax demo`: plan, read, train, compare; then a plan for 256 chips.

First a small GPT is planned for eight emulated CPU devices, with the mesh left to
rhino, and trained on the sources of Python's standard library, sharded and on one
device side by side. Then a 7B GPT is planned for 256 TPU chips from shapes alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import rhino_jax as rhino
from rhino_jax.errors import MeshError
from rhino_jax.models import registry, text
from rhino_jax.models.workload import Workload
from rhino_jax.units import format_seconds


NUM_DEVICES = 8
SMALL, LARGE = "gpt-demo", "gpt-7b"
LARGE_HARDWARE, LARGE_MESH = "v5e:16x16", {"x": 16, "y": 16}
ROWS = 10


def run(*, steps: int = 30) -> None:
    """Run the demo, printing as it goes.

    Args:
      steps: training steps; a minute or so for 30 on two cores.
    Raises:
      MeshError: JAX's devices were set up before, and are not eight.
    """
    emulate(NUM_DEVICES, "demo")
    _train_small(steps)
    _plan_large()


def emulate(num_devices: int, command: str) -> None:
    """Emulate several devices on the CPU.

    Args:
      num_devices: number of devices.
      command: name of the command, for the error.

    Raises:
      MeshError: JAX has already set up its devices, with another number.
    """
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:
        # Too late to change; fine if there are as many as requested.
        pass
    found = len(jax.devices("cpu"))
    if found != num_devices:
        raise MeshError(
            f"`{command}`: JAX's devices are already set up.",
            numbers=f"got {found} CPU devices, expected {num_devices}",
            fix=f"run python -m rhino_jax {command} in a process of its own, with no"
            " --xla_force_host_platform_device_count in XLA_FLAGS.",
        )


def _train_small(steps: int) -> None:
    workload = registry.get(SMALL)
    params = workload.num_params()
    say(
        f"1. Plan a train step of {SMALL} ({params / 1e6:.1f} million parameters) for"
        f" {NUM_DEVICES} emulated devices; the mesh is rhino's choice."
    )
    sharded_step = rhino.auto_shard(
        workload.step, donate_argnums=workload.donate_argnums
    )
    plan = sharded_step.plan(*workload.abstract_args())
    print(plan.table())

    say(f"2. Train it for {steps} steps, sharded and on one device side by side.")
    data = _batches(workload)
    state = workload.init(jax.random.key(0))
    single_state = workload.init(jax.random.key(0))
    single_step = jax.jit(workload.step, donate_argnums=workload.donate_argnums)
    worst, worst_since_row = 0.0, 0.0
    print(f"{'step':>6}{'sharded':>12}{'one device':>14}{'difference':>14}")
    for step in range(1, steps + 1):
        batch = next(data)
        *state, loss = sharded_step(*state, batch)
        *single_state, single_loss = single_step(*single_state, batch)
        difference = abs(float(loss) - float(single_loss))
        worst = max(worst, difference)
        worst_since_row = max(worst_since_row, difference)
        if step == 1 or step == steps or step % max(1, steps // ROWS) == 0:
            print(
                f"{step:>6}{float(loss):>12.5f}{float(single_loss):>14.5f}"
                f"{worst_since_row:>14.1e}",
                flush=True,
            )
            worst_since_row = 0.0
    print(f"\nlargest difference of the losses over {steps} steps: {worst:.1e}")


def _batches(workload: Workload) -> Iterator[dict[str, np.ndarray]]:
    config: Any = workload.config
    return text.batches(text.stdlib_bytes(), config.batch, config.seq_len)


def _plan_large() -> None:
    workload = registry.get(LARGE)
    say(
        f"3. Plan {LARGE} ({workload.num_params() / 1e9:.1f} billion parameters) for"
        f" 256 TPU chips ({LARGE_HARDWARE}), from shapes alone."
    )
    start_s = time.monotonic()
    plan = rhino.plan(
        workload.step,
        *workload.abstract_args(),
        mesh=LARGE_MESH,
        hardware=LARGE_HARDWARE,
        donate_argnums=workload.donate_argnums,
    )
    took = format_seconds(time.monotonic() - start_s)
    print(plan.table())
    print(f"\ntraced and planned in {took}. {plan}")


def say(words: str) -> None:
    print(f"\n{words}\n", flush=True)
