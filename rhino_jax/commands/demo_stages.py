"""`python -m rhino_jax demo --stages 2`: a U-Net over two emulated hosts.

Eight emulated CPU devices stand for two hosts of four. The U-Net's skip connections
cross the stage cut, which its code does not specify. Its timeline is printed as
planned, and with noise; then it trains, next to a run on one device.
"""

from __future__ import annotations

import jax
import numpy as np

import rhino_jax as rhino
from rhino_jax.commands.demo import NUM_DEVICES, emulate, say
from rhino_jax.errors import StageError
from rhino_jax.models import registry
from rhino_jax.models.workload import Workload
from rhino_jax.runtime.sharded import ShardedFunction


MODEL = "unet-tiny"
JITTER = 0.05
"""Standard deviation of the logarithm of every task's duration; transfers have twice
that. An example to show the cost of noise; not measured."""


def run(*, stages: int, steps: int) -> None:
    """Run the demo, printing as it goes.

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
            f"{NUM_DEVICES} emulated devices do not make {stages} equal groups.",
            where="`demo --stages`",
            numbers=f"{NUM_DEVICES} devices",
            fix="take 2, 4 or 8 stages.",
        )
    workload = registry.get(MODEL, optimizer="sgd")
    say(
        f"1. Plan a train step of {MODEL} ({workload.num_params() / 1e6:.1f} million"
        f" parameters) in {stages} stages, each on {NUM_DEVICES // stages} of"
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
    _train(workload, step, steps)


def _train(workload: Workload, step: ShardedFunction, steps: int) -> None:
    *state, batch = workload.make_args(jax.random.key(0))
    single = jax.tree.map(np.asarray, state)
    single_step = jax.jit(workload.step)
    print(f"{'step':>6}{'in stages':>12}{'one device':>14}{'difference':>14}")
    for i in range(1, steps + 1):
        *state, loss = step(*state, batch)
        *single, single_loss = single_step(*single, batch)
        off = abs(float(loss) - float(single_loss))
        print(
            f"{i:>6}{float(loss):>12.5f}{float(single_loss):>14.5f}{off:>14.1e}",
            flush=True,
        )
