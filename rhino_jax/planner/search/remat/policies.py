"""Common remat policies by name, as choices in addition to the solver's.

    nothing saved              all of a layer is recomputed from its inputs
    products saved             ops other than matmuls are recomputed (`dots_saveable`)
    products of weights saved  so are matmuls with a batch dim, such as attention's
                               scores (`dots_with_no_batch_dims_saveable`)

Each may hold for all layers or for the last of them, while the first save all, as in
Galvatron. A policy's cost and memory are evaluated in the remat problem that the solver
gets; where that is too large to solve, policies are the only candidates.

Source: `jax.checkpoint_policies`; Miao et al., Galvatron (VLDB 2022), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rhino_jax.planner.search.limits import LIMITS
from rhino_jax.planner.search.remat.parts import parted
from rhino_jax.planner.search.remat.rows import RematQuestion, RerunWork
from rhino_jax.solver.remat.question import OFFLOAD, REMAT, SAVE, RematAnswer, evaluate


NOTHING_SAVED = "nothing saved"

POLICIES: dict[str, RerunWork] = {
    NOTHING_SAVED: RerunWork.PRODUCT,
    "products saved": RerunWork.SMALL,
    "products of weights saved": RerunWork.BATCHED,
}
"""Name → the most work that is repeated for a value."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy with its cost and memory.

    Attributes:
      name: with the share of layers that save all, if any do.
      answer: its cost and memory.
      first: (forward loop, number of first slices of its stacks that are saved), see
        `RematChoice`.
    """

    name: str
    answer: RematAnswer
    first: tuple[tuple[int, int], ...] = ()


def fitting(asked: RematQuestion, budget_bytes: float) -> list[Policy]:
    """Return the cheapest variant that fits of each policy, if one does."""
    found: list[Policy] = []
    for name, most in POLICIES.items():
        tried = [p for p in _of(asked, name, most) if _fits(p, budget_bytes)]
        if tried:
            found.append(min(tried, key=lambda p: p.answer.added_s))
    return found


def whole(asked: RematQuestion, name: str) -> RematAnswer | None:
    """Return a policy's cost and memory for all layers; None: it does not apply."""
    answer = evaluate(asked.question, _choices(asked, POLICIES[name], 0))
    return answer and counted_once(asked, answer)


def of_all(asked: RematQuestion) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the policies for all layers: name, and the choice for every candidate."""
    for name, most in POLICIES.items():
        yield name, _choices(asked, most, 0)


def _fits(policy: Policy, budget_bytes: float) -> bool:
    return policy.answer.peak_bytes <= budget_bytes


def _of(asked: RematQuestion, name: str, most: RerunWork) -> Iterator[Policy]:
    layers = 1 + max((c.layer for c in asked.question.candidates), default=0)
    for k in range(LIMITS.loop_parts if layers > 1 else 1):
        choices = _choices(asked, most, round(k * layers / LIMITS.loop_parts))
        answer = evaluate(asked.question, choices)
        if answer is not None:
            yield Policy(_named(name, k), counted_once(asked, answer))
    whole = _choices(asked, most, 0)
    for k, (first, question, waits_s) in enumerate(parted(asked)):
        answer = evaluate(question, whole) if first else None
        if answer is not None:
            answer = replace(answer, added_s=answer.added_s + waits_s)
            yield Policy(_named(name, k), counted_once(asked, answer, first), first)


def counted_once(
    asked: RematQuestion, answer: RematAnswer, first: tuple[tuple[int, int], ...] = ()
) -> RematAnswer:
    """Return an answer whose cost counts equations that recompute several values once.

    Args:
      asked: the remat problem.
      answer: an answer to it.
      first: (forward loop, number of first slices of its stacks that are saved).
    """
    several = {0: [i for i, c in enumerate(answer.choices) if c == REMAT]}
    share = 1.0
    ((loop, count),) = first or ((0, 0),)
    if first:
        length, members = asked.loops[loop]
        several = {
            0: [i for i in several[0] if i not in members],
            1: [i for i in several[0] if i in members],
        }
        share = 1 - count / length
    there = [
        v
        for v, c in zip(asked.values, answer.choices, strict=True)
        if c in (SAVE, OFFLOAD)
    ]
    added_s = answer.added_s
    for k, again in several.items():
        rest = share if k else 1.0
        each = [asked.question.candidates[i].remat_s or 0.0 for i in again]
        once = asked.together_s([asked.values[i] for i in again], there)
        added_s += rest * min(0.0, once - sum(each))
    return replace(answer, added_s=max(0.0, added_s))


def _named(name: str, parts: int) -> str:
    return f"{name}, {parts} in {LIMITS.loop_parts} layers whole" if parts else name


def _choices(asked: RematQuestion, most: RerunWork, first: int) -> tuple[str, ...]:
    """Return the choices under a policy; layers before `first` save all.

    Values from which later layers are recomputed, such as the terms of a residual
    stream, are saved: otherwise all would be recomputed at once.
    """
    candidates = asked.question.candidates
    # Equivalent values are numbered by layer; where a first layer differs, numbers are
    # off by one.
    enters = {
        j
        for c in candidates
        for j in c.needs
        if c.like is not None and abs(candidates[j].layer - c.layer) > 1
    }
    within = {i for _, members in asked.loops.values() for i in members}
    within |= {i for i, c in enumerate(candidates) if c.like is not None}

    def is_recomputed(i: int) -> bool:
        c = candidates[i]
        is_late = c.like is None or c.layer >= first
        is_small = c.remat_s is not None and asked.work[i] <= most
        return is_late and is_small and i not in enters and (i in within or not within)

    return tuple(REMAT if is_recomputed(i) else SAVE for i in range(len(candidates)))
