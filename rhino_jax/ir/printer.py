"""The text form of a program: one op per line, regions indented.

    program loss
      %0: f32[4,8]  x
      %1: f32[8,2]  w  donated
    %2: f32[4,2] = dot_general %0 %1  {m k, k n -> m n}  # train.py:12 (loss)
    return
      %2  [0]

The same program gives the same text on every host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rhino_jax.ir.op import (
    Input,
    Op,
    Output,
    Region,
    RegionCall,
    RegionKind,
    Value,
)


_SHORT = {
    "float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c",
}  # fmt: skip

INDENT = "  "


def format_program(
    name: str,
    values: Sequence[Value],
    ops: Sequence[Op],
    inputs: Sequence[Input],
    outputs: Sequence[Output],
    body: Region,
) -> str:
    """Return the text of a whole program, without a trailing newline.

    Args:
      name, values, ops, inputs, outputs, body: the fields of `Program`.
    """
    return "\n".join(_Lines(values, ops).of_program(name, inputs, outputs, body))


def format_array(dtype: Any, shape: Iterable[int]) -> str:
    """Return the type of an array in full, as `float32[8,16]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def format_type(value: Value) -> str:
    """Return element type, memory and shape, as `f32[8,16]` or `f32<host>[8,16]`."""
    word = value.dtype.rstrip("0123456789")
    bits = value.dtype[len(word) :]
    short = _SHORT.get(word, word) if bits else word
    memory = "<host>" if value.on_host else ""
    return f"{short}{bits}{memory}[{','.join(map(str, value.shape))}]"


@dataclass(frozen=True, slots=True)
class _Lines:
    """The lines of text of a program with these values and ops."""

    values: Sequence[Value]
    ops: Sequence[Op]

    def of_program(
        self,
        name: str,
        inputs: Sequence[Input],
        outputs: Sequence[Output],
        body: Region,
    ) -> Iterator[str]:
        yield f"program {name}".rstrip()
        for entry in inputs:
            notes = ["donated"] * entry.is_donated + ["const"] * entry.is_const
            yield INDENT + "  ".join([self._defined(entry.value), entry.path, *notes])
        yield from self._of_region(body, "")
        yield "return"
        for out in outputs:
            parts = [self._used(out.value), out.path]
            if out.state_of is not None:
                parts.append(f"state of {inputs[out.state_of].path}")
            yield INDENT + "  ".join(parts)

    def _of_region(self, region: Region, indent: str) -> Iterator[str]:
        for op_id in region.ops:
            op = self.ops[op_id]
            results = ", ".join(self._defined(v) for v in op.results)
            operands = " ".join(self._used(v) for v in op.operands)
            head = f"{results} = {op.name}" if results else op.name
            parts = [f"{head} {operands}".rstrip()]
            if op.call is not None:
                parts.append(f"<{_call_text(op.call)}>")
            elif not op.is_known:
                parts.append("{unknown}")
            elif op.rule is not None:
                parts.append(f"{{{op.rule}}}")
            if op.label:
                parts.append(f"[{op.label}]")
            parts.append(f"# {op.source}")
            yield indent + "  ".join(parts)
            if op.call is not None:
                yield from self._of_call(op.call, indent + INDENT)

    def _of_call(self, call: RegionCall, indent: str) -> Iterator[str]:
        names: Sequence[str] = ("region",)
        if call.kind is RegionKind.WHILE:
            names = ("condition", "body")
        elif call.kind is RegionKind.COND:
            names = tuple(f"branch {i}" for i in range(len(call.regions)))
        for name, region in zip(names, call.regions, strict=True):
            inputs = ", ".join(self._defined(v) for v in region.inputs)
            yield f"{indent}{name}({inputs})"
            yield from self._of_region(region, indent + INDENT)
            yielded = " ".join(self._used(v) for v in region.outputs)
            yield f"{indent}{INDENT}yield {yielded}".rstrip()

    def _defined(self, value: int) -> str:
        return f"%{value}: {format_type(self.values[value])}"

    def _used(self, value: int) -> str:
        entry = self.values[value]
        return f"literal:{format_type(entry)}" if entry.is_literal else f"%{value}"


def _call_text(call: RegionCall) -> str:
    if call.kind is RegionKind.CALL:
        return "remat" if call.is_remat else "call"
    if call.kind is RegionKind.COND:
        return "cond"
    trips = f"{call.trip_count} trips"
    if not call.is_trip_count_known:
        trips += " assumed"
    consts = str(call.num_consts)
    if call.kind is RegionKind.WHILE:
        consts = f"{call.num_cond_consts}+{call.num_consts}"
    return f"{call.kind.value}, {trips}, {consts} consts, {call.num_carry} carries"
