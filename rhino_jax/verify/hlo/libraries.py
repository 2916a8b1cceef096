"""Recognise the device libraries that instructions call, and count their operations."""

from __future__ import annotations

import math
import re

from rhino_jax.ir.traits import OWN_KERNEL, Library
from rhino_jax.verify.hlo.instruction_cost import custom_call_target
from rhino_jax.verify.hlo.module import Computation, Instruction, arrays_of


_FFT_LENGTH = re.compile(r"\bfft_length=\{([\d,]*)\}")
# Targets of XLA:GPU's calls of cuSOLVER and CUB, and the primitive or algorithm.
_FACTORS = {
    "potrf": 1 / 3, "getrf": 2 / 3, "geqrf": 4 / 3, "orgqr": 4 / 3, "ungqr": 4 / 3,
    "sytrd": 4 / 3, "syevd": 9.0, "gesvd": 21.0,
}  # fmt: skip
_SORTS = ("cub_sort", "TopK")


def library_of(instruction: Instruction) -> Library:
    """Return the algorithm of a device library that an instruction calls."""
    target = custom_call_target(instruction)
    if instruction.opcode == "fft":
        dims = instruction.find(_FFT_LENGTH).count(",") + 1
        # The inverse real transform destroys its operand: XLA copies it first.
        return Library("fourier", dims + (instruction.attribute("fft_type") == "IRFFT"))
    if instruction.opcode == "sort" or any(name in target for name in _SORTS):
        return Library("sorting", arrays_of(instruction.type)[0].item_bytes)
    if "triangularSolve" in target or any(name in target for name in _FACTORS):
        return Library("factoring")
    return OWN_KERNEL


def factor_flops(computation: Computation, instruction: Instruction) -> float:
    """Return the operations of a factorisation, or of a triangular solve."""
    operands = [computation.instructions[x] for x in instruction.operands]
    *batch, rows, columns = arrays_of(operands[0].type)[0].dims
    if len(operands) > 1 and "triangular" in custom_call_target(instruction):
        return float(columns * arrays_of(operands[1].type)[0].size)
    share = next(n for x, n in _FACTORS.items() if x in custom_call_target(instruction))
    return share * math.prod(batch) * rows * columns * min(rows, columns)
