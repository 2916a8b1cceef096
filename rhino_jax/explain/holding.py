"""Values fixed to one layout, with everything else solved again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from rhino_jax.errors import PinError
from rhino_jax.explain.place import PlacedValues, find_place
from rhino_jax.ir.spec import Spec, axes_of
from rhino_jax.model.build import MeshModel
from rhino_jax.plan.pins.interior import ValuePin
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.held import search_held
from rhino_jax.planner.search.mesh_problem import build_mesh_problem
from rhino_jax.planner.search.records import Progress, Request
from rhino_jax.solver.problem import Labels


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
    return search_held(found, request, progress=report)


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
    program = found.solved[0].mesh_problem.model.graph.program
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
    model, request = found.solved[0].mesh_problem.model, found.request

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
