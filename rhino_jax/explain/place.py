"""Lookup of a key: the arguments, results or values of a program that it names."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass

from rhino_jax.errors import PinError, nearest
from rhino_jax.ir.places import at_place, known_places
from rhino_jax.ir.printer import format_array
from rhino_jax.ir.program import Program
from rhino_jax.plan.pins.interior import Places, values_of_key


_VALUE = re.compile(r"(?:.* )?%(\d+)")
"""Pattern of a value as tables name it: `exp %438`, or `%438`."""

_OP = re.compile(r"(?:\w+ )?#(\d+)")
"""Pattern of an op as tables name it: `dot_general #123`."""


@dataclass(frozen=True, slots=True)
class PlacedValues:
    """Values of one shape that share a layout.

    Attributes:
      key: the key that was requested.
      name: name for display.
      inputs, outputs: positions of arguments and of results.
      values: ids of values inside of the program.
      every: ids of all of these.
      shape, dtype: shape and element type of each value.
      source: the user's source line, for values inside of the program.
      others: names of the values of other shapes that the key means, too.
    """

    key: str
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    values: tuple[int, ...]
    every: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    source: str = ""
    others: tuple[str, ...] = ()


def find_place(key: str, program: Program, what: str) -> PlacedValues:
    """Return the values that a key means; of several shapes, those with the most bytes.

    Args:
      key: a tree path, glob, source line, scope, op or value.
      program: the planned program.
      what: the call that looks it up, for messages.

    Raises:
      PinError: the key names no value.
    """
    found = _ends(key, program) or _inside(key, program)
    if not found:
        raise _nothing(key, program, what)
    shapes: dict[tuple[tuple[int, ...], str], list[tuple[str, int, int]]] = {}
    for side, slot, v in found:
        value = program.values[v]
        shapes.setdefault((value.shape, value.dtype), []).append((side, slot, v))
    values = program.values
    largest = max(shapes, key=lambda k: sum(values[v].bytes for *_, v in shapes[k]))
    mine = shapes.pop(largest)
    makers = {v: op for op in program.ops for v in op.results}
    first = program.values[mine[0][2]]
    op = makers.get(first.id) if mine[0][0] == "value" else None
    return PlacedValues(
        key,
        _name(key, program, mine, op.name if op else ""),
        tuple(slot for side, slot, _ in mine if side == "input"),
        tuple(slot for side, slot, _ in mine if side == "output"),
        tuple(v for side, _, v in mine if side == "value"),
        tuple(v for *_, v in mine),
        first.shape,
        first.dtype,
        str(op.source) if op else "",
        tuple(
            f"{_name('', program, others, '')} ({format_array(dtype, shape)})"
            for (shape, dtype), others in shapes.items()
        ),
    )


def _ends(key: str, program: Program) -> list[tuple[str, int, int]]:
    """Return (side, position, value) of the arguments and results that a key names.

    A result that replaces an argument shares its layout, and is listed as that
    argument.
    """
    pattern = re.compile(fnmatch.translate(key.replace("[", "[[]")))
    paths = {e.path for e in program.inputs} | {e.path for e in program.outputs}

    def is_meant(path: str) -> bool:
        return path == key if key in paths else bool(pattern.fullmatch(path))

    inputs = {i for i, e in enumerate(program.inputs) if is_meant(e.path)}
    outputs = {}
    for i, e in enumerate(program.outputs):
        if is_meant(e.path):
            if e.state_of is not None:
                inputs.add(e.state_of)
            else:
                outputs[i] = e.value
    found = [("input", i, program.inputs[i].value) for i in sorted(inputs)]
    return [*found, *(("output", i, v) for i, v in outputs.items())]


def _inside(key: str, program: Program) -> list[tuple[str, int, int]]:
    if (value := _VALUE.fullmatch(key)) is not None:
        v = int(value[1])
        at = {e.value: i for i, e in enumerate(program.inputs)}
        if v in at:
            return [("input", at[v], v)]
        return [("value", -1, v)] if 0 <= v < len(program.values) else []
    if (found := _OP.fullmatch(key)) is not None:
        ops = [op for op in program.ops if op.id == int(found[1])]
        return [("value", -1, v) for op in ops for v in op.results[:1]]
    values = values_of_key(key, Places.of(program))
    if not values:  # produced or read by the backward pass alone
        is_there = at_place(key)
        every = [op for op in program.ops if is_there(op.source)]
        values = [v for op in every for v in op.results if program.values[v].shape]
    return [("value", -1, v) for v in values]


def _name(
    key: str, program: Program, found: list[tuple[str, int, int]], op: str
) -> str:
    side, slot, v = found[0]
    if side == "value":
        first = f"{op} %{v}".strip()
    else:
        ends = program.inputs if side == "input" else program.outputs
        first = ends[slot].path
    if len(found) == 1:
        return first
    return f"{key} ({len(found)} arrays)" if key else f"{first} and {len(found) - 1}"


def _nothing(key: str, program: Program, what: str) -> PinError:
    paths = [e.path for e in program.inputs] + [e.path for e in program.outputs]
    places = known_places(program)
    shown = ", ".join(paths[:6]) + (", …" if len(paths) > 6 else "")
    return PinError(
        f"{what}: {key!r} is no argument, no result, no source line, scope, op or"
        " value." + nearest(key, [*paths, *places]),
        where=repr(key),
        numbers=f"{len(paths)} paths: {shown}; {len(places)} lines and scopes",
        fix="name a path, a glob as \"params['blocks']*\", a line as 'model.py:61', a"
        " scope, or an op or value as the plan's tables do ('dot_general #12', '%34').",
    )
