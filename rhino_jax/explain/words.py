"""The explanation in sentences: for each mesh axis, why the plan uses it or does not,
and what the best layout with the opposite choice costs.

`cost_of` has the cost of a solution, by mesh axes and by the user's source lines.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rhino_jax.explain.why import Added, LayoutAlternative, more
from rhino_jax.ir.spec import Spec, axes_of, format_spec
from rhino_jax.plan.records import Collective, Predicted, traffic_by
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.read_back.assemble import costs_of
from rhino_jax.units import format_bytes, format_seconds


if TYPE_CHECKING:
    from rhino_jax.explain.place import PlacedValues
    from rhino_jax.model.build import MeshModel


Line = tuple[str, tuple[str, ...], str, str]
"""Kind, axes, source, reason."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Effect of one stage's layout on the rest of a plan in stages.

    Attributes:
      stage: the stage whose layout is evaluated.
      step_s: simulated seconds of the whole pipeline's step; infinite if a stage does
        not fit.
      cannot: message that says which stage does not fit in memory; empty if all fit.
      longest: the stage with the longest step.
      others: (stage, change of its seconds against the plan) of the other stages.
      sent: (source stage, target stage, change of the transfer's seconds against the
        plan).
    """

    stage: int
    step_s: float
    cannot: str = ""
    longest: int = 0
    others: tuple[tuple[int, float], ...] = ()
    sent: tuple[tuple[int, int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class CostTerms:
    """Cost of a solution, as totals and by axes and source lines.

    Attributes:
      predicted: predictions of the step; None if nothing fits in memory.
      step_s, bound_s: the solver's objective and its proved lower bound, in seconds.
      peak_bytes: peak memory of one device; the lowest peak that the search met if
        nothing fits.
      by_axes: mesh axes → seconds of their collectives, hidden ones included.
      by_line: (kind, axes, source, reason) → seconds of these collectives.
      elsewhere: effect on the other stages, if the cost is that of one stage; None for
        one mesh.
      is_brief: whether it was searched with the brief `fast` level only.
    """

    predicted: Predicted | None
    step_s: float
    bound_s: float
    peak_bytes: int
    by_axes: Mapping[tuple[str, ...], float]
    by_line: Mapping[Line, float]
    elsewhere: Elsewhere | None = None
    is_brief: bool = False

    @classmethod
    def of_nothing(cls, elsewhere: Elsewhere) -> CostTerms:
        """Return the infinite cost of a layout with which a stage does not fit."""
        return cls(None, math.inf, math.inf, 0, {}, {}, elsewhere)

    @property
    def rank(self) -> tuple[float, ...]:
        """Sort key, lowest best.

        Solutions at the plan's search level precede brief ones. The step's seconds
        count first, those of stages that the step does not wait for second, peak bytes
        last.
        """
        took_s = self.step_s
        if self.elsewhere is not None:
            took_s += sum(delta for _, delta in self.elsewhere.others)
        return self.is_brief, self.total_s, took_s, self.peak_bytes

    @property
    def hidden_s(self) -> float:
        """Seconds of collectives that compute hides."""
        exposed_s = 0.0 if self.predicted is None else self.predicted.communication_s
        return sum(self.by_line.values()) - exposed_s

    @property
    def total_s(self) -> float:
        """Seconds of the whole step; for a plan in stages, of its pipeline."""
        return self.step_s if self.elsewhere is None else self.elsewhere.step_s


def cost_of(found: SearchResult, is_brief: bool = False) -> CostTerms:
    """Return the cost of a search's best solution.

    Args:
      found: the search result.
      is_brief: whether that search was a brief one.
    """
    best = found.best
    solution = best.solution
    if solution.labels is None:
        peak = math.ceil(solution.smallest_peak)
        return CostTerms(None, math.inf, math.inf, peak, {}, {}, is_brief=is_brief)
    predicted, collectives, _ = costs_of(best)
    return CostTerms(
        predicted,
        solution.objective,
        solution.bound,
        predicted.peak_bytes,
        {
            axes: t.seconds
            for axes, t in traffic_by(lambda c: c.axes, collectives).items()
        },
        {line: t.seconds for line, t in traffic_by(_line_of, collectives).items()},
        is_brief=is_brief,
    )


def _line_of(c: Collective) -> Line:
    return c.kind, c.axes, c.source, c.reason


def added(cost: CostTerms, planned: CostTerms) -> tuple[Added, ...]:
    """Return the collectives that one solution has more or less of than the plan.

    The largest change in seconds comes first; collectives without a change are left
    out.
    """
    deltas = {
        line: cost.by_line.get(line, 0.0) - planned.by_line.get(line, 0.0)
        for line in {**cost.by_line, **planned.by_line}
    }
    order = sorted(deltas.items(), key=lambda item: (-abs(item[1]), item[0]))
    return tuple(
        Added(kind, axes, seconds, source, reason)
        for (kind, axes, source, reason), seconds in order
        if seconds
    )


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
        lines += _of_one(*others[0], model, planned)
    elif is_asked:
        if not any(x.cannot for x in layouts):
            lines.append(f"{layouts[0].spec} is the plan's own layout.")
    elif current is None:
        lines += [x for s, c in _best(others) for x in _of_one(s, c, model, planned)]
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
    names, said = model.mesh.names, dict[tuple[str, ...], list[str]]()
    for a, axis in enumerate(model.mesh.axes):
        if axis.size == 1:
            continue
        has = a in axes_of(current)
        turned = [(s, c) for s, c in others if (a in axes_of(s)) != has]
        text: tuple[str, ...] = (
            f"not sharded over AXES: {_not_divided(place, axis.size)}.",
        )
        if has and not turned:
            continue
        for spec, cost in _best(turned):
            best = f"best as {format_spec(spec, names)}, {_what_changes(cost, planned)}"
            cause = _cause(cost, planned)
            text = (
                f"not sharded over AXES because then {cause}.",
                f"sharded over AXES, {best}.",
            )
            if has:
                text = (
                    f"sharded over AXES because without it {cause}.",
                    f"without it, {best}.",
                )
        said.setdefault(text, []).append(f"`{axis.name}`")
    lines = [
        line.replace("AXES", " and ".join(axes))
        for text, axes in said.items()
        for line in text
    ]
    moved = [(s, c) for s, c in others if axes_of(s) == axes_of(current)]
    for spec, cost in _best(moved):
        lines.append(
            f"as {format_spec(spec, names)}, over the same axes,"
            f" {_what_changes(cost, planned)}."
        )
    return lines


def _of_one(
    spec: Spec, cost: CostTerms, model: MeshModel, planned: CostTerms
) -> list[str]:
    text = format_spec(spec, model.mesh.names)
    return [
        f"not {text} because then {_cause(cost, planned)}.",
        f"as {text}, {_what_changes(cost, planned)}.",
    ]


def _cause(cost: CostTerms, planned: CostTerms) -> str:
    """Name the largest term that a layout loses by: one collective, compute or memory.

    As "1.1 ms more go to all-gathers over `model` at gpt.py:61 (gathers params['up'])".
    """
    if cost.predicted is None:
        return "nothing fits in memory"
    delta = cost.step_s - planned.step_s
    if more(delta, planned.step_s) != "=" and delta > 0:
        terms = _terms(cost, planned)
        seconds, what = max(terms, key=lambda term: term[0])
        lost_s = planned.hidden_s - cost.hidden_s
        if lost_s > seconds:
            return f"{format_seconds(lost_s)} of collectives are no longer hidden"
        if what == terms[0][1]:
            return f"each device computes {format_seconds(seconds)} longer"
        return f"{format_seconds(seconds)} more go to {what.removeprefix('of ')}"
    bytes_more = cost.peak_bytes - planned.peak_bytes
    if bytes_more > MEMORY_WORTH * planned.peak_bytes:
        return f"the peak is {format_bytes(bytes_more)} higher"
    if cost.total_s > planned.total_s:
        return "other stages, or what passes between them, take longer"
    return "nothing is gained"


def _not_divided(place: PlacedValues, size: int) -> str:
    dims = [d for d in place.shape if d % size == 0 and d >= size]
    if not dims:
        shape = ", ".join(map(str, place.shape))
        return f"its {size} devices divide no dim ({shape})"
    return "no layout that the op can make is sharded so"


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


CANCELS = 0.02
"""Share of the larger of two terms below which their sum is not named."""


def _terms(cost: CostTerms, planned: CostTerms) -> list[tuple[float, str]]:
    """Return (seconds, words) of compute and of all collectives that differ.

    What one line does to one value is one term, as an all-reduce in place of a
    reduce-scatter; terms that cancel are left out.
    """
    assert cost.predicted is not None and planned.predicted is not None
    groups: dict[tuple[str, str], list[Added]] = defaultdict(list)
    for x in added(cost, planned):
        groups[x.source, x.reason.partition(": ")[0] or x.kind].append(x)
    terms = [(sum(x.seconds for x in g), _said(g)) for g in groups.values()]
    whole = [sum(abs(x.seconds) for x in g) for g in groups.values()]
    terms = [t for t, s in zip(terms, whole, strict=True) if abs(t[0]) > CANCELS * s]
    terms.sort(key=lambda term: -abs(term[0]))
    left: list[tuple[float, str]] = []
    for term in terms:
        if left and abs(left[-1][0] + term[0]) <= CANCELS * abs(term[0]):
            left.pop()
        else:
            left.append(term)
    compute_s = cost.predicted.compute_s - planned.predicted.compute_s
    return [(compute_s, "of compute"), *left]


def _reasons(cost: CostTerms, planned: CostTerms) -> str:
    """Return the terms that add up to the difference of the steps, in words."""
    assert cost.predicted is not None and planned.predicted is not None
    terms = _terms(cost, planned)
    beside_s = cost.hidden_s - planned.hidden_s
    beside = "hidden" if beside_s > 0 else "no longer hidden"
    largest = max(abs(s) for s, _ in [*terms, (beside_s, "")])
    named = [x for x in terms if abs(x[0]) >= max(WORTH * largest, 1e-12)]
    named = sorted(named, key=lambda x: -abs(x[0]))[:MAX_REASONS]
    changed = sum(x.seconds for x in added(cost, planned)) + terms[0][0]
    rest_s = changed - sum(s for s, _ in named)
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


def _said(group: Sequence[Added]) -> str:
    """Describe what a line sends of one value, and what this takes the place of."""
    least, most = (f(group, key=lambda x: x.seconds) for f in (min, max))
    lead = most if most.seconds > 0 else least
    what = f"{lead.kind}s over `{'+'.join(lead.axes)}`"
    before = f"{least.kind}s over `{'+'.join(least.axes)}`"
    if least.seconds < 0 < most.seconds and what != before:
        what += f" in place of {before}"
    place = f" at {lead.source.partition(' (')[0]}" if lead.source else ""
    reason = f" ({lead.reason})" if lead.reason else ""
    return f"of {what}{place}{reason}"
