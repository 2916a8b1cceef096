"""Classify a collective instruction, and compute the bytes that one device sends."""

from __future__ import annotations

import math
import re

from rhino_jax.verify.hlo.collectives.slices import slice_kind
from rhino_jax.verify.hlo.module import Computation, Instruction, type_bytes


_KINDS = {
    "all-reduce": "all-reduce",
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "collective-permute",
    "collective-broadcast": "collective-broadcast",
}
_SLICE_SIZES = re.compile(r"slice_sizes=\{((?:\{[\d,]*\},?\s*)+)\}")
_ELEMENT = re.compile(r"\(?\s*([a-z]\w*)\[")


def collective_kind(instruction: Instruction) -> str:
    """Return the collective kind of an instruction or async start, or empty."""
    kind = _KINDS.get(instruction.opcode.removesuffix("-start"), "")
    return kind or slice_kind(instruction)


def payload_bytes(computation: Computation, instruction: Instruction) -> int:
    """Return the bytes of a collective's operands on one device.

    A permute may copy slices straight into place; its further operands are then
    the place and the offsets. A ragged all-to-all carries offsets and sizes, too.
    """
    operands = [computation.instructions[x] for x in instruction.operands]
    slices = _SLICE_SIZES.search(instruction.attributes)
    if slices is not None:
        element = _ELEMENT.match(operands[0].type)
        one = type_bytes(f"{element.group(1)}[]") if element else 0
        shapes = re.findall(r"\{([\d,]*)\}", slices.group(1))
        return one * sum(math.prod(map(int, s.split(","))) for s in shapes)
    if instruction.opcode.startswith("ragged-all-to-all"):
        return operands[0].bytes
    return sum(operand.bytes for operand in operands)


def wire_bytes(kind: str, operand_bytes: int, size: int) -> int:
    """Return the bytes that one of `size` devices puts on the wire."""
    if kind == "all-reduce":
        return round(2 * (size - 1) * operand_bytes / size)
    if kind == "all-gather":
        return (size - 1) * operand_bytes
    if kind in ("collective-broadcast", "collective-permute"):
        return operand_bytes
    return round((size - 1) * operand_bytes / size)
