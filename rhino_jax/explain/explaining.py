"""Explanation of a value's layout: alternatives fixed, and the rest solved again.

`forces` lists the constraints that shape a layout: pins, divisibility, memory,
neighbours, recipes.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rhino_jax.analysis.graph import NodeKind
from rhino_jax.errors import PinError
from rhino_jax.explain.place import (
    Found,
    HeldLayout,
    PlacedValues,
    find_place,
    held_in,
    nodes_of,
    solve_most_promising,
    specs_now,
    specs_without_pins,
)
from rhino_jax.explain.why import LayoutAlternative, Why
from rhino_jax.explain.words import CostTerms, added, answer, cost_of
from rhino_jax.ir.printer import format_array
from rhino_jax.ir.spec import Spec, format_spec
from rhino_jax.model.build import MeshModel
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.resolved_pins import to_spec
from rhino_jax.plan.trees import partition_spec
from rhino_jax.planner.search.driver import search_again
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.records import Progress, Request
from rhino_jax.solver.problem import Labels


MAX_READERS = 6
"""Maximum number of lines on the ops that read a value; the rest are counted."""


def forces(
    found: SearchResult,
    pins: Sequence[str],
    place: PlacedValues,
    current: Spec | None,
) -> tuple[str, ...]:
    """Return sentences on everything that influences the layout of a place.

    Args:
      found: the search result of the plan's mesh.
      pins: sentences on pins, see `pins_of`.
      place: the values.
      current: the plan's layout; None if the values of the place have several.
    """
    model, labels = found.best.model, found.best.labels
    return (
        *pins,
        *_divisors(model, place),
        *_memory(found, place, current),
        *_neighbours(model, place, labels),
        *_recipes(found, place),
    )


def pins_of(request: Request, plan: PlanData, place: PlacedValues) -> list[str]:
    """Return the sentence on a place's pins, for a plan on one mesh; empty if none."""
    program_pins = [request.value_pins[v].key for v in place.values
                    if v in request.value_pins]  # fmt: skip
    paths = [plan.inputs[i].path for i in place.inputs if i in request.pins]
    paths += [plan.outputs[i].path for i in place.outputs if i in request.output_pins]
    every = dict.fromkeys([*paths, *program_pins])
    if not every:
        return []
    return [f"pinned: {', '.join(every)}; the other layouts are without that pin."]


def _divisors(model: MeshModel, place: PlacedValues) -> list[str]:
    """Return a sentence for each mesh axis whose size does not divide some dims."""
    lines = []
    for axis in model.mesh.axes:
        odd = [i for i, d in enumerate(place.shape) if axis.size > 1 and d % axis.size]
        if odd:
            dims = " and ".join(f"{i} ({place.shape[i]})" for i in odd)
            lines.append(f"`{axis.name}` ({axis.size} devices) does not divide dim"
                         f"{'s' if len(odd) > 1 else ''} {dims}.")  # fmt: skip
    return lines


def _memory(
    found: SearchResult, place: PlacedValues, current: Spec | None
) -> list[str]:
    """Say whether memory limits the layout; empty if the budget does not bind."""
    if not found.is_bound_by_memory:
        return []
    without = replace(
        found.request,
        memory_budget_bytes=math.inf,
        deadline=math.inf,
        has_recipes=False,
        watch=None,
    )
    free = search_again(found, without)
    model = free.best.model
    specs = set(specs_now(model, place, free.best.labels))
    if specs == {current}:
        return ["memory binds, but has no part in this: without limit it is the same."]
    text = " and ".join(format_spec(s, model.mesh.names) for s in specs)
    return [f"memory: without limit it would be {text}."]


def _neighbours(model: MeshModel, place: PlacedValues, labels: Labels) -> list[str]:
    """Return sentences on the ops that read the values, and in which layout they do."""
    graph, names = model.graph, model.mesh.names
    readers: dict[tuple[str, str], int] = defaultdict(int)
    for n in nodes_of(model, place):
        for edge in graph.outgoing[n]:
            have = model.spec(edge.source, int(labels[n]))
            want = model.wanted(edge, int(labels[edge.target]))
            reader = graph.nodes[edge.target]
            if reader.kind is NodeKind.COPY:
                continue
            who = reader.kind.value
            if reader.op is not None:
                line = str(reader.op.source).partition(" (")[0]
                who = f"{reader.op.name} at {line}" if line else reader.op.name
            how = "as it is" if have == want else f"as {format_spec(want, names)}"
            readers[who, how] += 1
    lines = [
        f"read {how} by {who}{f' ({count} times)' if count > 1 else ''}."
        for (who, how), count in readers.items()
    ]
    rest = len(lines) - MAX_READERS
    return [*lines[:MAX_READERS], *([f"and {rest} more readers."] if rest > 0 else [])]


