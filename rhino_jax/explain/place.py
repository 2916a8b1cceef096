"""Lookup of a key, and the values that it names fixed to one layout.

A key names arguments, results or values of a program. With a value fixed to a layout,
everything else is solved again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from rhino_jax.errors import PinError, nearest
from rhino_jax.ir.places import at_place, known_places, path_glob
from rhino_jax.ir.printer import format_array
from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import Spec, axes_of
from rhino_jax.model.build import MeshModel
from rhino_jax.plan.resolved_pins import Places, ValuePin, values_of_key
from rhino_jax.planner.search.found import SearchResult, search_held
from rhino_jax.planner.search.mesh_problem import build_mesh_problem
from rhino_jax.planner.search.records import Progress, Request
from rhino_jax.solver.problem import Labels


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
    pattern = path_glob(key)
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


MAX_SOLVED = 4
"""Maximum number of layouts solved at the plan's search level. The others, which a
brief search ranks lower, have a solution and no proved bound."""


Found = TypeVar("Found")


@dataclass(slots=True, eq=False)
class HeldLayout(Generic[Found]):
    """A layout of a place, and the result with it fixed.

    Attributes:
      spec: the layout.
      found: result with everything else solved again: a `SearchResult`, or all
        submeshes of a plan in stages; None if no op can produce the layout.
      is_brief: whether it was searched briefly only.
      cannot: why no op can produce the layout; empty if one can.
    """

    spec: Spec
    found: Found | None
    is_brief: bool = True
    cannot: str = ""

    @classmethod
    def of(cls, spec: Spec, search: Callable[[], Found]) -> HeldLayout[Found]:
        """Search a layout briefly, unless no op can produce it."""
        try:
            return cls(spec, search())
        except PinError as error:
            return cls(spec, None, cannot=error.what)


def solve_most_promising(
    every: Sequence[HeldLayout[Found]],
    again: Callable[[Spec, Found], Found],
    rank: Callable[[Found | None], Any],
    num_axes: int,
    current: Spec | None,
) -> None:
    """Solve the most promising layouts at the plan's level.

    Args:
      every: briefly searched layouts.
      again: (layout, its brief result) → its result at the plan's level.
      rank: a result, None where no op can produce the layout → its sort key, lowest
        best.
      num_axes: number of mesh axes.
      current: the plan's layout; None if the values of the place have several.
    """
    nearest = sorted(every, key=lambda held: rank(held.found))
    for held in most_promising(nearest, num_axes, current):
        if held.found is not None and held.is_brief:
            held.found = again(held.spec, held.found)
            held.is_brief = False


def most_promising(
    nearest: Sequence[HeldLayout[Found]], num_axes: int, current: Spec | None
) -> list[HeldLayout[Found]]:
    """Return the candidates to solve at the plan's search level.

    These are the `MAX_SOLVED` best, and for each mesh axis the best layout that differs
    from the plan's in whether it uses the axis.

    Args:
      nearest: briefly searched layouts, the best first.
      num_axes: number of mesh axes.
      current: the plan's layout; None if the values of the place have several.
    """
    chosen = list(nearest[:MAX_SOLVED])
    for axis in range(num_axes):
        has = current is not None and axis in axes_of(current)
        chosen += [c for c in nearest if (axis in axes_of(c.spec)) != has][:1]
    return list(dict.fromkeys(chosen))


def held_in(
    found: SearchResult,
    request: Request,
    place: PlacedValues,
    spec: Spec,
    report: Progress | None,
) -> SearchResult:
    """Search again with a place pinned to one layout.

    Args:
      found: the search result of the plan's mesh.
      request: options of the search, with their own pins.
      place: the values to fix.
      spec: the layout.
      report: receives progress; None: nothing is reported.

    Raises:
      PinError: an op cannot produce it.
    """
    pin = ValuePin(spec, place.key)
    request = replace(
        request,
        pins={**request.pins, **dict.fromkeys(place.inputs, spec)},
        output_pins={**request.output_pins, **dict.fromkeys(place.outputs, spec)},
        value_pins={**request.value_pins, **dict.fromkeys(place.values, pin)},
    )
    return search_held(found, replace(request, progress=report))


def steps_held(
    found: SearchResult,
    request: Request,
    held: Mapping[str, Spec],
    report: Progress | None,
) -> dict[str, float]:
    """Return path → extra seconds of the step with that argument's layout fixed.

    Layouts that no op can produce, or with which nothing fits, are left out.

    Args:
      found: the search result of the plan's mesh.
      request: options of the search.
      held: path of an argument → layout.
      report: receives progress; None: nothing is reported.
    """
    program = found.best.model.graph.program
    brief = replace(request, level="fast", has_recipes=False, watch=None)
    steps = {}
    for path, spec in held.items():
        place = find_place(path, program, "`diff`")
        try:
            step_s = held_in(found, brief, place, spec, report).step_s
        except PinError:
            continue
        if math.isfinite(step_s):
            steps[path] = step_s - found.step_s
    return steps


def specs_that_are(model: MeshModel, place: PlacedValues) -> list[Spec]:
    """Return the layouts that all values of a place can have in this model."""
    every: list[dict[Spec, None]] = []
    for node, result in _nodes(model, place):
        options = model.options[node]
        every.append(dict.fromkeys(s.results[result] for s in options.strategies))
    if not every:
        return []
    return [spec for spec in every[0] if all(spec in other for other in every[1:])]


def specs_without_pins(found: SearchResult, place: PlacedValues) -> list[Spec]:
    """Return the layouts that the values of a place could have without their pins."""
    model, request = found.best.model, found.request

    def rest(pins: Mapping[int, Any], at: Sequence[int]) -> dict[int, Any]:
        return {k: pin for k, pin in pins.items() if k not in at}

    free = replace(
        request,
        pins=rest(request.pins, place.inputs),
        output_pins=rest(request.output_pins, place.outputs),
        value_pins=rest(request.value_pins, place.values),
    )
    if free != request:
        model = build_mesh_problem(model.analysis, found.mesh_axes, free).model
    return specs_that_are(model, place)


def specs_now(model: MeshModel, place: PlacedValues, labels: Labels) -> list[Spec]:
    """Return the layouts of a place's values under the chosen strategies.

    Args:
      model: the model of the mesh.
      place: the values.
      labels: index of the chosen strategy by node.
    """
    return [
        model.options[node].strategies[int(labels[node])].results[result]
        for node, result in _nodes(model, place)
    ]


def nodes_of(model: MeshModel, place: PlacedValues) -> list[int]:
    """Return the nodes that choose the layouts of a place."""
    return [node for node, _ in _nodes(model, place)]


def _nodes(model: MeshModel, place: PlacedValues) -> list[tuple[int, int]]:
    """Return (node, result) of every value of a place.

    A result of the program is represented by its output node.
    """
    graph = model.graph
    found = []
    by_slot = {n.slot: n.id for n in graph.nodes if n.kind.value == "output"}
    for slot in place.outputs:
        if slot in by_slot:
            found.append((by_slot[slot], 0))
    ends = {graph.program.outputs[slot].value for slot in place.outputs}
    inputs = {graph.program.inputs[slot].value for slot in place.inputs}
    for value in place.every:
        port = graph.held.get(value)
        if port is not None and (value not in ends or value in inputs):
            found.append((port.node, port.result))
    return found
