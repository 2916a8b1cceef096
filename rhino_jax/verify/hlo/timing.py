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

Simulate a compiled program in its scheduled order.

Two resources work at a time: the device computes, and its links run one collective
after another. A synchronous collective blocks both. An asynchronous one starts when it
is reached and the links are free, and its `-done` waits for it; so it overlaps with the
compute between its start and its end, and with no other. A loop's body is simulated
once and takes trips times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rhino_jax.cost.compute import op_s
from rhino_jax.hardware.target import Target
from rhino_jax.verify.hlo.loops import control_flow
from rhino_jax.verify.hlo.module import Computation, Instruction, Module
from rhino_jax.verify.hlo.records import CompiledCollective
from rhino_jax.verify.hlo.work import (
    InstructionWork,
    ProgramWork,
    WorkReader,
)


CollectiveSeconds = Callable[[Computation, Instruction], float]
"""Seconds of one run of a collective (of the start of an asynchronous one)."""


def simulated_s(
    module: Module, reader: WorkReader, collective_s: CollectiveSeconds
) -> float:
    """Return the seconds from the first instruction to the last.

    Args:
      module: a scheduled program.
      reader: reads the program's work; its `seconds_of` gives the time.
      collective_s: returns the seconds of one run of a collective.
    """
    return _ScheduleRun(module, reader, collective_s).run(module.entry)


@dataclass(slots=True)
class _Clock:
    """The simulated time, in seconds.

    Attributes:
      now_s: time of the compute.
      links_s: time at which the links are free again.
      ends_s: asynchronous start → end time of its transfer.
    """

    now_s: float = 0.0
    links_s: float = 0.0
    ends_s: dict[str, float] = field(default_factory=dict)

    def transfer(self, seconds: float) -> float:
        """Start a transfer as soon as the links are free; return its end time."""
        self.links_s = max(self.now_s, self.links_s) + seconds
        return self.links_s

    def wait(self, end_s: float) -> None:
        self.now_s = max(self.now_s, end_s)

    def follow(self, instruction: Instruction) -> None:
        """Wait for the transfer that a `-done` ends; an `-update` only forwards it."""
        for operand in instruction.operands:
            if operand in self.ends_s:
                if instruction.opcode.endswith("-done"):
                    self.wait(self.ends_s[operand])
                else:
                    self.ends_s[instruction.name] = self.ends_s[operand]


@dataclass(frozen=True, slots=True)
class _ScheduleRun:
    module: Module
    reader: WorkReader
    collective_s: CollectiveSeconds
    seconds: dict[str, float] = field(default_factory=dict)

    def run(self, name: str) -> float:
        """Return the seconds of one run of a computation."""
        if name not in self.seconds:
            clock = _Clock()
            computation = self.module.computations[name]
            for instruction in computation:
                self._run_one(clock, computation, instruction)
            self.seconds[name] = max(clock.now_s, clock.links_s)
        return self.seconds[name]

    def _run_one(
        self, clock: _Clock, computation: Computation, instruction: Instruction
    ) -> None:
        opcode = instruction.opcode
        if self.reader.is_transfer(instruction):
            end_s = clock.transfer(self.collective_s(computation, instruction))
            if opcode.endswith("-start"):
                clock.ends_s[instruction.name] = end_s
            else:
                clock.wait(end_s)
        elif opcode.endswith(("-done", "-update")):
            clock.follow(instruction)
        elif opcode in ("while", "conditional", "call"):
            flow = control_flow(self.module, computation, instruction)
            once_s = max(sum(map(self.run, names)) for names in flow.branches)
            clock.now_s += once_s * flow.trips
        else:
            for work in self.reader.read_one(computation, instruction):
                clock.now_s += work.count * self.reader.seconds_of(work)


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
    if work.cycles is not None and target.device.clock_hz is not None:
        return work.cycles / target.device.clock_hz
    flops, traffic = np.asarray(work.flops), np.asarray(work.bytes)
    roofline_s = float(op_s(target, flops, traffic, work.dtype))
    # A compiler that estimates cycles gives none to copies, which are no kernels.
    return roofline_s + (
        target.device.launch_s if target.device.clock_hz is None else 0.0
    )


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
    reader = WorkReader(module, lambda work: work_s(target, work))
    work = reader.program()
    compute_s = sum(w.count * work_s(target, w) for w in work.items)
    if work.cycles or not module.is_scheduled:
        sync_s = sum(c.seconds for c in collectives if not c.is_async)
        all_s = sum(c.seconds for c in collectives)
        added_s = max(compute_s + sync_s, all_s) - compute_s
    else:
        added_s = simulated_s(module, reader, collective_s) - compute_s
    return work, StepTime(compute_s=compute_s, communication_s=max(0.0, added_s))