def _recipes(found: SearchResult, place: PlacedValues) -> list[str]:
    problem = found.best.mesh_problem
    by_spec: dict[str, list[str]] = defaultdict(list)
    for name, labels in problem.recipes.items():
        if labels is not None:
            specs = dict.fromkeys(specs_now(problem.model, place, labels))
            text = " and ".join(format_spec(s, problem.model.mesh.names) for s in specs)
            by_spec[text].append(name)
    if not by_spec:
        return []
    said = "; ".join(f"{', '.join(names)} {spec}" for spec, names in by_spec.items())
    return [f"recipes have: {said}."]


class View:
    """Relation between the searched program and the planned one that contains it; here
    they are the same."""

    def sent_s(self, found: SearchResult) -> float:
        """Return the seconds of a step that are added to those of the search."""
        return 0.0

    def shape(self, place: PlacedValues) -> tuple[int, ...]:
        """Return the shape of the planned program's value."""
        return place.shape

    def shown(self, place: PlacedValues, spec: Spec) -> Spec:
        """Convert a layout of the searched value to one of the planned value."""
        return spec

    def refused(self, place: PlacedValues, asked: Any) -> str:
        """Return why the planned program's value cannot have the requested layout.

        Empty if only the searched program decides.
        """
        return ""


def explain(
    found: SearchResult,
    request: Request,
    plan: PlanData,
    key: str,
    asked: Any,
    report: Progress | None,
    view: View,
) -> Why:
    """Explain why a value has its layout, and what each alternative would cost.

    Args:
      found: the solved problem of the plan's mesh.
      request: options of the search, with a deadline from now.
      plan: the plan.
      key: key of the value, see `place`.
      asked: the only alternative to evaluate; None: all.
      report: receives progress; None: nothing is reported.
      view: relation to the planned program.

    Raises:
      PinError: the key names no value that has a layout.
    """
    started = time.monotonic()
    what = "`plan.why`" if asked is None else "`plan.why_not`"
    place = find_place(key, found.best.model.graph.program, what)
    if not specs_without_pins(found, place):
        raise laid_out_nowhere(place, what)
    request = replace(request, has_recipes=False, watch=None)
    why = explain_place(
        found,
        place,
        asked,
        pins_of(request, plan, place),
        partial(_solve, found, request, place, report),
        partial(_cost, view),
        _cost(view, found),
        view,
    )
    return replace(why, seconds=time.monotonic() - started)


def explain_place(
    found: SearchResult,
    place: PlacedValues,
    asked: Any,
    pins: Sequence[str],
    solve: Callable[[Sequence[Spec], Spec | None], Sequence[HeldLayout[Found]]],
    cost: Callable[[Found, bool], CostTerms],
    planned: CostTerms,
    view: View,
) -> Why:
    """Explain the layout of a place that has one.

    Args:
      found: the solved problem of the place's mesh.
      place: the values.
      asked: the only alternative to evaluate; None: all.
      pins: sentences on pins.
      solve: (layouts, the plan's layout; None if the values have several) → their
        results.
      cost: (result, whether it was searched briefly) → its cost.
      planned: cost of the plan.
      view: relation to the planned program.
    """
    model, labels = found.best.model, found.best.labels
    now, names = specs_now(model, place, labels), model.mesh.names
    current = now[0] if len(set(now)) == 1 else None
    wanted: list[Spec] | str = specs_without_pins(found, place)
    if asked is not None:
        wanted = view.refused(place, asked) or read(place, asked, model)
    costs: list[tuple[Spec, CostTerms]] = []
    cannot: dict[str, str] = {}
    laid = [view.shown(place, spec) for spec in now]
    if current is not None:
        costs.append((laid[0], planned))
    if isinstance(wanted, str):
        cannot[str(asked)] = wanted
    else:
        for held in solve([spec for spec in wanted if spec != current], current):
            spec = view.shown(place, held.spec)
            if held.found is None:
                cannot[format_spec(spec, names)] = held.cannot
            else:
                costs.append((spec, cost(held.found, held.is_brief)))
    shown = None if current is None else laid[0]
    # In order: the plan's, others by cost, impossible ones.
    order = sorted(costs, key=lambda c: (c[0] != shown, c[1].rank))
    layouts = (
        *(_layout(s, c, planned, model, s == shown) for s, c in order),
        *(LayoutAlternative(s, None, cannot=why) for s, why in cannot.items()),
    )
    is_asked = asked is not None
    return Why(
        place.key,
        place.name,
        format_array(place.dtype, view.shape(place)),
        place.source,
        " and ".join(dict.fromkeys(format_spec(s, names) for s in laid)),
        answer(place, model, shown, costs, planned, layouts, is_asked=is_asked),
        layouts,
        forces(found, pins, place, current),
        planned.step_s,
        0.0,
    )


