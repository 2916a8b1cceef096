"""Recognise collective-permutes in which every device sends along a ring."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rhino_jax.verify.hlo.collectives.groups import parse_pairs
from rhino_jax.verify.hlo.collectives.payload import payload_bytes
from rhino_jax.verify.hlo.module import Computation, Instruction


# Op names of the partitioner's permutes; a user's `ppermute` has its own name.
_PRODUCT = re.compile(r"(?:^|/)(?:dot_general|conv_general_dilated)$")
_PERMUTES = ("collective-permute", "collective-permute-start")
_PASSES = frozenset(
    "bitcast collective-permute-done copy copy-done copy-start get-tuple-element"
    " reshape transpose".split()
)


@dataclass(frozen=True, slots=True)
class Permute:
    """A collective-permute around a ring.

    Attributes:
      computation: the computation that contains it.
      instruction: the permute, or its start.
      shift: device → the device that it sends to.
      bytes: bytes that one device sends.
      ring_size: number of devices of each ring.
      skips_last: whether the last trip of the loop around it skips it.
    """

    computation: Computation
    instruction: Instruction
    shift: Mapping[int, int]
    bytes: int
    ring_size: int
    skips_last: bool = False

    @property
    def name(self) -> str:
        return self.instruction.name

    @property
    def source(self) -> Instruction:
        """The instruction that defines the value that is sent."""
        return origin(self.computation, self.instruction.operands[0])


def ring_permute(
    computation: Computation,
    instruction: Instruction,
    num_devices: int,
    *,
    skips_last: bool = False,
) -> Permute | None:
    """Return the ring permute that an instruction is, or None.

    None, too, where some device does not take part, or rings differ in size.
    """
    if instruction.opcode not in _PERMUTES:
        return None
    shift = dict(parse_pairs(instruction.attributes))
    size = _ring_size(shift)
    if size < 2 or len(shift) != num_devices:
        return None
    sent_bytes = payload_bytes(computation, instruction)
    return Permute(computation, instruction, shift, sent_bytes, size, skips_last)


def _ring_size(shift: Mapping[int, int]) -> int:
    """Return the number of devices of a ring; 0 without one, or where sizes differ."""
    if set(shift) != set(shift.values()):
        return 0
    sizes = set()
    left = set(shift)
    while left:
        start = at = left.pop()
        size = 1
        while (at := shift[at]) != start:
            left.discard(at)
            size += 1
        sizes.add(size)
    return sizes.pop() if len(sizes) == 1 else 0


def origin(computation: Computation, name: str) -> Instruction:
    """Return the instruction that defines a value, looking through copies and such."""
    instruction = computation.instructions[name]
    while instruction.opcode in _PASSES:
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def is_of_product(instruction: Instruction) -> bool:
    """Whether an instruction derives from a matmul or a convolution."""
    return _PRODUCT.search(instruction.op_name) is not None
