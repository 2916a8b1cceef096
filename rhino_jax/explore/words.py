"""The answer in sentences: axis by axis, what the plan gains by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rhino_jax.explore.costs import Cost, added
from rhino_jax.explore.why import Added, Layout, more
from rhino_jax.ir.spec import Spec, axes_of, format_spec
from rhino_jax.units import format_bytes, format_seconds


if TYPE_CHECKING:
    from rhino_jax.explore.place import Place
    from rhino_jax.model.build import Model


def answer(
    place: Place,
    model: Model,
    current: Spec | None,
    costs: Sequence[tuple[Spec, Cost]],
    planned: Cost,
    layouts: Sequence[Layout],
) -> tuple[str, ...]:
    """Sentences on every mesh axis, and on what cannot be.

    Args:
      current: the plan's layout; None where the values of the place have several.
      costs: of every layout that was solved, the plan's among them.
      planned: of the plan.
      layouts: all of them, as they are shown.
    """
    others = [(s, c) for s, c in costs if s != current]
    lines = []
    if place.others:
        lines.append(f"{place.key} also means {', '.join(place.others)}.")
    if len(others) == 1:
        lines.append(_of_one(*others[0], model, planned))
    elif current is None:
        lines += [_of_one(s, c, model, planned) for s, c in _best(others)]
    else:
        lines += _of_axes(place, model, current, others, planned)
    lines += [f"it cannot be {x.spec}: {x.cannot}." for x in layouts if x.cannot]
    return tuple(lines)


def _best(costs: Sequence[tuple[Spec, Cost]]) -> list[tuple[Spec, Cost]]:
    return sorted(costs, key=lambda c: (c[1].step_s, c[1].peak_bytes))[:1]


def _of_axes(
    place: Place,
    model: Model,
    current: Spec,
    others: Sequence[tuple[Spec, Cost]],
    planned: Cost,
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


def _of_one(spec: Spec, cost: Cost, model: Model, planned: Cost) -> str:
    text = format_spec(spec, model.mesh.names)
    return f"as {text}, {_what_changes(cost, planned)}."


def _not_divided(place: Place, size: int) -> str:
    dims = [d for d in place.shape if d % size == 0 and d >= size]
    if not dims:
        shape = ", ".join(map(str, place.shape))
        return f"its {size} devices divide no dim ({shape})"
    return "no layout that the op can make is cut so"


def _what_changes(cost: Cost, planned: Cost) -> str:
    """As "the step is 1.2 ms (4 %) longer: 1.1 ms more of all-gathers at gpt.py:61"."""
    if cost.predicted is None:
        return f"nothing fits: the least peak found is {format_bytes(cost.peak_bytes)}"
    delta = cost.step_s - planned.step_s
    text = more(delta, planned.step_s)
    said = f"the step is {text[1:]} longer"
    if text == "=":
        said = "the step is as long"
    elif delta < 0:
        said = f"the step is {text[1:]} shorter, which is within the plan's gap"
    reasons = _reasons(cost, planned, delta)
    return f"{said}: {reasons}" if reasons else said


MOST_REASONS = 2
"""Of the lines that add most; the table of layouts has the rest."""

WORTH = 0.2
"""Share of the difference from which on a line, or compute, is named."""


def _reasons(cost: Cost, planned: Cost, delta_s: float) -> str:
    assert cost.predicted is not None and planned.predicted is not None
    least = WORTH * abs(delta_s)
    found = [
        _said(x) for x in added(cost, planned) if x.seconds > 0 and x.seconds >= least
    ][:MOST_REASONS]
    compute_s = cost.predicted.compute_s - planned.predicted.compute_s
    if compute_s > 0 and compute_s >= least and delta_s > 0:
        found.append(f"{format_seconds(compute_s)} more of compute")
    bytes_more = cost.peak_bytes - planned.peak_bytes
    if abs(bytes_more) > WORTH * planned.peak_bytes:
        word = "more" if bytes_more > 0 else "less"
        found.append(f"{format_bytes(abs(bytes_more))} {word} at the peak")
    return "; ".join(found)


def _said(x: Added) -> str:
    place = f" at {x.source.partition(' (')[0]}" if x.source else ""
    reason = f" ({x.reason})" if x.reason else ""
    over = "+".join(x.axes)
    return f"{format_seconds(x.seconds)} more of {x.kind}s over `{over}`{place}{reason}"