def _solve(
    found: SearchResult,
    request: Request,
    place: PlacedValues,
    report: Progress | None,
    specs: Sequence[Spec],
    current: Spec | None,
) -> list[HeldLayout[SearchResult]]:
    """Solve a place for each layout: all briefly, the most promising at the plan's
    level; see `explain` for the arguments."""
    brief = replace(request, level="fast")
    every = [
        HeldLayout.of(spec, partial(held_in, found, brief, place, spec, report))
        for spec in specs
    ]

    def again(spec: Spec, held: SearchResult) -> SearchResult:
        asked = replace(held.request, level=request.level, progress=report)
        return search_again(held, asked)

    def rank(held: SearchResult | None) -> float:
        return math.inf if held is None else held.step_s

    solve_most_promising(every, again, rank, len(found.mesh_axes), current)
    return every


def _cost(view: View, found: SearchResult, is_brief: bool = False) -> CostTerms:
    """Return a search's cost with the view's seconds added."""
    cost, sent_s = cost_of(found, is_brief), view.sent_s(found)
    if not sent_s or cost.predicted is None:
        return cost
    predicted = replace(
        cost.predicted,
        step_time_s=cost.predicted.step_time_s + sent_s,
        communication_s=cost.predicted.communication_s + sent_s,
    )
    return replace(
        cost,
        predicted=predicted,
        step_s=cost.step_s + sent_s,
        bound_s=cost.bound_s + sent_s,
    )


def laid_out_nowhere(place: PlacedValues, what: str) -> PinError:
    """Return the error for a value that is replicated in full in every plan."""
    return PinError(
        f"{what}: {place.name} is replicated in every plan.",
        where=repr(place.key),
        numbers=f"{place.dtype}{list(place.shape)}",
        fix="ask of an array that the plan's table lists.",
    )


def read(place: PlacedValues, asked: Any, model: MeshModel) -> list[Spec] | str:
    """Return the requested layout as a list, or why this array cannot have it.

    Args:
      place: the values.
      asked: the layout as the user gave it, as a PartitionSpec.
      model: the model of the mesh.
    """
    axes = [(a.name, a.size) for a in model.mesh.axes]
    value = model.graph.program.values[place.every[0]]
    try:
        return [to_spec(place.key, asked, place.name, value, axes)]
    except PinError as error:
        return f"{error.what.rstrip('.')}: {error.numbers}"


def _layout(
    spec: Spec,
    cost: CostTerms,
    planned: CostTerms,
    model: MeshModel,
    is_planned: bool,
) -> LayoutAlternative:
    names, predicted = model.mesh.names, cost.predicted
    return LayoutAlternative(
        format_spec(spec, names),
        partition_spec(spec, names),
        is_planned,
        predicted is not None,
        cost.total_s,
        cost.bound_s,
        predicted.compute_s if predicted else cost.step_s,
        predicted.communication_s if predicted else cost.step_s,
        tuple(cost.by_axes.items()),
        cost.peak_bytes,
        cost.is_brief,
        () if is_planned or predicted is None else added(cost, planned),
        stage_s=cost.step_s,
    )
