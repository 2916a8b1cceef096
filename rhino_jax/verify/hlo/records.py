"""Records of a compiled program: memory, work, collectives, and attained rates.

Attained rates say how near the program comes to the hardware's peak. Where the compiler
estimates cycles (XLA:TPU), compute-bound and memory-bound work are summed separately,
at peak rates and as estimated without kernel launch time; their ratios are the
efficiencies of the roofline (Williams, Waterman, Patterson, CACM 2009). For any
compiler: the share of the collectives' time that overlaps with compute.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from rhino_jax.cost.corrections import OpKey
from rhino_jax.hardware.target import Target
from rhino_jax.plan.records import Collective, Predicted
from rhino_jax.verify.hlo.collectives.repeated_sums import RepeatedSum
from rhino_jax.verify.hlo.work import InstructionWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Seconds per device and step, at peak rates and as the compiler estimates.

    Attributes:
      matmul_peak_s, matmul_s: time of compute-bound work, at peak FLOP/s and as the
        compiler estimates; zero where it estimates nothing.
      memory_peak_s, memory_s: time of memory-bound work, at peak bandwidth and as
        estimated; likewise.
      hidden_s: time of collectives that overlaps with compute.
    """

    matmul_peak_s: float = 0.0
    matmul_s: float = 0.0
    memory_peak_s: float = 0.0
    memory_s: float = 0.0
    hidden_s: float = 0.0


def rates_of(
    items: Iterable[InstructionWork],
    target: Target,
    *,
    collectives_s: float,
    exposed_s: float,
) -> Rates:
    """Compute the rates of one program.

    Args:
      items: work of the program's instructions.
      target: the hardware.
      collectives_s: seconds of all its collectives.
      exposed_s: seconds of collectives that add to the step time.
    """
    sums = {"matmul": [0.0, 0.0], "memory": [0.0, 0.0]}
    for work in items:
        if work.cycles is None or target.device.clock_hz is None:
            continue
        arithmetic_s = work.flops / target.peak_flops_per_s(work.dtype)
        traffic_s = work.bytes / target.device.hbm_bytes_per_s
        bound = sums["matmul" if arithmetic_s > traffic_s else "memory"]
        bound[0] += work.count * max(arithmetic_s, traffic_s)
        taken_s = work.cycles / target.device.clock_hz - target.device.launch_s
        bound[1] += work.count * max(0.0, taken_s)
    return Rates(
        matmul_peak_s=sums["matmul"][0],
        matmul_s=sums["matmul"][1],
        memory_peak_s=sums["memory"][0],
        memory_s=sums["memory"][1],
        hidden_s=max(0.0, collectives_s - exposed_s),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """The compiler's memory statistics, bytes per device.

    Source: `jax.stages.Compiled.memory_analysis()`.

    Attributes:
      argument_bytes: bytes of arguments.
      output_bytes: bytes of results, those aliased to an argument's buffer included.
      alias_bytes: bytes of results that are aliased to an argument's buffer.
      temp_bytes: bytes of all other allocations of the program.
      peak_bytes: largest number of bytes that are live at one time.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """The compiler's error that a program does not fit.

    Attributes:
      needed_bytes: bytes that the program needs; None where the compiler does not say.
      available_bytes: bytes that a device has; None where the compiler does not say.
      message: first lines of the error message.
    """

    needed_bytes: int | None
    available_bytes: int | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """One compiled program, or its out-of-memory error.

    Attributes:
      platform: "cpu", "tpu" or "gpu".
      hlo_text: text of the optimised, scheduled module; empty where it does not fit.
      memory: the compiler's memory statistics; None where the program does not fit.
      out_of_memory: the compiler's out-of-memory error; None where the program fits.
      messages: text that the compiler wrote to standard error.
      seconds: wall time of compiling.
      parameter_axes: mesh axes that each parameter is sharded over; empty where they
        are not known.
    """

    platform: str
    hlo_text: str
    memory: MemoryUse | None
    out_of_memory: OutOfMemory | None
    messages: str
    seconds: float
    parameter_axes: tuple[frozenset[str] | None, ...] = ()


@dataclass(frozen=True, slots=True)
class CompiledCollective(Collective):
    """A collective of a compiled program.

    Attributes:
      is_async: whether the compiler lets it overlap with compute.
    """

    is_async: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """An instruction that computes, in all its runs of a step, on one device.

    Attributes:
      name: name of the instruction.
      ops: keys of what it computes, the main one first; see `InstructionWork`.
      seconds: seconds of all runs.
      flops: FLOPs of all runs.
      bytes: bytes that all runs read and write.
    """

    name: str
    ops: tuple[OpKey, ...]
    seconds: float
    flops: float
    bytes: float

    def scaled(self, times: float) -> CompiledKernel:
        """Return the kernel run `times` as often."""
        amounts = {n: times * getattr(self, n) for n in ("seconds", "flops", "bytes")}
        return replace(self, **amounts)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStep:
    """A compiled step, of one program or of several tasks, per device.

    Attributes:
      platform: platform that it was compiled for: "cpu", "tpu" or "gpu".
      compiled: the fields of a plan's prediction, as compiled; None where it does not
        fit.
      collectives: its collectives, in run order.
      memory: the compiler's memory statistics; None where the program does not fit, and
        for several tasks.
      out_of_memory: the compiler's error that it does not fit, or None.
      rematerialised: the compiler's messages on values that it had to replicate in full
        to change their sharding ("Involuntary full rematerialization").
      repeated_sums: reductions over devices that add the same parts several times.
      notes: notes on what could not be read or compared, as sentences.
      seconds: wall time of compiling.
      kernels: all that computes, with its seconds; for several tasks the mean over
        devices.
    """

    platform: str
    compiled: Predicted | None
    collectives: tuple[CompiledCollective, ...]
    memory: MemoryUse | None = None
    out_of_memory: OutOfMemory | None = None
    rematerialised: tuple[str, ...] = ()
    repeated_sums: tuple[RepeatedSum, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    kernels: tuple[CompiledKernel, ...] = ()

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device puts on the wire per step, as compiled."""
        return sum(c.bytes for c in self.collectives)

    def facts(self, of: type[CompiledStep] | None = None) -> dict[str, Any]:
        """Return the fields of `of` by name, for a class with more of them.

        Args:
          of: a class that this is one of; None: `CompiledStep`.
        """
        found = {f.name: getattr(self, f.name) for f in fields(of or CompiledStep)}
        return found if self.out_of_memory is None else found | {"compiled": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(CompiledStep):
    """A compiled program, or one that does not fit, as it was read.

    Attributes:
      compiled: where it does not fit, the bytes that it needs and an infinite time.
      rates: rates compared with the hardware's peak; None where the program does not
        fit.
    """

    compiled: Predicted
    rates: Rates | None = None
