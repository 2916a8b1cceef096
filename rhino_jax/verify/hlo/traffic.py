"""Count the bytes that one instruction reads from and writes to memory.

Operands and results count once each, but only the part that is accessed: a slice or a
gather reads its result's size, in a fusion too, also behind elementwise ops, pads,
concatenations and other slices; an in-place update reads and writes the updated part.
Bytes count in whatever memory space the compiler places the array, slow or fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rhino_jax.verify.hlo.flops import custom_call_target
from rhino_jax.verify.hlo.module import Computation, Instruction, Module, arrays_of


_TAKES = frozenset(("slice", "dynamic-slice", "gather"))
# Computed only where their result is read, of each operand the share that is read of
# the result.
_LAZY = frozenset(
    "bitcast reshape copy transpose reverse broadcast pad concatenate"
    " abs add and atan2 cbrt ceil clamp compare complex convert bitcast-convert cosine"
    " divide erf exponential exponential-minus-one floor imag is-finite log"
    " log-plus-one logistic maximum minimum multiply negate not or popcnt power real"
    " reduce-precision remainder round-nearest-afz round-nearest-even rsqrt select"
    " shift-left shift-right-arithmetic shift-right-logical sign sine sqrt subtract"
    " tan tanh xor".split()
)


@dataclass(frozen=True, slots=True)
class MemoryTraffic:
    """Counts the memory traffic of the instructions of one module.

    Attributes:
      module: the program.
      shares: cache: computation → instruction → share of its elements that are read.
    """

    module: Module
    shares: dict[str, dict[str, float]] = field(default_factory=dict)

    def bytes_of(self, computation: Computation, instruction: Instruction) -> int:
        """Return the bytes that one run of an instruction reads and writes."""
        read = sum(
            computation.instructions[name].bytes
            * self._operand_share(computation, instruction, i)
            for i, name in enumerate(instruction.operands)
            if name in computation.instructions
        )
        return round(read) + self._written(computation, instruction)

    def _operand_share(
        self, computation: Computation, user: Instruction, operand: int
    ) -> float:
        """Return the share of an operand that is read, if the result is used whole."""
        name = user.operands[operand]
        if user.opcode == "fusion":
            called = self.module.computations[user.called]
            return self._shares(called)[_parameter(called, operand)]
        of = arrays_of(computation.instructions[name].type)
        size = sum(a.size for a in of)
        if user.opcode in _TAKES and operand == 0 and size:
            return min(1.0, arrays_of(user.type)[0].size / size)
        if user.opcode == "dynamic-update-slice" and operand == 0:
            return 0.0
        if user.opcode == "scatter" and operand < _scattered(user):
            update = user.operands[operand + _scattered(user) + 1]
            arrays = arrays_of(computation.instructions[update].type)
            return min(1.0, sum(a.size for a in arrays) / max(1, size))
        return 1.0

    def _shares(self, computation: Computation) -> Mapping[str, float]:
        """Return the share of each value inside a fusion that is read there."""
        if computation.name in self.shares:
            return self.shares[computation.name]
        users = computation.users()
        shares = self.shares[computation.name] = {computation.root: 1.0}
        # In printed order, users come after their operands.
        for name in reversed(tuple(computation.instructions)):
            if name != computation.root:
                shares[name] = min(
                    1.0, sum(self._taken(computation, name, u) for u in users[name])
                )
        return shares

    def _taken(self, computation: Computation, name: str, user: Instruction) -> float:
        """Return the share of a value inside a fusion that one of its users reads."""
        if user.opcode == "tuple":
            # A result of the fusion. A parameter there is only forwarded.
            return float(computation.instructions[name].opcode != "parameter")
        of_user = self.shares[computation.name][user.name]
        if user.opcode in _LAZY or (
            _updates(user) and not _is_in_place(computation, user)
        ):
            return of_user
        taken = sum(
            self._operand_share(computation, user, i)
            for i, operand in enumerate(user.operands)
            if operand == name
        )
        return taken * of_user if user.opcode in _TAKES else taken

    def _written(self, computation: Computation, instruction: Instruction) -> int:
        """Return the bytes that an instruction of the control flow writes."""
        if instruction.opcode == "fusion":
            called = self.module.computations[instruction.called]
            return sum(self._written_in(called, name) for name in _results(called))
        if _updates(instruction):
            return _update_bytes(computation, instruction)
        if custom_call_target(instruction).startswith(("__cublas$", "__cudnn$")):
            # The rest of the tuple is scratch.
            return arrays_of(instruction.type)[0].bytes
        return instruction.bytes

    def _written_in(self, computation: Computation, name: str) -> int:
        """Return the bytes that a fusion writes for one of its results."""
        result = _behind(computation, name)
        if result.opcode == "parameter":
            return 0
        if _updates(result) and _comes_from_parameter(computation, result):
            return _update_bytes(computation, result)
        if result.opcode == "fusion" and not result.type.startswith("("):
            called = self.module.computations[result.called]
            return sum(self._written_in(called, x) for x in _results(called))
        return computation.instructions[name].bytes


def _parameter(computation: Computation, number: int) -> str:
    return next(
        i.name
        for i in computation
        if i.opcode == "parameter" and i.operands == (str(number),)
    )


def _results(computation: Computation) -> tuple[str, ...]:
    root = computation.instructions[computation.root]
    return root.operands if root.opcode == "tuple" else (root.name,)


def _behind(computation: Computation, name: str) -> Instruction:
    return computation.origin(name, ("bitcast",))


def _updates(instruction: Instruction) -> bool:
    return instruction.opcode in ("dynamic-update-slice", "scatter")


def _is_in_place(computation: Computation, update: Instruction) -> bool:
    """Whether an update inside a fusion writes into an argument's buffer."""
    return _comes_from_parameter(computation, update) and any(
        _behind(computation, name).name == update.name for name in _results(computation)
    )


def _comes_from_parameter(computation: Computation, update: Instruction) -> bool:
    return _behind(computation, update.operands[0]).opcode == "parameter"


def _scattered(scatter: Instruction) -> int:
    """Return the number of arrays that a scatter updates."""
    return (len(scatter.operands) - 1) // 2


def _update_bytes(computation: Computation, update: Instruction) -> int:
    """Return the bytes of the updates of a dynamic-update-slice or a scatter."""
    if update.opcode == "dynamic-update-slice":
        return computation.instructions[update.operands[1]].bytes
    names = update.operands[_scattered(update) + 1 :]
    return sum(computation.instructions[x].bytes for x in names)
