"""Choice of the forms of calls (`rhino.choose`): the program is planned with each.

Calls are chosen one by one, each alone against the first forms, then the best of each
together: the plans are as many as there are further forms, and two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rhino_jax.errors import PinError, TraceError
from rhino_jax.frontend.forms.calls import CallSite, reason_of
from rhino_jax.ir.transform import FORMS, chosen
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.records import Variant
from rhino_jax.planner.decision import Decision, noted, row_of
from rhino_jax.planner.variant_search import Search


MAX_PLANS = 16
"""Maximum number of programs that are planned to choose forms."""

Choice = tuple[tuple[str, str], ...]
"""(key of a call site, form) of every call site."""


def in_best_forms(search: Search, plan: Callable[[Search], PlanData]) -> PlanData:
    """Return the plan with the forms whose step is predicted shortest.

    The first forms stay where others gain less than `MIN_GAIN` together.

    Args:
      search: the search of the user's program.
      plan: plans a search.
    Raises:
      TraceError: a call has no form that runs on the hardware.
      PinError: a pinned form does not run there.
      Exception: of the first forms, where no choice can be planned.
    """
    forms = search.traced.forms
    if forms is None:
        return plan(search)
    calls = [UsableForms.of(site, search) for site in forms.sites]
    first = tuple((call.site.key, call.usable[0]) for call in calls)

    def make(choice: Choice) -> PlanData:
        others = {
            call.site.key: form
            for call, (_, form) in zip(calls, choice, strict=True)
            if form != call.site.first
        }
        return plan(search.after([chosen(FORMS, others)]) if others else search)

    deadline = search.request.deadline
    decision = Decision(make, (Exception,), deadline=deadline, most=MAX_PLANS)
    _plan(decision, first)
    best = dict(first)
    for call in calls:
        key = call.site.key
        tried = {form: _with(first, key, form) for form in call.usable}
        for choice in tried.values():
            _plan(decision, choice)
        best[key] = min(tried, key=lambda form: _rank(decision, tried[form]))
    _plan(decision, tuple(best.items()))
    if not decision.plans:
        raise decision.left[first]
    found = decision.taken()
    (taken,) = (choice for choice, one in decision.plans.items() if one is found)
    # What each other form would have cost.
    notes: list[str] = []
    names: list[str] = []
    rows: list[Variant] = []
    for call, (key, form) in zip(calls, taken, strict=True):
        place, told = str(call.site.source), []
        for other in call.usable:
            choice = _with(first, key, other)
            if (one := decision.plans.get(choice)) is not None:
                told.append(f"{other} {decision.text(choice)}")
                if other != form:
                    rows.append(row_of(f"{place} as {other}", one))
            elif (error := decision.left.get(choice)) is not None:
                told.append(f"{other}: {reason_of(error)}")
            else:
                told.append(f"{other}: not planned, for lack of time")
        told += [f"{other}: {why}" for other, why in call.left.items()]
        names.append(f"{place} as {form}")
        notes.append(f"{place} runs as {form!r} ({'; '.join(told)}).")
    own = found.variants
    if rows and not own:
        own = (row_of(", ".join(names), found, is_chosen=True),)
    return replace(noted(found, *notes), variants=(*own, *rows))


def _plan(decision: Decision[Choice, PlanData], choice: Choice) -> None:
    """Plan a choice; of the plans so far, only the fastest keeps its problem, which is
    large."""
    decision.plan(choice)
    best = decision.best
    for other, plan in decision.plans.items():
        if other != best and plan.origin is not None:
            decision.plans[other] = replace(plan, origin=None)


def _with(choice: Choice, key: str, form: str) -> Choice:
    return tuple((k, form if k == key else f) for k, f in choice)


def _rank(decision: Decision[Choice, PlanData], choice: Choice) -> tuple[float, float]:
    """Return seconds and peak, to compare choices of which none may fit."""
    if choice in decision.plans:
        return decision.seconds(choice), 0.0
    peak = getattr(decision.left.get(choice), "smallest_peak_bytes", None)
    return math.inf, math.inf if peak is None else peak


@dataclass(frozen=True, slots=True)
class UsableForms:
    """A call site, its forms that run on the hardware, and why others do not."""

    site: CallSite
    usable: tuple[str, ...]
    left: Mapping[str, str]

    @classmethod
    def of(cls, site: CallSite, search: Search) -> UsableForms:
        platform = search.target.device.platform
        left = dict(site.left)
        for form in site.traced:
            if platform is not None and (why := site.not_on(form, platform)):
                left[form] = why
        usable = tuple(form for form in site.traced if form not in left)
        pinned = search.form_pins.get(site.key)
        numbers = "; ".join(f"{form}: {why}" for form, why in left.items())
        if pinned in left:
            raise PinError(
                f"{search.what}: pinned form {pinned!r} does not run on"
                f" {search.target.name}.",
                where=str(site.source),
                numbers=numbers,
                fix=f"pin one of {', '.join(usable)}." if usable else "drop the pin.",
            )
        if not usable:
            raise TraceError(
                f"{search.what}: no form of a call runs on {search.target.name}.",
                where=str(site.source),
                numbers=numbers,
                fix="add a form of plain JAX operations.",
            )
        return cls(site, usable if pinned is None else (pinned,), left)
