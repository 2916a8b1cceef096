"""The explanation in sentences: for each mesh axis, what the plan gains by its use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rhino_jax.explain.costs import CostTerms, Elsewhere, added
from rhino_jax.explain.why import Added, LayoutAlternative, more
from rhino_jax.ir.spec import Spec, axes_of, format_spec
from rhino_jax.units import format_bytes, format_seconds


if TYPE_CHECKING:
    from rhino_jax.explain.place import PlacedValues
    from rhino_jax.model.build import MeshModel


def answer(
    place: PlacedValues,
    model: MeshModel,
    current: Spec | None,
    costs: Sequence[tuple[Spec, CostTerms]],
    planned: CostTerms,
    layouts: Sequence[LayoutAlternative],
    *,
    is_asked: bool,
) -> tuple[str, ...]:
    """Return sentences on every mesh axis, and on impossible layouts.

    Args:
      place: the values.
      model: the model of the mesh.
      current: the plan's layout; None where the values of the place have several.
      costs: every solved layout with its cost, the plan's included.
      planned: cost of the plan.
      layouts: all alternatives, as they are displayed.
      is_asked: whether the question was about one layout alone.
    """
    others = [(s, c) for s, c in costs if s != current]
    lines = []
    if place.others:
        lines.append(f"{place.key} also means {', '.join(place.others)}.")
    if len(others) == 1:
        lines.append(_of_one(*others[0], model, planned))
    elif is_asked:
        if not any(x.cannot for x in layouts):
            lines.append(f"{layouts[0].spec} is the plan's own layout.")
    elif current is None:
        lines += [_of_one(s, c, model, planned) for s, c in _best(others)]
    else:
        lines += _of_axes(place, model, current, others, planned)
    lines += [f"it cannot be {x.spec}: {x.cannot}." for x in layouts if x.cannot]
    return tuple(lines)


def _best(costs: Sequence[tuple[Spec, CostTerms]]) -> list[tuple[Spec, CostTerms]]:
    return sorted(costs, key=lambda c: c[1].rank)[:1]


def _of_axes(
    place: PlacedValues,
    model: MeshModel,
    current: Spec,
    others: Sequence[tuple[Spec, CostTerms]],
    planned: CostTerms,
) -> list[str]:
    names, said = model.mesh.names, dict[str, list[str]]()
    for a, axis in enumerate(model.mesh.axes):
        if axis.size == 1:
            continue
        has = a in axes_of(current)
        turned = [(s, c) for s, c in others if (a in axes_of(s)) != has]
        text = f"not cut over AXES: {_not_divided(place, axis.size)}."
        if has and not turned:
            continue
        for spec, cost in _best(turned):
            best = f"best as {format_spec(spec, names)}, {_what_changes(cost, planned)}"
            text = f"not cut over AXES: so cut, {best}."
            if has:
                text = f"cut over AXES because without it, {best}."
        said.setdefault(text, []).append(f"`{axis.name}`")
    lines = [text.replace("AXES", " and ".join(axes)) for text, axes in said.items()]
    moved = [(s, c) for s, c in others if axes_of(s) == axes_of(current)]
    for spec, cost in _best(moved):
        lines.append(
            f"as {format_spec(spec, names)}, over the same axes,"
            f" {_what_changes(cost, planned)}."
        )
    return lines


def _of_one(spec: Spec, cost: CostTerms, model: MeshModel, planned: CostTerms) -> str:
    text = format_spec(spec, model.mesh.names)
    return f"as {text}, {_what_changes(cost, planned)}."


def _not_divided(place: PlacedValues, size: int) -> str:
    dims = [d for d in place.shape if d % size == 0 and d >= size]
    if not dims:
        shape = ", ".join(map(str, place.shape))
        return f"its {size} devices divide no dim ({shape})"
    return "no layout that the op can make is cut so"


def _what_changes(cost: CostTerms, planned: CostTerms) -> str:
    """Describe a cost.

    As "the step is 1.2 ms (4 %) longer: 1.1 ms more of all-gathers at gpt.py:61".
    """
    if cost.predicted is None:
        if cost.elsewhere is not None:
            return f"nothing fits: {cost.elsewhere.cannot.rstrip('.')}"
        return f"nothing fits: the least peak found is {format_bytes(cost.peak_bytes)}"
    delta = cost.step_s - planned.step_s
    said = how_long("the step", delta, planned.step_s)
    if cost.elsewhere is not None:
        said = _in_stages(cost, cost.elsewhere, planned)
    elif said.endswith("shorter"):
        said += ", which is within the plan's gap"
    reasons = _reasons(cost, planned)
    return f"{said}: {reasons}" if reasons else said


def how_long(what: str, delta_s: float, of_s: float) -> str:
    """Describe a difference of seconds, as "the step is 1.2 ms (4 %) longer".

    Args:
      what: the subject, as "the step".
      delta_s: the difference in seconds.
      of_s: seconds that the share refers to.
    """
    text = more(delta_s, of_s)
    if text == "=":
        return f"{what} is as long"
    return f"{what} is {text[1:]} {'longer' if delta_s > 0 else 'shorter'}"


HARDLY = 0.25
"""Limit of the ratio of the step's growth to that of one stage below which the sentence
says that the step waits for another stage."""


def _in_stages(cost: CostTerms, of: Elsewhere, planned: CostTerms) -> str:
    """Describe a change in stages.

    As "the work of stage 1 is 1.2 ms (4 %) longer, the step is 0.1 ms (0.3 %) longer:
    stage 0 works longest".
    """
    delta, step = cost.step_s - planned.step_s, cost.total_s - planned.total_s
    said = [how_long(f"the work of stage {of.stage}", delta, planned.step_s)]
    said += [
        how_long(f"that of stage {s}", changed, planned.step_s)
        for s, changed in of.others
        if more(changed, planned.step_s) != "="
    ]
    said += [
        how_long(f"what passes between stages {a} and {b}", changed, planned.step_s)
        for a, b, changed in of.sent
        if more(changed, planned.step_s) != "="
    ]
    whole = how_long("the step", step, planned.total_s)
    if of.longest != of.stage and delta > 0 and step < HARDLY * delta:
        whole += f" (it waits for stage {of.longest}, which works longest)"
    if whole.endswith("shorter"):
        whole += " (stages are planned one after the other, each for itself)"
    return ", ".join([*said, whole])


MAX_REASONS = 4
"""Maximum number of terms of a difference that are named; the table of layouts has the
rest."""

WORTH = 0.05
"""Share of the largest term from which on a term is named by itself."""


def _reasons(cost: CostTerms, planned: CostTerms) -> str:
    """Return the terms that add up to the difference of the steps, in words."""
    assert cost.predicted is not None and planned.predicted is not None
    lines = [(x.seconds, _said(x)) for x in added(cost, planned)]
    compute_s = cost.predicted.compute_s - planned.predicted.compute_s
    beside_s = cost.hidden_s - planned.hidden_s
    beside = "hidden" if beside_s > 0 else "no longer hidden"
    whole = [(compute_s, "of compute"), *lines]
    largest = max(abs(s) for s, _ in [*whole, (beside_s, "")])
    named = [x for x in whole if abs(x[0]) >= max(WORTH * largest, 1e-12)]
    named = sorted(named, key=lambda x: -abs(x[0]))[:MAX_REASONS]
    rest_s = sum(s for s, _ in whole) - sum(s for s, _ in named)
    if named and abs(rest_s) >= WORTH * largest:
        named.append((rest_s, "of the rest"))
    found = [f"{format_seconds(abs(s))} {_sign(s)} {what}" for s, what in named]
    if abs(beside_s) >= WORTH * largest > 0:
        found.append(f"{format_seconds(abs(beside_s))} of collectives {beside}")
    bytes_more = cost.peak_bytes - planned.peak_bytes
    if abs(bytes_more) > MEMORY_WORTH * planned.peak_bytes:
        found.append(f"{format_bytes(abs(bytes_more))} {_sign(bytes_more)} at the peak")
    return "; ".join(found)


MEMORY_WORTH = 0.2
"""Share of the plan's peak from which on a difference of peaks is named."""


def _sign(amount: float) -> str:
    return "more" if amount > 0 else "less"


def _said(x: Added) -> str:
    place = f" at {x.source.partition(' (')[0]}" if x.source else ""
    reason = f" ({x.reason})" if x.reason else ""
    return f"of {x.kind}s over `{'+'.join(x.axes)}`{place}{reason}"
