"""Find reductions over devices whose operand is replicated: wrong numbers.

A sum over an axis adds partial sums. Where its operand is replicated along an axis of
its groups, the result is too large by that axis's size: XLA's partitioner emits such
sums for some convolutions. A value is known to be replicated along an axis if
everything that it is computed from is: arguments by their sharding, constants, and
results of collectives over it. Unknown values count as different, so that every finding
is an error.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rhino_jax.ir.collectives import OF_OPCODE, CollectiveKind, Pattern
from rhino_jax.verify.hlo.collectives.groups import (
    NONE,
    Axes,
    Known,
    MeshMap,
    State,
    axes_of_sharding,
    both,
    meet,
    moved_along,
    parse_groups,
    parse_pairs,
    part,
    same_along,
    within,
)
from rhino_jax.verify.hlo.module import (
    Computation,
    Instruction,
    Module,
    called_names,
)


_LONGEST_TABLE = 4096
"""Largest number of elements of a constant that is read: one per device of any mesh."""

_ELEMENTS = re.compile(r"^(?:[su]\d+)\[([\d,]*)\]")

_ARITHMETIC: Mapping[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "and": operator.and_,
    "maximum": max,
    "minimum": min,
    "shift-right-logical": operator.rshift,
    "divide": lambda a, b: a // b if b else 0,
    "remainder": lambda a, b: a % b if b else 0,
}
"""Opcode → arithmetic of non-negative integers."""

_UNCHANGED = frozenset({
    "reshape", "bitcast", "copy", "copy-start", "copy-done", "convert", "broadcast",
})  # fmt: skip
_COPIES = frozenset({"copy", "copy-start", "copy-done"})

_EMPTY = 'custom_call_target="AllocateBuffer"'
"""Buffers that XLA:TPU writes before it reads them."""

_DIFFERENT = frozenset({
    "replica-id", "rng", "rng-get-and-update-state", "infeed", "recv",
    "recv-done",
})  # fmt: skip
"""Opcodes whose results depend on more than the operands."""

_LIBRARIES = re.compile(r'custom_call_target="(?:__cu|__onednn|lapack_|blas_)')
"""Custom calls that are pure functions of their operands."""


@dataclass(frozen=True, slots=True)
class RepeatedSum:
    """A reduction that adds the same parts several times.

    Attributes:
      kind: "all-reduce" or "reduce-scatter".
      axes: mesh axes of its groups.
      repeated: axes among these along which its operand is replicated.
      times: factor by which the result is too large.
      op: JAX's name of the operation.
      source: the user's source line.
    """

    kind: str
    axes: tuple[str, ...]
    repeated: tuple[str, ...]
    times: int
    op: str
    source: str

    def __str__(self) -> str:
        over, of = " × ".join(self.axes), " × ".join(self.repeated)
        where = f" at {self.source}" if self.source else ""
        return (
            f"{self.kind} over {over} sums what is the same along {of}{where}: the"
            f" result is {self.times} times too large."
        )


def repeated_sums(
    module: Module,
    mesh: MeshMap,
    parameter_axes: Sequence[frozenset[str] | None] = (),
) -> tuple[RepeatedSum, ...]:
    """Find the reductions of a compiled program that add parts several times.

    Args:
      module: the compiled program.
      mesh: mesh coordinates of its devices.
      parameter_axes: mesh axes that each parameter is sharded over; used where the HLO
        text does not say, as that of XLA:TPU.
    """
    walk = _ReductionWalk(module, mesh)
    entry = module.computations[module.entry]
    parameters = [i for i in entry if i.opcode == "parameter"]
    given: dict[str, State] = {}
    for i in parameters:
        axes, at = axes_of_sharding(i.attributes, mesh), int(i.operands[0])
        if not axes and len(parameter_axes) == len(parameters):
            sharded = parameter_axes[at]
            if sharded is not None and "sharding=" not in i.attributes:
                axes = frozenset(mesh.names) - sharded
        given[i.name] = axes
    walk.run(entry, given, is_final=True)
    return tuple(walk.found)


def by_compiler(
    found: Iterable[RepeatedSum],
    written: Mapping[str, frozenset[str]] | None = None,
    *,
    in_stages: bool = False,
) -> tuple[RepeatedSum, ...]:
    """Return the reductions that the compiler made, not the user.

    A `psum` in a user's `shard_map` may add replicated parts on purpose.

    Args:
      found: reductions of a program.
      written: source line → axes of the reductions that it requests; None: they are not
        known, and may be any in a `shard_map`.
      in_stages: whether the whole program is in a `shard_map` of the plan's own (an
        SPMD pipeline).
    """

    def is_written(x: RepeatedSum) -> bool:
        if x.op.split("/").count("shard_map") <= in_stages:
            return False
        if written is None:
            return True
        # XLA may give a combined all-reduce the name of one of its parts.
        every = frozenset[str]().union(*written.values())
        return written.get(x.source, every).issuperset(x.repeated)

    return tuple(x for x in found if not is_written(x))


@dataclass(slots=True)
class _ReductionWalk:
    """Abstract interpretation of computations in run order.

    Attributes:
      module, mesh: arguments of `repeated_sums`.
      found: the reductions that add parts several times.
    """

    module: Module
    mesh: MeshMap
    found: list[RepeatedSum] = field(default_factory=list)

    def run(
        self,
        computation: Computation,
        given: Mapping[str, State],
        *,
        is_final: bool,
    ) -> State:
        """Return the state of a computation's result.

        Args:
          computation: the computation.
          given: states of its parameters, by name.
          is_final: whether `given` is exact, and not an assumption for a loop.
        """
        states: dict[str, State] = dict(given)
        for instruction in computation:
            if instruction.opcode != "parameter":
                states[instruction.name] = self._state(instruction, states, is_final)
        return states.get(computation.root, NONE)

    def _state(
        self, instruction: Instruction, states: Mapping[str, State], is_final: bool
    ) -> State:
        opcode = instruction.opcode
        operands = [states.get(x, NONE) for x in instruction.operands]
        if opcode in ("constant", "iota"):
            return self._constant(instruction)
        if _EMPTY in instruction.attributes:
            return frozenset(self.mesh.names)
        if opcode == "partition-id":
            return self._per_device(range(self.mesh.num_devices))
        known = self._known(instruction, operands)
        if known is not None:
            return known
        if opcode in _DIFFERENT or not operands:
            return NONE
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            return part(operands[0], int(instruction.attribute("index") or 0))
        if opcode.endswith(("-done", "-update")) or opcode == "opt-barrier":
            return operands[0]
        if opcode == "while":
            return self._loop(instruction, operands[0], is_final)
        if opcode == "conditional":
            return self._branches(instruction, operands, is_final)
        if opcode in ("fusion", "call", "async-start"):
            (name,) = called_names(instruction)[:1] or ("",)
            return self._call(name, operands, is_final)
        if opcode == "custom-call" and not _LIBRARIES.search(instruction.attributes):
            return NONE
        kind = OF_OPCODE.get(opcode.removesuffix("-start"))
        if kind is None:
            return meet(operands)
        if kind.has_pairs:
            return self._permute(instruction, operands)
        if kind.pattern is Pattern.HOP or not opcode.startswith(kind.name):
            return NONE  # one device's data, or shares of unknown sizes
        return self._collective(kind, instruction, operands, is_final)

    def _constant(self, instruction: Instruction) -> State:
        every = frozenset(self.mesh.names)
        found = _ELEMENTS.match(instruction.type)
        if instruction.opcode == "iota" or found is None:
            return every
        count = int(np.prod([int(x) for x in found.group(1).split(",") if x]))
        values = re.findall(r"-?\d+", instruction.operands[0])
        if len(values) != count or count > _LONGEST_TABLE:
            return every
        return Known(tuple(map(int, values)), True, every)

    def _per_device(self, values: Iterable[int]) -> State:
        values, places = tuple(values), self.mesh.coordinates
        if sorted(places) != list(range(len(values))):
            return NONE
        by_place = {place: values[device] for device, place in places.items()}
        return Known(values, False, same_along(by_place, self.mesh))

    def _known(
        self, instruction: Instruction, operands: Sequence[State]
    ) -> State | None:
        """Return the known integers of an instruction, or None."""
        known = [x for x in operands if isinstance(x, Known)]
        opcode, devices = instruction.opcode, range(self.mesh.num_devices)
        if not known or len(known) != len(operands):
            return None
        if opcode in _UNCHANGED and (known[0].is_scalar or opcode in _COPIES):
            return known[0]
        if len(known) != 2 or not known[1].is_scalar:
            return None
        one, other = known
        if opcode == "dynamic-slice" and one.is_table:
            last = len(one.values) - 1
            is_single = "dynamic_slice_sizes={1}" in instruction.attributes
            if not is_single:
                return None
            places = (min(max(other.at(d), 0), last) for d in devices)
            return self._per_device(one.values[i] for i in places)
        compute = _ARITHMETIC.get(opcode)
        if compute is None or not one.is_scalar:
            return None
        pairs = [(one.at(d), other.at(d)) for d in devices]
        if any(a < 0 or b < 0 for a, b in pairs):
            return None
        return self._per_device(compute(a, b) for a, b in pairs)

    def _call(self, name: str, operands: Sequence[State], is_final: bool) -> State:
        computation = self.module.computations.get(name)
        if computation is None:
            return NONE
        given: dict[str, State] = {}
        for i in computation:
            if i.opcode == "parameter":
                at = int(i.operands[0])
                given[i.name] = operands[at] if at < len(operands) else NONE
        return self.run(computation, given, is_final=is_final)

    def _loop(self, loop: Instruction, start: State, is_final: bool) -> State:
        """Return the fixed point of a loop's state."""
        body, condition = loop.attribute("body"), loop.attribute("condition")
        state = start
        while True:
            stops = meet([self._call(condition, [state], False)])
            after = both(self._call(body, [state], False), state)
            after = within(after, stops)
            if after == state:
                break
            state = after
        if is_final:
            self._call(body, [state], True)
        return state

    def _branches(
        self, instruction: Instruction, operands: Sequence[State], is_final: bool
    ) -> State:
        names = called_names(instruction)
        chosen = meet(operands[:1])
        results = [
            self._call(name, [x], is_final)
            for name, x in zip(names, operands[1:], strict=False)
        ]
        if not results:
            return NONE
        state = results[0]
        for other in results[1:]:
            state = both(state, other)
        return within(state, chosen)

    def _collective(
        self,
        kind: CollectiveKind,
        instruction: Instruction,
        operands: Sequence[State],
        is_final: bool,
    ) -> State:
        groups = parse_groups(instruction.attributes, self.module.num_partitions)
        axes, is_whole = self.mesh.axes_of(groups)
        adds = kind.sums and self._adds(instruction)
        results: list[Axes] = []
        for operand in operands:
            same = meet([operand])
            repeated = [x for x in axes if x in same]
            if adds and repeated and is_final:
                self._report(kind.name, instruction, axes, repeated)
            if not is_whole:
                results.append(NONE)
            elif kind.replicates:
                results.append(same | {*axes})
            else:
                results.append(same - {*axes})
        if kind.pattern is Pattern.EXCHANGE or instruction.opcode.endswith("-start"):
            return meet(results)
        return results[0] if len(results) == 1 else tuple(results)

    def _adds(self, instruction: Instruction) -> bool:
        reduction = self.module.computations.get(instruction.attribute("to_apply"))
        return reduction is not None and any(i.opcode == "add" for i in reduction)

    def _report(
        self,
        kind: str,
        instruction: Instruction,
        axes: Sequence[str],
        repeated: Sequence[str],
    ) -> None:
        sizes = dict(zip(self.mesh.names, self.mesh.sizes, strict=True))
        times = int(np.prod([sizes[x] for x in repeated]))
        one = RepeatedSum(
            kind,
            tuple(axes),
            tuple(repeated),
            times,
            instruction.op_name,
            instruction.source,
        )
        if one not in self.found:
            self.found.append(one)

    def _permute(self, instruction: Instruction, operands: Sequence[State]) -> State:
        """Return the state after a permute.

        An axis that no device sends over stays replicated only if the permute sends in
        the same way at all of its coordinates.
        """
        pairs = parse_pairs(instruction.attributes)
        moved, _ = self.mesh.axes_of(pairs)
        same = meet(operands) - {*moved}
        places = self.mesh.coordinates
        sent = {(places[a], places[b]) for a, b in pairs}
        for axis, size in zip(self.mesh.names, self.mesh.sizes, strict=True):
            if axis in same:
                at = self.mesh.names.index(axis)
                every = {
                    (moved_along(a, at, i), moved_along(b, at, i))
                    for a, b in sent
                    for i in range(size)
                }
                same = same if every == sent else same - {axis}
        return same
