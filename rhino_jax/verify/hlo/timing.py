"""Estimate the step time of a compiled program: compute plus exposed collectives.

Compute is the sum over instructions of trips times seconds. Where the compiler
estimates cycles (XLA:TPU) a run takes cycles ÷ clock frequency; elsewhere it takes the
roofline time of its FLOPs and bytes, plus a kernel launch where the compiler estimates
no cycles. Collectives are costed by their bytes on the wire and the links that their
axes lie on.

XLA:GPU and XLA:CPU start and await collectives in the printed order, which is simulated
(`schedule`). XLA:TPU spreads them over fusions and loops, and runs them on engines of
their own: synchronous ones add to the compute, the others overlap with any of it,

    step = max(compute + synchronous collectives, all collectives)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rhino_jax.cost.compute import op_s
from rhino_jax.hardware.target import Target
from rhino_jax.verify.hlo.module import Module
from rhino_jax.verify.hlo.records import CompiledCollective
from rhino_jax.verify.hlo.schedule import CollectiveSeconds, played_s
from rhino_jax.verify.hlo.work.program import InstructionWork, ProgramWork, work_reader


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step.

    Attributes:
      compute_s: compute and memory traffic.
      communication_s: time of collectives that does not overlap with compute.
    """

    compute_s: float
    communication_s: float

    @property
    def step_s(self) -> float:
        """Step time: the sum of both."""
        return self.compute_s + self.communication_s


def work_s(target: Target, work: InstructionWork) -> float:
    """Return the seconds of one run of an instruction on a target."""
    if work.cycles is not None and target.clock_hz is not None:
        return work.cycles / target.clock_hz
    flops, traffic = np.asarray(work.flops), np.asarray(work.bytes)
    roofline_s = float(op_s(target, flops, traffic, work.dtype))
    # A compiler that estimates cycles gives none to copies, which are no kernels.
    return roofline_s + (target.launch_s if target.clock_hz is None else 0.0)


def step_time(
    module: Module,
    target: Target,
    collectives: Sequence[CompiledCollective],
    collective_s: CollectiveSeconds,
) -> tuple[ProgramWork, StepTime]:
    """Return work and time of a step.

    Args:
      module: the program.
      target: the hardware.
      collectives: all of the program's collectives, with their seconds.
      collective_s: returns the seconds of one run of a collective.
    """
    reader = work_reader(module, lambda work: work_s(target, work))
    work = reader.program()
    compute_s = sum(w.count * work_s(target, w) for w in work.items)
    if work.cycles or not module.is_scheduled:
        added_s = _added_s(compute_s, collectives)
    else:
        added_s = played_s(module, reader, collective_s) - compute_s
    return work, StepTime(compute_s=compute_s, communication_s=max(0.0, added_s))


def _added_s(compute_s: float, collectives: Sequence[CompiledCollective]) -> float:
    sync_s = sum(c.seconds for c in collectives if not c.is_async)
    all_s = sum(c.seconds for c in collectives)
    return max(compute_s + sync_s, all_s) - compute_s
