"""Read every collective of a compiled program: kind, axes, bytes and trip count.

Bytes are what one device puts on the wire, in the convention of a plan's `Collective`,
for a group of n devices:

    all-reduce          2 (n-1)/n × operand
    all-gather            (n-1)/n × result
    reduce-scatter        (n-1)/n × operand
    all-to-all            (n-1)/n × operand
    collective-permute              operand

An asynchronous transfer counts once, where it starts. Several arrays combined into one
collective are one collective. A collective inside loops counts once per trip. Of the
branches of a conditional, the one with the most bytes counts. Permutes of a windowed
einsum (`windowed`) count as the all-gather or reduce-scatter that they implement, with
their own bytes.

Most collectives carry the name of the user's operation that they belong to (`name_of`).
Some that the compiler combined, moved or wrapped do not; then their callers, the
definition of their operand or the users of their result tell.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from rhino_jax.cost.collectives import wire_bytes
from rhino_jax.ir.collectives import ALL_REDUCE, KINDS, REDUCE_SCATTER
from rhino_jax.verify.hlo.collectives.groups import (
    Groups,
    MeshMap,
    parse_groups,
    parse_pairs,
)
from rhino_jax.verify.hlo.collectives.payload import (
    Users,
    collective_kind,
    is_in_chain,
    is_overlapped,
    payload_bytes,
    slice_groups,
    slice_kind,
    starts_chain,
)
from rhino_jax.verify.hlo.collectives.windowed import Window, find_windows
from rhino_jax.verify.hlo.loops import ControlFlow, control_flow
from rhino_jax.verify.hlo.module import (
    Computation,
    Instruction,
    Module,
    called_names,
    contains,
)
from rhino_jax.verify.hlo.records import CompiledCollective


_MAX_STEPS = 10


Place = tuple[Computation, Instruction]


def name_of(kind: str, *places: Place) -> tuple[str, str]:
    """Return JAX's op name and the user's source line of a collective.

    Args:
      kind: kind of the collective. Without a name of its own, a reduction is named by
        its operand's definition, any other kind by the users of its result.
      places: the collective, or its start, and the callers of its computation (a
        fusion, an asynchronous start), innermost first.
    Returns:
      Op name, or the instruction's name where nothing near has one; source line, or
      empty.
    """
    near = itertools.chain(
        (instruction for _, instruction in places),
        *(_around(kind, *place) for place in places),
    )
    op = source = ""
    for instruction in near:
        op, source = op or instruction.op_name, source or instruction.source
        if op and source:
            break
    return op or places[0][1].name, source


def _around(
    kind: str, computation: Computation, instruction: Instruction
) -> Iterator[Instruction]:
    users = computation.users()
    makers = _makers(computation, instruction, users)
    # Users of a fusion that starts a transfer only compute while it runs.
    readers = () if instruction.opcode == "fusion" else _readers(instruction, users)
    first, second = (makers, readers) if KINDS[kind].sums else (readers, makers)
    yield from first
    yield from second


def _makers(
    computation: Computation, instruction: Instruction, users: Users
) -> Iterator[Instruction]:
    at = instruction
    for _ in range(_MAX_STEPS):
        names = at.operands
        if not names and users[at.name]:
            # Some transfers are prepared first, and receive their data in an update.
            names = users[at.name][0].operands[1:]
        if not names or names[0] not in users:
            return
        at = computation.instructions[names[0]]
        yield at


def _readers(instruction: Instruction, users: Users) -> Iterator[Instruction]:
    at = instruction
    for _ in range(_MAX_STEPS):
        if not users[at.name]:
            return
        at = users[at.name][0]
        yield at


@dataclass(frozen=True, slots=True)
class _Trips:
    """The number of runs of a computation in a step, and its callers.

    Attributes:
      count: product of the trip counts of all loops around it.
      is_known: False where a loop's count depends on data.
      is_async: whether the computation is one transfer that overlaps with compute.
      callers: the fusion or start that calls the computation, and its place; empty for
        a loop's.
      done: instructions (names are unique in a module) that are counted elsewhere.
    """

    count: int = 1
    is_known: bool = True
    is_async: bool = False
    callers: tuple[Place, ...] = ()
    done: frozenset[str] = frozenset()

    def times(self, flow: ControlFlow) -> _Trips:
        """Return the trips of a computation that runs here as often as in `flow`."""
        return replace(
            self,
            count=self.count * flow.trips,
            is_known=self.is_known and flow.is_known,
        )


@dataclass(frozen=True, slots=True)
class CollectiveReader:
    """Walks the call graph of one module.

    Attributes:
      module: the program.
      mesh: mesh coordinates of its devices.
      moving: cache: computation → whether it, or a callee, has a collective.
      users: cache: computation → users of each value in it.
      windowed: permute of a windowed einsum → one run of the collective that it is part
        of, and how many permutes that run takes; known after `read_all`.
    """

    module: Module
    mesh: MeshMap
    moving: dict[str, bool] = field(default_factory=dict)
    users: dict[str, Users] = field(default_factory=dict)
    windowed: dict[str, tuple[CompiledCollective, int]] = field(default_factory=dict)

    def read_all(self) -> tuple[CompiledCollective, ...]:
        """Return the program's collectives, in run order.

        One record per collective of the text, summed over its trips. `seconds` is 0,
        since the text has no times. `op` is JAX's name of the operation. `is_async`
        says whether compute runs between start and done. `reason` names what is
        unusual: a loop whose count depends on data, part of an axis, a windowed einsum.
        """
        return tuple(self.read(self.module.computations[self.module.entry], _Trips()))

    def read_one(
        self, computation: Computation, instruction: Instruction
    ) -> Iterator[CompiledCollective]:
        """Yield the collectives of one run of an instruction; permutes are not taken
        for parts of a windowed einsum."""
        return self._read_one(computation, instruction, None, _Trips())

    def read(
        self, computation: Computation, trips: _Trips
    ) -> Iterator[CompiledCollective]:
        windows = find_windows(self.module, computation)
        starts = {window.first.name: window for window in windows}
        skip = trips.done.union(
            permute.instruction.name for window in windows for permute in window.outer
        )
        for instruction in computation:
            window = starts.get(instruction.name)
            if window is not None:
                yield from self._window(computation, window, trips)
            if instruction.name not in skip:
                yield from self._read_one(computation, instruction, window, trips)

    def _read_one(
        self,
        computation: Computation,
        instruction: Instruction,
        window: Window | None,
        trips: _Trips,
    ) -> Iterator[CompiledCollective]:
        kind = collective_kind(instruction)
        if kind:
            found = self._collective(kind, computation, instruction, trips)
            if found is not None:
                yield found
            return
        is_end = instruction.opcode.endswith(("-done", "-update"))
        if is_end or not any(map(self._moves, called_names(instruction))):
            return  # an asynchronous operation counts where it starts
        flow = control_flow(self.module, computation, instruction)
        callers = ((computation, instruction), *trips.callers)
        inner = replace(
            trips.times(flow), callers=() if instruction.opcode == "while" else callers
        )
        if instruction.opcode.endswith("-start"):
            is_async = is_overlapped(computation, instruction)
            inner = replace(inner, is_async=is_async)
        if window is not None:
            names = (p.instruction.name for p in window.inner)
            inner = replace(inner, done=inner.done.union(names))
        branches = [
            [
                record
                for name in filter(self._moves, names)
                for record in self.read(self.module.computations[name], inner)
            ]
            for names in flow.branches
        ]
        yield from max(branches, key=lambda b: sum(c.bytes for c in b))

    def _moves(self, name: str) -> bool:
        """Whether a computation contains a collective."""
        return contains(self.module, name, collective_kind, self.moving)

    def _collective(
        self,
        kind: str,
        computation: Computation,
        instruction: Instruction,
        trips: _Trips,
    ) -> CompiledCollective | None:
        """Return the record of one instruction; None if empty or counted before."""
        is_async = trips.is_async or is_overlapped(computation, instruction)
        if is_in_chain(computation, instruction):
            if computation.name not in self.users:
                self.users[computation.name] = computation.users()
            if not starts_chain(instruction, self.users[computation.name]):
                return None
            is_async = True
        notes = []
        operand_bytes = payload_bytes(computation, instruction)
        groups = self._groups(kind, instruction)
        if KINDS[kind].has_pairs:
            axes, each_bytes = self.mesh.axes_of(groups)[0], operand_bytes
        else:
            axes, is_whole = self.mesh.axes_of(groups)
            size = max(len(g) for g in groups)
            # XLA:TPU fuses all-reduce and slice; the computation's name says so.
            if kind == ALL_REDUCE and "all-reduce-scatter" in computation.name:
                kind = REDUCE_SCATTER
            local_bytes = operand_bytes * (size if KINDS[kind].gathers else 1)
            each_bytes = round(wire_bytes(kind, local_bytes, size))
            if not is_whole:
                notes.append(f"over groups of {size}")
        if not axes:
            return None
        name = name_of(kind, (computation, instruction), *trips.callers)
        return _record(kind, axes, each_bytes, name, trips, is_async, notes)

    def _groups(self, kind: str, instruction: Instruction) -> Groups:
        """Return the groups of devices that exchange data; for a permute, its pairs."""
        if slice_kind(instruction):
            return slice_groups(instruction, self.module.num_partitions)
        if KINDS[kind].has_pairs:
            return parse_pairs(instruction.attributes)
        return parse_groups(instruction.attributes, self.module.num_partitions)

    def _window(
        self, computation: Computation, window: Window, trips: _Trips
    ) -> Iterator[CompiledCollective]:
        """Yield the record of the collective that a window's permutes implement."""
        inside = _Trips()
        if window.loop is not None:
            inside = inside.times(control_flow(self.module, computation, window.loop))
        runs = list(window.runs(inside.count))
        number = sum(times for _, times in runs)
        sent_bytes = sum(times * p.bytes for p, times in runs)
        pairs = tuple(pair for p, _ in runs for pair in p.shift.items())
        overlapped = sum(
            times for p, times in runs if is_overlapped(p.computation, p.instruction)
        )
        found = _record(
            window.kind,
            self.mesh.axes_of(pairs)[0],
            sent_bytes,
            name_of(window.kind, (computation, window.first)),
            replace(trips, is_known=trips.is_known and inside.is_known),
            2 * overlapped >= number,
            [f"decomposed into a windowed loop of {number} permutes"],
            times=window.count,
        )
        once = replace(found, bytes=sent_bytes, count=window.count)
        for permute, _ in runs:
            self.windowed[permute.instruction.name] = once, number
        yield found


def _record(
    kind: str,
    axes: tuple[str, ...],
    run_bytes: int,
    name: tuple[str, str],
    trips: _Trips,
    is_async: bool,
    notes: list[str],
    *,
    times: int = 1,
) -> CompiledCollective:
    """Return one record; `run_bytes` and `times` are per run of the computation."""
    if not trips.is_known:
        notes = ["in a loop whose count depends on data", *notes]
    return CompiledCollective(
        kind=kind,
        axes=axes,
        bytes=run_bytes * trips.count,
        count=times * trips.count,
        seconds=0.0,
        op=name[0],
        source=name[1],
        reason="; ".join(notes),
        is_async=is_async,
    )
