"""Simulate a compiled program's schedule: which compute hides which collectives.

Compilers start and await collectives in the printed order, which is simulated: the
device computes, and its links run one collective after another. A
synchronous collective blocks both. An asynchronous one starts when it is reached and
the links are free, and its end waits for it; so it overlaps with the compute between
its start and its end, and with no other. So do copies to and from the host's memory,
one after another in each direction. A loop's body is simulated once and takes
trips times as long: no collective is seen to run from one trip into the next.

`collectives.payload` lists how the compilers write starts and ends. On XLA:TPU a fusion
may start, continue or end a transfer while it computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from rhino_jax.verify.hlo.collectives.payload import chain_ends
from rhino_jax.verify.hlo.loops import control_flow
from rhino_jax.verify.hlo.module import Computation, Instruction, Module
from rhino_jax.verify.hlo.work import WorkReader


_HOST = "S(5)"
"""The host's memory in a layout. Source: `Layout::kHostMemorySpace`, xla/layout.h."""

CollectiveSeconds = Callable[[Computation, Instruction], float]
"""Seconds of one run of a collective (of the start of an asynchronous one)."""


def simulated_s(
    module: Module,
    reader: WorkReader,
    collective_s: CollectiveSeconds,
    host_bytes_per_s: float = math.inf,
) -> float:
    """Return the seconds from the first instruction to the last.

    Args:
      module: a scheduled program.
      reader: reads the program's work; its `seconds_of` gives the time.
      collective_s: returns the seconds of one run of a collective.
      host_bytes_per_s: bandwidth of the link to the host, in one direction.
    """
    run = _ScheduleRun(module, reader, collective_s, host_bytes_per_s)
    return run.run(module.entry)


@dataclass(slots=True)
class _Clock:
    """The simulated time, in seconds.

    Attributes:
      now_s: time of the compute.
      links_s: time at which links are free again: those between devices ("") and those
        to ("in") and from ("out") a device's memory.
      ends_s: asynchronous start, or chain → end time of its transfer.
      prepared_s: start without operands → seconds of its transfer, which starts with
        the update that brings them.
    """

    now_s: float = 0.0
    links_s: dict[str, float] = field(default_factory=dict)
    ends_s: dict[str, float] = field(default_factory=dict)
    prepared_s: dict[str, float] = field(default_factory=dict)

    def transfer(self, seconds: float, link: str = "") -> float:
        """Start a transfer as soon as a link is free; return its end time."""
        self.links_s[link] = max(self.now_s, self.links_s.get(link, 0.0)) + seconds
        return self.links_s[link]

    def wait(self, end_s: float) -> None:
        self.now_s = max(self.now_s, end_s)

    def start(self, instruction: Instruction, seconds: float) -> None:
        """Start an asynchronous transfer, or prepare it."""
        if instruction.operands:
            self.ends_s[instruction.name] = self.transfer(seconds)
        else:
            self.prepared_s[instruction.name] = seconds

    def follow(self, instruction: Instruction) -> None:
        """Wait for the transfer that a `-done` ends; an `-update` only forwards it."""
        for operand in instruction.operands:
            if operand in self.prepared_s:
                seconds = self.prepared_s.pop(operand)
                self.ends_s[operand] = self.transfer(seconds)
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
    host_bytes_per_s: float
    seconds: dict[str, float] = field(default_factory=dict)

    def run(self, name: str) -> float:
        """Return the seconds of one run of a computation."""
        if name not in self.seconds:
            clock = _Clock()
            computation = self.module.computations[name]
            for instruction in computation:
                self._run_one(clock, computation, instruction)
            self.seconds[name] = max(clock.now_s, *clock.links_s.values(), 0.0)
        return self.seconds[name]

    def _run_one(
        self, clock: _Clock, computation: Computation, instruction: Instruction
    ) -> None:
        opcode, chains = instruction.opcode, None
        is_transfer = self.reader.is_transfer(instruction)
        if is_transfer and opcode == "fusion":
            chains = chain_ends(self.module.computations[instruction.called])
        if chains:
            # It computes between what it starts and what it ends.
            started, ended = chains
            if started:
                end_s = clock.transfer(self.collective_s(computation, instruction))
                clock.ends_s |= dict.fromkeys(started, end_s)
            clock.now_s += self._work_s(computation, instruction)
            for chain in ended:
                clock.wait(clock.ends_s.pop(chain, 0.0))
        elif is_transfer:
            seconds = self.collective_s(computation, instruction)
            if opcode.endswith("-start") or opcode in ("send", "recv"):
                # Seconds are those of the `send`: what is received ends with it.
                clock.start(instruction, seconds)
            else:
                clock.wait(clock.transfer(seconds))
        elif opcode == "copy-start" and _HOST in instruction.type:
            # Its type is that of the copy, then that of what is copied.
            link = "out" if _HOST in instruction.type.partition("}")[0] else "in"
            seconds = instruction.bytes / 2 / self.host_bytes_per_s
            clock.ends_s[instruction.name] = clock.transfer(seconds, link)
        elif opcode.endswith(("-done", "-update")):
            clock.follow(instruction)
        elif opcode in ("while", "conditional", "call"):
            flow = control_flow(self.module, computation, instruction)
            once_s = max(sum(map(self.run, names)) for names in flow.branches)
            clock.now_s += once_s * flow.trips
        else:
            clock.now_s += self._work_s(computation, instruction)

    def _work_s(self, computation: Computation, instruction: Instruction) -> float:
        return sum(
            work.count * self.reader.seconds_of(work)
            for work in self.reader.read_one(computation, instruction)
        )
