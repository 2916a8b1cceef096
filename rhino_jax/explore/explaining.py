"""Every layout of a value held, one after the other, and what that says."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rhino_jax.errors import PinError
from rhino_jax.explore.costs import Cost, added, cost_of
from rhino_jax.explore.forces import forces
from rhino_jax.explore.holding import Held, solve_all, specs_now, specs_that_are
from rhino_jax.explore.place import Place, find_place
from rhino_jax.explore.why import Layout, Why
from rhino_jax.explore.words import answer
from rhino_jax.ir.spec import Spec, format_spec
from rhino_jax.model.build import Model
from rhino_jax.plan.pins.resolve import to_spec
from rhino_jax.plan.plan import Plan
from rhino_jax.plan.trees import partition_spec
from rhino_jax.search.found import Found
from rhino_jax.search.records import Progress, Request


def explain(
    found: Found,
    request: Request,
    plan: Plan,
    key: str,
    asked: Any,
    report: Progress | None,
) -> Why:
    """Why a value is laid out as it is.

    Args:
      found: the problem of the plan's mesh, solved.
      request: with the time that there is now.
      plan: the plan.
      key: of the value, see `place`.
      asked: the only other layout that is asked about; None: all.
      report: progress.
    Raises:
      PinError: the key means nothing that is laid out.
    """
    started = time.monotonic()
    what = "`plan.why`" if asked is None else "`plan.why_not`"
    model = found.solved[0].mesh_problem.model
    program, labels = model.graph.program, found.solved[0].solution.labels
    assert labels is not None, "a plan fits"
    place = find_place(key, program, what)
    known = specs_that_are(model, place)
    if not known:
        raise PinError(
            f"{what}: {place.name} is laid out nowhere: each device has all of it.",
            where=repr(key),
            numbers=f"{place.dtype}{list(place.shape)}",
            fix="ask of an array that the plan's table lists.",
        )
    request = replace(request, has_recipes=False, watch=None)
    now = specs_now(model, place, labels)
    current = now[0] if len(set(now)) == 1 else None
    wanted: list[Spec] | str = known
    if asked is not None:
        wanted = _read(place, asked, model)
    planned = cost_of(found)
    if isinstance(wanted, str):
        every, refused = [], [_impossible(str(asked), wanted)]
    else:
        others = [spec for spec in wanted if spec != current]
        every, refused = solve_all(found, request, place, others, current, report), []
    costs, layouts = _layouts(model, every, current, planned)
    names = model.mesh.names
    return Why(
        key,
        place.name,
        f"{place.dtype}[{','.join(map(str, place.shape))}]",
        place.source,
        " and ".join(dict.fromkeys(format_spec(s, names) for s in now)),
        answer(place, model, current, costs, planned, [*layouts, *refused]),
        (*layouts, *refused),
        forces(found, request, plan, place, current),
        planned.step_s,
        time.monotonic() - started,
    )


def _layouts(
    model: Model, every: Sequence[Held], current: Spec | None, planned: Cost
) -> tuple[list[tuple[Spec, Cost]], list[Layout]]:
    """What was solved costs, the plan's layout with it; and all of it as it is shown,
    the fastest first, what cannot be last."""
    costs = [(held.spec, cost_of(held.found)) for held in every if held.found]
    if current is not None:
        costs.insert(0, (current, planned))
    brief = {held.spec for held in every if held.is_brief}
    solved = [
        _layout(spec, cost, planned, model, spec == current, spec in brief)
        for spec, cost in costs
    ]
    names = model.mesh.names
    refused = [
        _impossible(format_spec(held.spec, names), held.cannot)
        for held in every
        if held.found is None
    ]
    solved.sort(key=lambda x: (not x.is_planned, x.step_s, x.peak_bytes))
    return costs, [*solved, *refused]


def _read(place: Place, asked: Any, model: Model) -> list[Spec] | str:
    """The layout that is asked about; or why it is none of this array."""
    axes = [(a.name, a.size) for a in model.mesh.axes]
    value = model.graph.program.values[place.every[0]]
    try:
        return [to_spec(place.key, asked, place.name, value, axes)]
    except PinError as error:
        return f"{error.what.rstrip('.')}: {error.numbers}"


def _impossible(spec: str, why: str) -> Layout:
    nothing = float("inf")
    return Layout(
        spec, None, False, False, nothing, nothing, 0.0, 0.0, (), 0, cannot=why
    )


def _layout(
    spec: Spec,
    cost: Cost,
    planned: Cost,
    model: Model,
    is_planned: bool,
    is_brief: bool,
) -> Layout:
    names, predicted = model.mesh.names, cost.predicted
    return Layout(
        format_spec(spec, names),
        partition_spec(spec, names),
        is_planned,
        predicted is not None,
        cost.step_s,
        cost.bound_s,
        predicted.compute_s if predicted else cost.step_s,
        predicted.communication_s if predicted else cost.step_s,
        tuple(cost.by_axes.items()),
        cost.peak_bytes,
        added=() if is_planned or predicted is None else added(cost, planned),
    )
