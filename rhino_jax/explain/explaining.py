"""Explanation of a value's layout: alternatives fixed, and the rest solved again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rhino_jax.errors import PinError
from rhino_jax.explain.costs import CostTerms, added, cost_of
from rhino_jax.explain.forces import forces, pins_of
from rhino_jax.explain.holding import (
    HeldLayout,
    solve_all,
    specs_now,
    specs_without_pins,
)
from rhino_jax.explain.place import PlacedValues, find_place
from rhino_jax.explain.why import LayoutAlternative, Why
from rhino_jax.explain.words import answer
from rhino_jax.ir.spec import Spec, format_spec
from rhino_jax.model.build import MeshModel
from rhino_jax.plan.pins.resolve import to_spec
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.trees import partition_spec
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.records import Progress, Request


class View(Protocol):
    """Relation between the searched program and the planned one that contains it."""

    def sent_s(self, found: SearchResult) -> float:
        """Return the seconds of a step that are added to those of the search."""
        ...

    def shape(self, place: PlacedValues) -> tuple[int, ...]:
        """Return the shape of the planned program's value."""
        ...

    def shown(self, place: PlacedValues, spec: Spec) -> Spec:
        """Convert a layout of the searched value to one of the planned value."""
        ...

    def refused(self, place: PlacedValues, asked: Any) -> str:
        """Return why the planned program's value cannot have the requested layout.

        Empty if only the searched program decides.
        """
        ...


class _Same:
    """View for a searched program that is the planned one."""

    def sent_s(self, found: SearchResult) -> float:
        return 0.0

    def shape(self, place: PlacedValues) -> tuple[int, ...]:
        return place.shape

    def shown(self, place: PlacedValues, spec: Spec) -> Spec:
        return spec

    def refused(self, place: PlacedValues, asked: Any) -> str:
        return ""


def explain(
    found: SearchResult,
    request: Request,
    plan: PlanData,
    key: str,
    asked: Any,
    report: Progress | None,
    view: View | None = None,
) -> Why:
    """Explain why a value has its layout, and what each alternative would cost.

    Args:
      found: the solved problem of the plan's mesh.
      request: options of the search, with a deadline from now.
      plan: the plan.
      key: key of the value, see `place`.
      asked: the only alternative to evaluate; None: all.
      report: receives progress; None: nothing is reported.
      view: relation to the planned program, if the searched one is a part of it; None:
        both are the same.

    Raises:
      PinError: the key names no value that has a layout.
    """
    started = time.monotonic()
    what = "`plan.why`" if asked is None else "`plan.why_not`"
    model, labels = found.solved[0].mesh_problem.model, found.solved[0].solution.labels
    assert labels is not None, "a plan fits"
    place, names = find_place(key, model.graph.program, what), model.mesh.names
    known = specs_without_pins(found, place)
    if not known:
        raise laid_out_nowhere(place, what)
    request = replace(request, has_recipes=False, watch=None)
    now = specs_now(model, place, labels)
    current = now[0] if len(set(now)) == 1 else None
    view = view or _Same()
    wanted: list[Spec] | str = known
    is_asked = asked is not None
    if is_asked:
        wanted = view.refused(place, asked) or read(place, asked, model)
    every: list[HeldLayout] = []
    if not isinstance(wanted, str):
        others = [spec for spec in wanted if spec != current]
        every = solve_all(found, request, place, others, current, report)
    whole = current if current is None else view.shown(place, current)
    planned = _cost(found, view)
    costs = [
        (view.shown(place, h.spec), _cost(h.found, view, h.is_brief))
        for h in every
        if h.found
    ]
    if whole is not None:
        costs.insert(0, (whole, planned))
    cannot = {
        format_spec(view.shown(place, h.spec), names): h.cannot
        for h in every
        if h.found is None
    }
    if isinstance(wanted, str):
        cannot[str(asked)] = wanted
    layouts = shown(model, costs, whole, planned, cannot)
    specs = dict.fromkeys(format_spec(view.shown(place, s), names) for s in now)
    return Why(
        key,
        place.name,
        f"{place.dtype}[{','.join(map(str, view.shape(place)))}]",
        place.source,
        " and ".join(specs),
        answer(place, model, whole, costs, planned, layouts, is_asked=is_asked),
        layouts,
        forces(found, pins_of(request, plan, place), place, current),
        planned.step_s,
        time.monotonic() - started,
    )


def _cost(found: SearchResult, view: View, is_brief: bool = False) -> CostTerms:
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
        f"{what}: {place.name} is laid out nowhere: each device has all of it.",
        where=repr(place.key),
        numbers=f"{place.dtype}{list(place.shape)}",
        fix="ask of an array that the plan's table lists.",
    )


def shown(
    model: MeshModel,
    costs: Sequence[tuple[Spec, CostTerms]],
    current: Spec | None,
    planned: CostTerms,
    cannot: Mapping[str, str],
) -> tuple[LayoutAlternative, ...]:
    """Return the alternatives in order: the plan's, others by cost, impossible ones.

    Args:
      model: the model of the mesh.
      costs: every solved layout with its cost.
      current: the plan's layout; `planned`: its cost.
      cannot: layout → why no op can produce it.
    """
    order = sorted(costs, key=lambda c: (c[0] != current, c[1].rank))
    solved = [
        _layout(spec, cost, planned, model, spec == current) for spec, cost in order
    ]
    return *solved, *(_impossible(spec, why) for spec, why in cannot.items())


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


def _impossible(spec: str, why: str) -> LayoutAlternative:
    nothing = float("inf")
    return LayoutAlternative(
        spec, None, False, False, nothing, nothing, 0.0, 0.0, (), 0, cannot=why
    )


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
