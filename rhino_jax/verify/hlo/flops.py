"""Count the FLOPs of one instruction: dots and convolutions, two per multiply-add.

A tap of a convolution that falls on padding, or between the elements of a dilated
input, multiplies nothing and does not count. So the gradients of a convolution without
padding count as much as the convolution, and the convolutions that XLA:TPU emits for
batched dots (batch dims as windows over a dilated input) as much as the dots. Redundant
work of the compiler does count: an input that XLA:TPU split into overlapping, padded
tiles, dots that XLA:GPU merged by padding one of them. A ragged dot whose kernel skips
the tiles of other groups (XLA:TPU) counts every row once.

Source: `HloCostAnalysis::GetConvolutionFlops` of XLA, which counts the same way.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

import numpy as np

from rhino_jax.verify.hlo.module import Computation, HloArray, Instruction, arrays_of


_NAMES = {
    "pred": "bool", "f64": "float64", "f32": "float32", "f16": "float16",
    "bf16": "bfloat16", "c64": "complex64", "c128": "complex128",
}  # fmt: skip


def dtype_name(element: str) -> str:
    """Return JAX's name of an element type: `float8_e4m3fn` for `f8e4m3fn`."""
    if element in _NAMES:
        return _NAMES[element]
    family, rest = element[0], element[1:]
    if family == "f":
        return f"float{rest[0]}_{rest[1:]}"
    return {"s": "int", "u": "uint"}.get(family, element) + rest


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """FLOPs of one run of an instruction.

    Attributes:
      flops: floating-point operations.
      element: element type of the operands, as `bf16`; the wider of the two.
    """

    flops: int
    element: str


def arithmetic_of(
    computation: Computation, instruction: Instruction
) -> Arithmetic | None:
    """Return the FLOPs of a dot, a convolution or a library call of one.

    None for every other instruction; bodies of fusions and loops are not counted.
    """
    operands = [
        arrays_of(computation.instructions[x].type)
        for x in instruction.operands
        if x in computation.instructions
    ]
    if len(operands) < 2 or not all(operands[:2]):
        return _stated(instruction, operands)
    lhs, rhs = operands[0][0], operands[1][0]
    (result, *_) = arrays_of(instruction.type)
    flops = _flops(instruction, lhs, rhs, result)
    if flops is None:
        return _stated(instruction, operands)
    wider = max(lhs, rhs, key=lambda a: HloArray(a.element, ()).bytes)
    return Arithmetic(flops, wider.element)


def _flops(
    instruction: Instruction, lhs: HloArray, rhs: HloArray, result: HloArray
) -> int | None:
    match instruction.opcode:
        case "dot":
            contracted = _numbers(_CONTRACTED, instruction)
            return 2 * result.size * math.prod(lhs.dims[d] for d in contracted)
        case "convolution":
            return _convolution_flops(instruction, lhs, rhs, result)
        case "custom-call":
            return _library_flops(instruction, lhs, rhs, result)
    return None


_CONTRACTED = re.compile(r"\blhs_contracting_dims=\{([\d,]*)\}")
_LIBRARY_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([\d",]*)\]')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_STATED = re.compile(r'"cost_estimate":\{[^{}]*"flops":"?(\d+)')


def custom_call_target(instruction: Instruction) -> str:
    """Return the target of a custom call; empty for other opcodes."""
    return instruction.find(_TARGET)


def _numbers(pattern: re.Pattern[str], instruction: Instruction) -> tuple[int, ...]:
    text = instruction.find(pattern).replace('"', "")
    return tuple(int(x) for x in text.split(",") if x)


def _library_flops(
    instruction: Instruction, lhs: HloArray, rhs: HloArray, result: HloArray
) -> int | None:
    """Return the FLOPs of a cuBLAS or cuDNN call."""
    target = custom_call_target(instruction)
    if target.startswith("__cublas$"):
        contracted = _numbers(_LIBRARY_CONTRACTED, instruction)
        return 2 * result.size * math.prod(lhs.dims[d] for d in contracted)
    if not target.startswith("__cudnn$conv"):
        return None
    # The dim labels are those of the forward convolution.
    if target == "__cudnn$convBackwardInput":
        lhs, result = result, lhs
    elif target == "__cudnn$convBackwardFilter":
        rhs, result = result, rhs
    return _convolution_flops(instruction, lhs, rhs, result)


def _stated(
    instruction: Instruction, operands: list[tuple[HloArray, ...]]
) -> Arithmetic | None:
    """Return the FLOPs that a kernel declares (`pallas.CostEstimate`), or None."""
    stated = instruction.find(_STATED)
    if instruction.opcode != "custom-call" or not stated:
        return None
    largest = max((a for x in operands for a in x), key=lambda a: a.bytes, default=None)
    return Arithmetic(int(stated), largest.element if largest else "f32")


_RAGGED = re.compile(
    r'"is_ragged_dot":true,"num_groups_in_ragged_dot":"(\d+)".*'
    r'"iteration_skipper_mode":"ITERATION_SKIPPER_MODE_GROUP_STARTS"'
)


def skipped_groups(instruction: Instruction) -> int:
    """Return the number of groups of a ragged dot with group skipping; 1 for others.

    libtpu's estimate of cycles counts all groups, and the zeros between the elements of
    the dilated input that it writes them as: it grows with the square of their number.
    """
    return int(instruction.find(_RAGGED) or 1)


_LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
_GROUPS = re.compile(r"\b(feature|batch)_group_count=(\d+)")


def _convolution_flops(
    instruction: Instruction, lhs: HloArray, rhs: HloArray, result: HloArray
) -> int:
    labels = _LABELS.search(instruction.attributes)
    if labels is None:
        raise ValueError(f"no dim_labels in {instruction.attributes[:200]!r}")
    of_lhs, of_rhs, of_result = labels.groups()
    groups = {kind: int(n) for kind, n in _GROUPS.findall(instruction.attributes)}
    window = dict(x.split("=") for x in instruction.find(_WINDOW).split())
    taps = 1
    for i, label in enumerate(x for x in sorted(of_rhs) if x.isdigit()):
        taps *= _taps(
            lhs.dims[of_lhs.index(label)],
            rhs.dims[of_rhs.index(label)],
            result.dims[of_result.index(label)],
            _of_dim(window, "stride", i),
            _of_dim(window, "lhs_dilate", i),
            _of_dim(window, "rhs_dilate", i),
            int(window["pad"].split("x")[i].split("_")[0]) if "pad" in window else 0,
        )
    batch = lhs.dims[of_lhs.index("b")] // groups.get("batch", 1)
    features = lhs.dims[of_lhs.index("f")] // groups.get("feature", 1)
    return 2 * taps * batch * features * result.dims[of_result.index("f")]


def _of_dim(window: dict[str, str], name: str, dim: int) -> int:
    return int(window[name].split("x")[dim]) if name in window else 1


@functools.cache
def _taps(
    inputs: int,
    kernel: int,
    outputs: int,
    stride: int,
    input_step: int,
    kernel_step: int,
    pad_low: int,
) -> int:
    """Count the pairs of output and kernel positions that meet an input element."""
    starts = np.arange(outputs, dtype=np.int64) * stride - pad_low
    total = 0
    for tap in range(kernel):
        at = starts + tap * kernel_step
        met = (at >= 0) & (at % input_step == 0) & (at < inputs * input_step)
        total += int(np.count_nonzero(met))
    return total
