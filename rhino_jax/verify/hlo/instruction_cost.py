"""Count the arithmetic of one instruction, and the bytes that it reads and writes.

FLOPs are those of dots and convolutions, two per multiply-add. A tap of a convolution
that falls on padding, or between the elements of a dilated input, multiplies nothing
and does not count. So the gradients of a convolution without padding count as much as
the convolution, and the convolutions that XLA:TPU emits for batched dots (batch dims as
windows over a dilated input) as much as the dots. Redundant work of the compiler does
count: an input that XLA:TPU split into overlapping, padded tiles, dots that XLA:GPU
merged by padding one of them. A ragged dot whose kernel skips the tiles of other groups
(XLA:TPU) counts the tiles that it visits.

Source: `HloCostAnalysis::GetConvolutionFlops` of XLA, which counts the same way.

Bytes of operands and results count once each, but only the part that is accessed: a
slice or a gather reads its result's size, in a fusion too, also behind elementwise ops,
pads, concatenations and other slices; an in-place update reads and writes the updated
part. Bytes count in whatever memory space the compiler places the array, slow or fast.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rhino_jax.verify.hlo.fused_attention import FUSED_ATTENTION, fused_attention_flops
from rhino_jax.verify.hlo.grouped import TRITON, grouped_flops
from rhino_jax.verify.hlo.module import (
    Computation,
    HloArray,
    Instruction,
    Module,
    arrays_of,
)


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
    if custom_call_target(instruction) == TRITON:
        grouped = grouped_flops(instruction, operands)
        return Arithmetic(grouped, operands[-1][0].element) if grouped else None
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
    if target.startswith(FUSED_ATTENTION):
        return fused_attention_flops(instruction, lhs)
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


_LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
_GROUPS = re.compile(r"\b(feature|batch)_group_count=(\d+)")


@dataclass(frozen=True, slots=True)
class Channels:
    """Channels of a convolution that a library computes.

    Attributes:
      inputs, outputs: summed channels, and channels of the result, of a group.
      groups: number of groups.
      is_kernel_gradient: whether it is the gradient of a convolution by its kernel.
    """

    inputs: int
    outputs: int
    groups: int
    is_kernel_gradient: bool


def channels_of(computation: Computation, instruction: Instruction) -> Channels | None:
    """Return the channels of a call of cuDNN; None for other instructions."""
    target = custom_call_target(instruction)
    labels = _LABELS.search(instruction.attributes)
    if not target.startswith("__cudnn$conv") or labels is None:
        return None
    is_gradient = target == "__cudnn$convBackwardFilter"
    kernel = computation.instructions[instruction.operands[1]].type
    dims = arrays_of(instruction.type if is_gradient else kernel)[0].dims
    groups = int(instruction.find(r"\bfeature_group_count=(\d+)") or 1)
    inputs = dims[labels.group(2).index("i")]
    outputs = dims[labels.group(2).index("o")] // groups
    if target == "__cudnn$convBackwardInput":
        inputs, outputs = outputs, inputs
    return Channels(inputs, outputs, groups, is_gradient)


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


# Operations of the vector units for one element of an HLO op, in multiply-adds of
# float32: one of the special function units (an eighth of the rate) counts 8. Source:
# CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions"; the others
# from the length of the code that XLA:GPU emits, within a factor of two. Measured on an
# H100: `pow` (0.94 of the time of a step that it bounds), and integer ops as those of
# threefry, where three of five compile to one (1.02).
_OPS_OF = {
    **dict.fromkeys(
        (
            "abs add and clamp compare maximum minimum multiply negate not or select"
            " shift-left shift-right-arithmetic shift-right-logical sign subtract xor"
            " reduce floor ceil popcnt"
        ).split(),
        1.0,
    ),
    **dict.fromkeys(("convert", "round-nearest-even"), 2.0),
    **dict.fromkeys(("divide", "rsqrt", "sqrt", "exponential"), 10.0),
    **dict.fromkeys(("log", "cbrt", "exponential-minus-one", "log-plus-one"), 20.0),
    **dict.fromkeys(("logistic", "remainder"), 20.0),
    **dict.fromkeys(("tanh", "erf", "cosine", "sine", "tan", "atan2"), 40.0),
    "power": 90.0,
}


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

    def vector_ops(self, computation: Computation, instruction: Instruction) -> float:
        """Return the operations of one run of an instruction on vector units: of each
        elementwise op as many as its function takes, for the elements that
        are needed; operations on 8 bytes count twice."""
        if instruction.opcode != "fusion":
            return _ops_of_one(computation, instruction)
        called = self.module.computations[instruction.called]
        shares = self._shares(called)
        return sum(shares[i.name] * self.vector_ops(called, i) for i in called)

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
            more = _tile_share(computation.instructions[name], user)
            return min(1.0, more * arrays_of(user.type)[0].size / size)
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
        target = custom_call_target(instruction)
        if target.startswith(("__cublas$", "__cudnn$")):
            # The rest of the tuple is scratch.
            made = arrays_of(instruction.type)
            made = made[:-1] if target.startswith(FUSED_ATTENTION) else made[:1]
            return sum(array.bytes for array in made)
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
            written = sum(self._written_in(called, x) for x in _results(called))
            is_new = _updates_new(computation, result, called)
            return max(written, is_new * computation.instructions[name].bytes)
        return computation.instructions[name].bytes


def _ops_of_one(computation: Computation, instruction: Instruction) -> float:
    """Return the vector operations of an elementwise op or a reduction."""
    ops = _OPS_OF.get(instruction.opcode, 0.0)
    if not ops:
        return 0.0
    is_sum = instruction.opcode == "reduce"
    of = computation.instructions[instruction.operands[0]] if is_sum else instruction
    array = arrays_of(of.type)[0]
    return ops * array.size * max(1.0, array.item_bytes / 4)


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


_TILED = re.compile(r"\{(\d+),(\d+)[\d,]*:T\((\d+),(\d+)\)")
_SLICES = re.compile(r"\bslice_sizes=\{([\d,]*)\}")


def _tile_share(table: Instruction, user: Instruction) -> float:
    """Return the elements that a look-up reads over those that it takes: whole tiles,
    where a TPU stores the rows that it looks up on the lanes."""
    tiled = _TILED.search(table.type)
    if user.opcode != "gather" or tiled is None:
        return 1.0
    minor, second, rows, lanes = map(int, tiled.groups())
    taken = _numbers(_SLICES, user)
    if taken[minor] > 1:
        return 1.0
    return lanes * -(-taken[second] // rows) * rows / taken[second]


def _updates_new(
    computation: Computation, fusion: Instruction, called: Computation
) -> bool:
    """Whether a fusion inside another updates an array that the other computes, of
    less than an array of its size (XLA:TPU scatters into zeros so)."""
    update = _behind(called, called.root)
    if not _updates(update) or not _comes_from_parameter(called, update):
        return False
    array = _behind(called, update.operands[0])
    new = _behind(computation, fusion.operands[int(array.operands[0])])
    made_of = (computation.instructions.get(x) for x in new.operands)
    read = max((x.bytes for x in made_of if x is not None), default=0)
    return new.opcode != "parameter" and read < new.bytes


def _scattered(scatter: Instruction) -> int:
    """Return the number of arrays that a scatter updates."""
    return (len(scatter.operands) - 1) // 2


def _update_bytes(computation: Computation, update: Instruction) -> int:
    """Return the bytes of the updates of a dynamic-update-slice or a scatter."""
    if update.opcode == "dynamic-update-slice":
        return computation.instructions[update.operands[1]].bytes
    names = update.operands[_scattered(update) + 1 :]
    return sum(computation.instructions[x].bytes for x in names)
