"""`python -m rhino_jax demo`: plan, read, train, compare; then a plan for 256 chips.

First a small GPT is planned for eight emulated CPU devices, with the mesh left to
rhino, and trained on the sources of Python's standard library, sharded and on one
device side by side. Then a 7B GPT is planned for 256 TPU chips from shapes alone.
`--stages 2` trains a U-Net in stages instead.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

import rhino_jax as rhino
from rhino_jax.errors import MeshError, StageError
from rhino_jax.models import registry, text
from rhino_jax.units import format_seconds


NUM_DEVICES = 8
SMALL, LARGE, IN_STAGES = "gpt-demo", "gpt-7b", "unet-tiny"
LARGE_HARDWARE, LARGE_MESH = "v5e:16x16", {"x": 16, "y": 16}
ROWS = 10
JITTER = 0.05
"""Standard deviation of the logarithm of every task's duration; transfers have twice
that. An example to show the cost of noise; not measured."""


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


def run_stages(*, stages: int, steps: int) -> None:
    """Run the demo of stages, printing as it goes.

    Eight emulated CPU devices stand for two hosts of four. The skip connections of a
    U-Net cross the stage cut, which its code does not specify. Its timeline is printed
    as planned, and with noise; then it trains, next to a run on one device.

    Args:
      stages: number of submeshes of the eight devices.
      steps: training steps, each also run on one device.

    Raises:
      MeshError: JAX's devices were set up before, and are not eight.
      StageError: eight devices cannot be divided into that many submeshes.
    """
    emulate(NUM_DEVICES, "demo")
    if NUM_DEVICES % stages:
        raise StageError(
            f"{NUM_DEVICES} emulated devices do not make {stages} equal stages.",
            where="`demo --stages`",
            numbers=f"{NUM_DEVICES} devices",
            fix="take 2, 4 or 8 stages.",
        )
    workload = registry.get(IN_STAGES, optimizer="sgd")
    say(
        f"1. Plan a train step of {IN_STAGES} ({workload.num_params() / 1e6:.1f}"
        f" million parameters) in {stages} stages, each on {NUM_DEVICES // stages} of"
        f" {NUM_DEVICES} emulated devices."
    )
    step = rhino.auto_shard(
        workload.step,
        donate_argnums=workload.donate_argnums,
        mesh={"stage": stages, "data": NUM_DEVICES // stages},
    )
    plan = step.plan(*workload.abstract_args())
    print(plan.table())
    say("2. The step by the clock, and steps with noise.")
    print(plan.simulate().table())
    print(plan.simulate(jitter=JITTER))
    say(f"3. Train it for {steps} steps, in stages and on one device side by side.")
    *state, batch = workload.make_args(jax.random.key(0))
    single = jax.tree.map(np.asarray, state), jax.jit(workload.step)
    batches = itertools.repeat(batch)
    _side_by_side(step, state, *single, batches, steps, "in stages", 1)


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
    config: Any = workload.config
    data = text.batches(text.stdlib_bytes(), config.batch, config.seq_len)
    state = workload.init(jax.random.key(0))
    single = (
        workload.init(jax.random.key(0)),
        jax.jit(workload.step, donate_argnums=workload.donate_argnums),
    )
    every = max(1, steps // ROWS)
    worst = _side_by_side(sharded_step, state, *single, data, steps, "sharded", every)
    print(f"\nlargest difference of the losses over {steps} steps: {worst:.1e}")


def _side_by_side(
    step: Callable[..., Any],
    state: Sequence[Any],
    single_state: Sequence[Any],
    single_step: Callable[..., Any],
    batches: Iterable[Any],
    steps: int,
    name: str,
    every: int,
) -> float:
    """Train a planned step and one on one device; return their largest difference.

    Args:
      step, state: the planned step and its state; `single_step`, `single_state`:
        likewise.
      batches: at least as many as there are steps.
      steps: number of steps.
      name: title of the column of the planned step.
      every: number of steps of a row, which has the largest difference since the last.
    """
    worst, worst_since_row = 0.0, 0.0
    print(f"{'step':>6}{name:>12}{'one device':>14}{'difference':>14}")
    for i, batch in zip(range(1, steps + 1), batches, strict=False):
        *state, loss = step(*state, batch)
        *single_state, single_loss = single_step(*single_state, batch)
        difference = abs(float(loss) - float(single_loss))
        worst = max(worst, difference)
        worst_since_row = max(worst_since_row, difference)
        if i == 1 or i == steps or i % every == 0:
            print(
                f"{i:>6}{float(loss):>12.5f}{float(single_loss):>14.5f}"
                f"{worst_since_row:>14.1e}",
                flush=True,
            )
            worst_since_row = 0.0
    return worst


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
