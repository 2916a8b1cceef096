"""What is read of a compiled program, as plain records."""

from __future__ import annotations

from dataclasses import dataclass

from rhino_jax.plan.records import Collective, Predicted
from rhino_jax.verify.hlo.collectives.repeated_sums import RepeatedSum
from rhino_jax.verify.hlo.rates import Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """What the compiler says one device holds, in bytes.

    Source: `jax.stages.Compiled.memory_analysis()`.

    Attributes:
      argument_bytes: arguments.
      output_bytes: results, those that reuse an argument's buffer included.
      alias_bytes: results that reuse an argument's buffer.
      temp_bytes: everything else that the program allocates.
      peak_bytes: largest sum of what is held at one time.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """The compiler's word that a program does not fit.

    Attributes:
      needed_bytes: what the program would hold; None where it does not say.
      available_bytes: what a device has; None where it does not say.
      message: its own words, first lines.
    """

    needed_bytes: int | None
    available_bytes: int | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """One compiled program, or why there is none.

    Attributes:
      platform: "cpu", "tpu" or "gpu".
      hlo_text: the optimised, scheduled module; empty where it does not fit.
      memory: None where the program does not fit.
      out_of_memory: None where it fits.
      messages: what the compiler wrote to stderr.
      seconds: wall time of compiling.
      parameter_axes: of every parameter of the program, mesh axes that it is sharded
        over; empty where this is not known.
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
      is_async: whether the compiler lets compute run beside it.
    """

    is_async: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a compiled program moves, holds and takes, per device and step.

    Attributes:
      compiled: the same fields as a plan's prediction.
      collectives: in run order.
      rematerialised: the compiler's lines on values that it had to replicate in
        full to change their sharding ("Involuntary full rematerialization").
      repeated_sums: sums over devices that count the same parts several times.
      rates: how near it comes to the hardware's; None of a program that does not fit.
      notes: what could not be read, in sentences.
    """

    compiled: Predicted
    collectives: tuple[CompiledCollective, ...]
    rematerialised: tuple[str, ...] = ()
    repeated_sums: tuple[RepeatedSum, ...] = ()
    rates: Rates | None = None
    notes: tuple[str, ...] = ()
