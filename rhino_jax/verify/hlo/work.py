"""Read the work of a compiled program: its instructions in run order, with trip counts.

The unit is an instruction of the control flow: of the entry, of loop bodies, of the
longest branch of a conditional, of called computations. The body of a fusion belongs to
the fusion. Collectives are not work (`collectives` reads them), nor are asynchronous
copies between memory spaces (`copy-start`, `slice-start`, a slice that is an
`async-start`). What a TPU's SparseCores compute (look-ups, sums of rows) is work, as if
nothing ran beside it; a note counts these calls.

XLA:TPU annotates most of its instructions with an estimate of cycles, for compute
alone: collectives carry none, synchronous or not, and a fusion that continues a
collective (`async_collective_fusion`) has the estimate of its compute. Sorts, gathers,
scatters, custom calls, and copies and reshapes that only move data have none, and the
estimate of ragged dots is unusable (`grouped.skips_groups`); these use the roofline.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from rhino_jax.cost.corrections import OpKey, op_key
from rhino_jax.cost.grouped import MATRICES, ROWS
from rhino_jax.frontend.registry import traits_of
from rhino_jax.frontend.rules.dot import RAGGED_DOTS
from rhino_jax.ir.program import Source
from rhino_jax.ir.traits import OWN_KERNEL, Library, OpKind
from rhino_jax.verify.hlo.collectives.payload import is_transfer_opcode
from rhino_jax.verify.hlo.grouped import ragged_work, skips_groups
from rhino_jax.verify.hlo.instruction_cost import (
    Arithmetic,
    Channels,
    MemoryTraffic,
    arithmetic_of,
    channels_of,
    custom_call_target,
    dtype_name,
)
from rhino_jax.verify.hlo.libraries import factor_flops, library_of
from rhino_jax.verify.hlo.loops import control_flow
from rhino_jax.verify.hlo.module import (
    Computation,
    Instruction,
    Module,
    arrays_of,
    called_names,
    contains,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionWork:
    """One instruction that computes, on one device.

    Attributes:
      name: name of the instruction.
      opcode: HLO opcode, as `fusion`.
      count: runs per step.
      flops: FLOPs of dots and convolutions, per run.
      dtype: dtype of the operands of the largest dot or convolution, as `bfloat16`;
        without any, of the result.
      bytes: bytes read and written, per run.
      vector_ops: operations on vector units, per run, of 4-byte elements; of a
        factorisation all its operations.
      library: the algorithm of a device library that it calls.
      channels: channels of a convolution of cuDNN; else None.
      cycles: the compiler's estimate of cycles, per run; None where it makes none.
      op: JAX's name of the operation.
      source: the user's source line.
      ops: keys of everything that it computes; first that of its dot or convolution, or
        else its own.
    """

    name: str
    opcode: str
    count: int
    flops: int
    dtype: str
    bytes: int
    cycles: int | None
    op: str
    source: str
    ops: tuple[OpKey, ...] = ()
    vector_ops: float = 0.0
    library: Library = OWN_KERNEL
    channels: Channels | None = None


@dataclass(frozen=True, slots=True)
class ProgramWork:
    """All the work of a program, per device and step.

    Attributes:
      items: work in run order; a loop's body appears once, with its count.
      notes: notes on what could not be read, as sentences.
    """

    items: tuple[InstructionWork, ...]
    notes: tuple[str, ...] = ()

    @property
    def flops(self) -> int:
        """FLOPs of dots and convolutions, summed over all trips."""
        return sum(w.flops * w.count for w in self.items)

    @property
    def cycles(self) -> int:
        """Estimated cycles, summed over all trips."""
        return sum((w.cycles or 0) * w.count for w in self.items)


# Instructions that only name, pack or start something.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency"
    " opt-barrier partition-id replica-id domain".split()
)
_PRODUCTS = ("dot", "convolution")
_UNNAMED = _FREE | {"broadcast", "iota"}
_FREE_CALLS = frozenset(
    ("AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast", "Sharding")
)
_BESIDE = ("-start", "-done", "-update")
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
# The largest integer marks a missing estimate.
_NO_CYCLES = 2**63 - 1
_SPARSE_CORE = 'async_execution_thread="sparsecore"'
_CALLS = ("call", "call-start", "async-start", "custom-call")


@dataclass(slots=True, eq=False)
class WorkReader:
    """Reader of a compiled program's work.

    Attributes:
      module: the program.
      seconds_of: returns the seconds of one run, by which the longest branch of a
        conditional is chosen.
      traffic: counts the memory traffic of instructions.
      read_already: cache: computation → the work of one run.
      moving: cache: computation → whether it contains a collective.
      unknown_loops: loop → source line and assumed trips, where the count depends on
        data.
      opaque: number of custom calls with unknown FLOPs, by target.
      beside: names of calls that a SparseCore runs, without collectives.
    """

    module: Module
    seconds_of: Callable[[InstructionWork], float]
    traffic: MemoryTraffic = field(init=False)
    read_already: dict[str, tuple[InstructionWork, ...]] = field(default_factory=dict)
    moving: dict[str, bool] = field(default_factory=dict)
    unknown_loops: dict[str, tuple[str, int]] = field(default_factory=dict)
    opaque: collections.Counter[str] = field(default_factory=collections.Counter)
    beside: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.traffic = MemoryTraffic(self.module)

    def program(self) -> ProgramWork:
        """Return the work of one step."""
        items = self.read(self.module.entry)
        return ProgramWork(items, tuple(self._notes()))

    def _notes(self) -> Iterator[str]:
        for name, (source, trips) in self.unknown_loops.items():
            where = f" at {source}" if source else ""
            times = "once" if trips == 1 else f"{trips} times"
            yield f"The count of loop {name}{where} depends on data; it counts {times}."
        if self.opaque:
            calls = ", ".join(f"{name} ({n})" for name, n in self.opaque.items())
            yield f"FLOPs of these calls cannot be read, only their bytes: {calls}."
        if self.beside:
            yield (
                f"SparseCores run calls ({len(self.beside)}), of which the compiler"
                " estimates no time: they count at the memory's rate, as if nothing ran"
                " beside them."
            )

    def read(self, name: str) -> tuple[InstructionWork, ...]:
        """Return the work of one run of a computation."""
        if name not in self.read_already:
            computation = self.module.computations[name]
            self.read_already[name] = tuple(
                work
                for instruction in computation
                for work in self.read_one(computation, instruction)
            )
        return self.read_already[name]

    def read_one(
        self, computation: Computation, instruction: Instruction
    ) -> Iterator[InstructionWork]:
        """Yield the work of one run of an instruction of the control flow."""
        match instruction.opcode:
            case "while" | "conditional":
                yield from self._called(computation, instruction)
            case _ if _SPARSE_CORE in instruction.attributes:
                if instruction.opcode.endswith("-start") and not any(
                    self._moves(name) for name in called_names(instruction)
                ):
                    self.beside.add(instruction.name)
                    yield from self._offloaded(instruction)
            case "call" | "call-start" | "async-start":
                called = self.module.computations[instruction.called]
                is_copied = called.instructions[called.root].opcode == "slice"
                if not self.is_transfer(instruction) and not is_copied:
                    yield from self._called(computation, instruction)
            case "fusion-start":
                called = self.module.computations[instruction.called]
                root = called.instructions[called.root]
                fusion = replace(instruction, opcode="fusion", type=root.type)
                yield from self._work(computation, fusion)
            case _:
                if not _is_free(instruction):
                    yield from self._work(computation, instruction)

    def _offloaded(self, caller: Instruction) -> Iterator[InstructionWork]:
        """Yield the work of a call that a SparseCore runs."""
        for name in called_names(caller):
            called = self.module.computations[name]
            for inner in called:
                if inner.opcode in _CALLS and called_names(inner):
                    yield from self._offloaded(inner)
                elif not _is_free(inner):
                    yield from self._work(called, inner)

    def is_transfer(self, instruction: Instruction) -> bool:
        """Whether an instruction is a collective, starts one, or contains one."""
        opcode = instruction.opcode
        if opcode.endswith(("-done", "-update")):
            return False
        if opcode == "fusion" or opcode.endswith("-start"):
            called = called_names(instruction)
            if any(self._moves(name) for name in called):
                return True
        return is_transfer_opcode(opcode)

    def _called(
        self, computation: Computation, instruction: Instruction
    ) -> Iterator[InstructionWork]:
        """Yield the work of the computations that an instruction runs: of the longest
        branch, for all its trips."""
        flow = control_flow(self.module, computation, instruction)
        if not flow.is_known:
            self.unknown_loops[instruction.name] = instruction.source, flow.trips
        branches = [[w for x in names for w in self.read(x)] for names in flow.branches]
        for work in max(
            branches, key=lambda run: sum(self.seconds_of(w) * w.count for w in run)
        ):
            yield replace(work, count=work.count * flow.trips)

    def _work(
        self, computation: Computation, instruction: Instruction
    ) -> Iterator[InstructionWork]:
        cycles = None if skips_groups(instruction) else _cycles(instruction)
        called = instruction.attribute("calls")
        if cycles is None and instruction.opcode == "fusion" and self._moves(called):
            return
        arithmetic = tuple(self._arithmetic(computation, instruction))
        target = custom_call_target(instruction)
        library = self._library(instruction)
        is_factoring = library.name == "factoring"
        count_ops = factor_flops if is_factoring else self.traffic.vector_ops
        if target and not arithmetic and library is OWN_KERNEL:
            self.opaque[target] += 1
        largest = max(arithmetic, key=lambda a: a.flops, default=None)
        arrays = arrays_of(instruction.type)
        read = [
            arrays_of(computation.instructions[x].type)
            for x in instruction.operands
            if x in computation.instructions
        ]
        share = ragged_work(instruction, read)
        element = largest.element if largest else arrays[0].element if arrays else "u8"
        yield InstructionWork(
            name=instruction.name,
            opcode=instruction.opcode,
            count=1,
            flops=round(sum(a.flops for a in arithmetic) * share),
            dtype=dtype_name(element),
            bytes=self.traffic.bytes_of(computation, instruction),
            cycles=cycles,
            op=instruction.op_name,
            source=instruction.source,
            ops=self._ops(instruction),
            vector_ops=count_ops(computation, instruction) * share,
            library=library,
            channels=channels_of(computation, instruction),
        )

    def _library(self, instruction: Instruction) -> Library:
        """Return the algorithm that an instruction calls, or a fusion of a sort."""
        if instruction.opcode == "fusion":
            called = self.module.computations[instruction.called]
            found = (library_of(x) for x in called if x.opcode == "sort")
            return next(found, OWN_KERNEL)
        return library_of(instruction)

    def _arithmetic(
        self, computation: Computation, instruction: Instruction
    ) -> Iterator[Arithmetic]:
        """Yield the FLOPs of an instruction's dots and convolutions, fused or not."""
        if instruction.opcode == "fusion":
            called = self.module.computations[instruction.called]
            for inner in called:
                yield from self._arithmetic(called, inner)
        elif (found := arithmetic_of(computation, instruction)) is not None:
            yield found

    def _ops(self, instruction: Instruction) -> tuple[OpKey, ...]:
        """Return the keys of what an instruction computes, the main one first."""
        inner = list(self._computed(instruction))
        product = next((i for i in inner if i.opcode in _PRODUCTS), instruction)
        every = (product, instruction, *reversed(inner))
        return tuple(dict.fromkeys(_key(i) for i in every if _is_named(i, inner))) or (
            (instruction.source, _key(instruction)[1], ""),
        )

    def _computed(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yield an instruction and, for a fusion, those of its body."""
        yield instruction
        if instruction.opcode == "fusion":
            for inner in self.module.computations[instruction.called]:
                yield from self._computed(inner)

    def _moves(self, name: str) -> bool:
        """Whether a computation contains a collective, or a part of one."""
        return contains(self.module, name, _is_of_transfer, self.moving)


def _key(instruction: Instruction) -> OpKey:
    stack, _, primitive = instruction.op_name.rpartition("/")
    if stack.rpartition("/")[2].startswith((ROWS, MATRICES)):
        primitive = RAGGED_DOTS[0]
    _, direction, _ = op_key(Source(name_stack=stack), primitive)
    return instruction.source, direction, primitive


def _is_named(instruction: Instruction, kernel: Sequence[Instruction]) -> bool:
    """Whether an instruction computes what its name says: copies and casts of a
    product's operands have the product's name, in fusions of other ops too."""
    if not instruction.op_name or instruction.opcode in _UNNAMED:
        return False
    kind = traits_of(_key(instruction)[2]).kind
    is_product = kind in (OpKind.CONTRACTION, OpKind.CONVOLUTION)
    return len(kernel) == 1 or not is_product or instruction.opcode in _PRODUCTS


def _is_of_transfer(instruction: Instruction) -> bool:
    target = custom_call_target(instruction)
    return is_transfer_opcode(instruction.opcode) or target.startswith(
        "AsyncCollective"
    )


def _cycles(instruction: Instruction) -> int | None:
    cycles = int(instruction.find(_CYCLES) or _NO_CYCLES)
    return cycles if cycles < _NO_CYCLES else None


def _is_free(instruction: Instruction) -> bool:
    return (
        instruction.opcode in _FREE
        or instruction.opcode.endswith(_BESIDE)
        or is_transfer_opcode(instruction.opcode)
        or custom_call_target(instruction) in _FREE_CALLS
    )
