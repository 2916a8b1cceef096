"""Read everything that verification needs from one compiled program, and its step time.

The step time is compute plus exposed collectives. Compute is the sum over instructions
of trips times seconds. Where the compiler estimates cycles (XLA:TPU) a run takes cycles
÷ clock frequency; elsewhere it takes the roofline time of its FLOPs and bytes, plus a
kernel launch where the compiler estimates no cycles. Collectives are costed by their
bytes on the wire and the links that their axes lie on.

What of them compute hides is simulated (`schedule`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from rhino_jax.cost.collectives import collective_s, wire_bytes
from rhino_jax.cost.compute import convolution_work, op_s
from rhino_jax.hardware.layout import lay_out
from rhino_jax.hardware.mesh import size_of
from rhino_jax.hardware.target import Target
from rhino_jax.plan.records import Collective, Predicted, WhileLoop
from rhino_jax.verify.hlo.collectives.groups import map_mesh
from rhino_jax.verify.hlo.collectives.read import CollectiveReader
from rhino_jax.verify.hlo.collectives.repeated_sums import repeated_sums
from rhino_jax.verify.hlo.module import Computation, Instruction, Module, parse_module
from rhino_jax.verify.hlo.records import (
    Compilation,
    CompiledKernel,
    OutOfMemory,
    Reading,
    rates_of,
)
from rhino_jax.verify.hlo.schedule import CollectiveSeconds, simulated_s
from rhino_jax.verify.hlo.work import InstructionWork, ProgramWork, WorkReader


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step.

    Attributes:
      compute_s: compute and memory traffic.
      communication_s: time of collectives, and of copies to and from the host's memory,
        that does not overlap with compute.
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
    module: Module, target: Target, collective_s: CollectiveSeconds
) -> tuple[ProgramWork, StepTime]:
    """Return work and time of a step.

    Args:
      module: the program.
      target: the hardware.
      collective_s: returns the seconds of one run of a collective.
    """
    reader = WorkReader(module, lambda work: work_s(target, work))
    work = reader.program()
    compute_s = sum(w.count * work_s(target, w) for w in work.items)
    host_bytes_per_s = target.device.host_bytes_per_s or math.inf
    step_s = simulated_s(module, reader, collective_s, host_bytes_per_s)
    added_s = step_s - compute_s
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
      device_ids: ids of the mesh's devices in mesh order, as the program's replica
        groups use them; `jax.jit` numbers them 0, 1, 2, … in mesh order (None).
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

    reader = CollectiveReader(module, map_mesh(mesh_axes, device_ids))

    collectives = with_seconds(reader.read_all(), mesh_axes, target)

    def collective_s(computation: Computation, instruction: Instruction) -> float:
        whole, permutes = reader.windowed.get(instruction.name, (None, 1))
        once = (whole,) if whole else reader.read_one(computation, instruction)
        return sum(c.seconds for c in with_seconds(once, mesh_axes, target)) / permutes

    work, time = step_time(module, target, collective_s)
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
