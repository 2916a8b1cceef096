"""Read everything that verification needs from one compiled program, and its step time.

The step time is compute plus exposed collectives. Compute is the sum over instructions
of trips times seconds. Where the compiler estimates cycles (XLA:TPU) a run takes cycles
÷ clock frequency; elsewhere it takes the roofline time of its FLOPs and bytes, plus a
kernel launch where the compiler estimates no cycles. Collectives are costed by their
bytes on the wire and the links that their axes lie on.

XLA:GPU and XLA:CPU start and await collectives in the printed order, which is simulated
(`schedule`) with two resources: the device computes, and its links run one collective
after another. A synchronous collective blocks both. An asynchronous one starts when it
is reached and the links are free, and its `-done` waits for it; so it overlaps with the
compute between its start and its end, and with no other. A loop's body is simulated
once and takes trips times as long.

XLA:TPU spreads collectives over fusions and loops, and runs them on engines of their
own: synchronous ones add to the compute, the others overlap with any of it,

    step = max(compute + synchronous collectives, all collectives)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from rhino_jax.cost.collectives import collective_s, wire_bytes
from rhino_jax.cost.compute import convolution_work, op_s
from rhino_jax.hardware.layout import lay_out
from rhino_jax.hardware.mesh import size_of
from rhino_jax.hardware.target import Target
from rhino_jax.plan.records import Collective, Predicted, WhileLoop
from rhino_jax.verify.hlo.collectives.groups import map_mesh
from rhino_jax.verify.hlo.collectives.read import read_collectives
from rhino_jax.verify.hlo.collectives.repeated_sums import repeated_sums
from rhino_jax.verify.hlo.loops import control_flow
from rhino_jax.verify.hlo.module import Computation, Instruction, Module, parse_module
from rhino_jax.verify.hlo.records import (
    Compilation,
    CompiledCollective,
    CompiledKernel,
    OutOfMemory,
    Reading,
    rates_of,
)
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
    flops, fixed_s, kernels = float(work.flops), 0.0, target.device.kernels
    if work.channels is not None:
        of = work.channels
        flops *= convolution_work(
            kernels, of.inputs, of.outputs, of.groups, work.dtype, of.is_kernel_gradient
        )
        fixed_s = kernels.conv_s
    roofline_s = fixed_s + float(op_s(
        target,
        np.asarray(flops),
        np.asarray(work.bytes),
        work.dtype,
        work.vector_ops,
        work.library,
    ))  # fmt: skip
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


AnyCollective = TypeVar("AnyCollective", bound=Collective)


def with_seconds(
    collectives: Iterable[AnyCollective],
    mesh_axes: Sequence[tuple[str, int]],
    target: Target,
) -> tuple[AnyCollective, ...]:
    """Return collectives with their estimated seconds on a target.

    A plan for a TPU that is compiled for emulated CPU devices is compared in CPU
    seconds.

    Args:
      collectives: records with bytes on the wire.
      mesh_axes: (name, size) of the mesh that they run over, major first.
      target: the hardware.
    """
    mesh = lay_out(target, mesh_axes)
    place = {name: i for i, name in enumerate(mesh.names)}
    found = []
    for c in collectives:
        axes = [place[name] for name in c.axes]
        share = wire_bytes(c.kind, 1.0, size_of(mesh, axes))
        if not share or not c.count:
            found.append(replace(c, seconds=0.0))
            continue
        local_bytes = c.bytes / c.count / share
        one_s = collective_s(c.kind, local_bytes, mesh.over(axes))
        found.append(replace(c, seconds=one_s * c.count))
    return tuple(found)


def read_compiled(
    compilation: Compilation,
    mesh_axes: Sequence[tuple[str, int]],
    target: Target,
    device_ids: Sequence[int] | None = None,
    *,
    while_loops: Iterable[WhileLoop] = (),
) -> Reading:
    """Read a compiled program's collectives, memory use and time, per device and step.

    Args:
      compilation: the compiled program, or its out-of-memory error.
      mesh_axes: (name, size) of every mesh axis, major first.
      target: the hardware whose rates turn work into seconds.
      device_ids: see `read_collectives`.
      while_loops: the plan's trip counts of loops that data may end.
    Returns:
      The reading. For a program that does not fit, `compiled` has the bytes that it
      needs (one more than the device's, where the compiler does not say) and an
      infinite time, and there are no collectives.
    Raises:
      MeshError: the program runs on other devices than the mesh's.
    """
    stated = _stated(compilation)
    if compilation.out_of_memory is not None:
        needed_bytes = _needed_bytes(compilation.out_of_memory, target)
        compiled = Predicted(math.inf, math.inf, 0.0, needed_bytes, 0.0)
        return Reading(compiled=compiled, collectives=(), **stated)
    module = module_of(compilation, while_loops)

    def collectives_of(of: Module) -> tuple[CompiledCollective, ...]:
        return with_seconds(
            read_collectives(of, mesh_axes, device_ids), mesh_axes, target
        )

    def collective_s(computation: Computation, instruction: Instruction) -> float:
        alone = _alone(module, computation, instruction)
        return sum(c.seconds for c in collectives_of(alone))

    collectives = collectives_of(module)
    work, time = step_time(module, target, collectives, collective_s)
    notes = list(work.notes)
    if work.cycles and target.device.clock_hz is None:
        notes.append(
            f"The compiler estimates cycles, but {target.name!r} has no `clock_hz`:"
            " seconds are those of the roofline."
        )
    memory = compilation.memory
    if memory is None:
        notes.append("The compiler does not say what the program holds.")
    return Reading(
        compiled=Predicted(
            step_time_s=time.step_s,
            compute_s=time.compute_s,
            communication_s=time.communication_s,
            peak_bytes=0 if memory is None else memory.peak_bytes,
            flops_per_device=float(work.flops),
        ),
        collectives=collectives,
        repeated_sums=repeated_sums(
            module, map_mesh(mesh_axes, device_ids), compilation.parameter_axes
        ),
        rates=rates_of(
            work.items,
            target,
            collectives_s=sum(c.seconds for c in collectives),
            exposed_s=time.communication_s,
        ),
        notes=tuple(notes),
        kernels=tuple(_kernel(target, w) for w in work.items),
        **stated,
    )


def _kernel(target: Target, work: InstructionWork) -> CompiledKernel:
    once = CompiledKernel(
        name=work.name,
        ops=work.ops,
        seconds=work_s(target, work),
        flops=work.flops,
        bytes=work.bytes,
    )
    return once.scaled(work.count)


def _stated(compilation: Compilation) -> dict[str, Any]:
    """Return the fields of a reading that the compiler states."""
    return {
        "platform": compilation.platform,
        "memory": compilation.memory,
        "out_of_memory": compilation.out_of_memory,
        "rematerialised": tuple(_rematerialised(compilation.messages)),
        "seconds": compilation.seconds,
    }


def module_of(compilation: Compilation, while_loops: Iterable[WhileLoop]) -> Module:
    """Parse the program, with the planned trip counts of loops that data may end."""
    trips: dict[str, frozenset[int]] = {}
    for loop in while_loops:
        trips[loop.source] = trips.get(loop.source, frozenset()) | {loop.trip_count}
    return replace(parse_module(compilation.hlo_text), while_trips=trips)


def _alone(
    module: Module, computation: Computation, instruction: Instruction
) -> Module:
    """Return a module that runs one instruction, once, on parameters."""
    instructions = {
        name: replace(
            computation.instructions[name],
            opcode="parameter",
            operands=(str(i),),
            attributes="",
        )
        for i, name in enumerate(instruction.operands)
    }
    # Without an op name, so that it is not taken for a part of a windowed einsum.
    instructions[instruction.name] = replace(instruction, op_name="")
    entry = Computation(computation.name, instructions, instruction.name)
    return replace(
        module,
        computations={**module.computations, entry.name: entry},
        entry=entry.name,
    )


_REMATERIALISED = re.compile(r"\[SPMD\] Involuntary full rematerialization\.?\s*(.*)")
_ADVICE = re.compile(r"\s*As the last resort, SPMD will replicate.*$")


def _rematerialised(messages: str) -> Iterator[str]:
    """Yield the compiler's messages on involuntary rematerialisation, each once.

    A message names the shardings, the operation and its metadata; the time stamp before
    and the advice after are left out.
    """
    seen: set[str] = set()
    for found in _REMATERIALISED.finditer(messages):
        line = _ADVICE.sub("", found.group(1)).strip()
        if line not in seen:
            seen.add(line)
            yield line


def _needed_bytes(out: OutOfMemory, target: Target) -> int:
    if out.needed_bytes is not None:
        return out.needed_bytes
    return max(target.device.hbm_bytes, out.available_bytes or 0) + 1
