"""The question that the planner asks about remat: which residuals a planned step, or a
stage, had best recompute or offload within a memory budget."""

from __future__ import annotations

from dataclasses import replace

from rhino_jax.planner.search.remat.policies import (
    POLICIES,
    counted_once,
    parted,
    variants,
    whole,
)
from rhino_jax.planner.search.remat.rows import Chosen, RematQuestion
from rhino_jax.solver.remat.model import choose
from rhino_jax.solver.remat.question import OFFLOAD, SAVE, evaluate


SOME = "selective remat"

MUCH_BYTES = 1 << 60
"""A memory budget that is no limit."""


def ask(
    asked: RematQuestion, budget_bytes: float, *, effort: float = 15.0
) -> list[Chosen]:
    """Return the solver's choice and the cheapest variant of each policy that fit,
    cheapest first; empty where none fits, or none is cheaper than saving all.

    Args:
      asked: the residuals, with costs.
      budget_bytes: the memory budget of one device; infinite for no limit.
      effort: limit of each search, see `choose`.
    """
    best = _solved(asked, budget_bytes, effort)
    found = [best] if best is not None else []
    for name in POLICIES if best is None or best.answer.added_s else ():
        fits = (c for c in variants(asked, name) if c.answer.peak_bytes <= budget_bytes)
        cheapest = min(fits, key=lambda c: c.answer.added_s, default=None)
        found += [cheapest] if cheapest is not None else []
    found.sort(key=lambda c: c.answer.added_s)
    if not found or not str(found[0].choice):
        return []
    return [c for c in found if str(c.choice)]


def _solved(asked: RematQuestion, budget_bytes: float, effort: float) -> Chosen | None:
    """Return the solver's choice; None where it finds none that fits."""
    best: Chosen | None = None
    for first, question, saved_s in parted(asked):
        limit = int(min(budget_bytes, MUCH_BYTES))
        answer = choose(question, limit, effort=effort)
        if answer is None:
            continue
        answer = replace(answer, added_s=answer.added_s + saved_s)
        answer = counted_once(asked, answer, first)
        if best and answer.added_s >= best.answer.added_s:
            continue
        best = asked.chosen(SOME, answer, first)
        if not answer.added_s:
            break
    return best


def smallest_peak(asked: RematQuestion) -> Chosen | None:
    """Return the policy for all layers with the smallest peak, whatever its cost, with
    saved values offloaded if that lowers the peak; None where there is nothing to
    recompute or to offload."""
    found: list[Chosen] = []
    for name in POLICIES:
        choices = whole(asked, name)
        pairs = zip(asked.question.candidates, choices, strict=True)
        offloaded = tuple(
            OFFLOAD if what == SAVE and c.uses and c.offload_s is not None else what
            for c, what in pairs
        )
        for each in dict.fromkeys([choices, offloaded]):
            answer = evaluate(asked.question, each)
            found += [asked.chosen(name, answer)] if answer is not None else []
    least = min(found, key=lambda c: c.answer.peak_bytes, default=None)
    is_change = least and (least.choice.recompute or least.choice.offload)
    return least if is_change else None
