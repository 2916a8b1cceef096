"""Choice of a cut for a problem: the fast way, or the best."""

from __future__ import annotations

from typing import Any

import numpy as np

from rhino_jax.errors import (
    InfeasiblePlanError,
    PinError,
    StageError,
    StageOrderError,
)
from rhino_jax.pipeline.cut.contract import contract
from rhino_jax.pipeline.cut.fast import fast
from rhino_jax.pipeline.cut.numbers import (
    NO_LIMIT,
    CutArrays,
    cut_of,
    numbers_of,
    price,
)
from rhino_jax.pipeline.cut.ops import CutProblem, StageCut
from rhino_jax.units import format_bytes


def cut(
    problem: CutProblem,
    level: str = "best",
    *,
    effort: float = 10.0,
    gap: float = 0.0,
    seed: int = 0,
) -> StageCut:
    """Cut a program into stages.

    Every stage does some work. The fast way returns the best of a few orders of the
    ops; the best starts from there and searches the whole graph.

    Args:
      problem: the program and the devices of its stages.
      level: "fast" or "best".
      effort: limit on CP-SAT's deterministic seconds.
      gap: optimality gap at which the search stops, as a share of the step time.
      seed: seed of CP-SAT.
    Raises:
      StageError: there are fewer ops with work than stages, or pins contradict the
        order of ops.
      InfeasiblePlanError: no cut fits in memory, or none was found.
    """
    if level not in ("fast", "best"):
        raise StageError(
            f"There is no level {level!r} of cutting.",
            numbers="known: fast, best",
            fix='take level="fast" or level="best".',
        )
    numbers = numbers_of(problem)
    _check(problem, numbers)
    small = contract(numbers)
    found = fast(small.numbers)
    stages = None if found is None else small.expand(found)
    if level == "fast" or numbers.stages == 1:
        if stages is None:
            raise _infeasible(problem, numbers, is_proved=False)
        bound = price(numbers, stages).step_time_ns if numbers.stages == 1 else 0
        return cut_of(numbers, stages, bound, small.numbers.count)
    return _best(problem, numbers, stages, effort=effort, gap=gap, seed=seed)


def _best(
    problem: CutProblem,
    numbers: CutArrays,
    stages: np.ndarray | None,
    **limits: Any,
) -> StageCut:
    """Return the best cut that CP-SAT finds, from `stages` on, if these are known."""
    from rhino_jax.pipeline.cut.best import best

    known_ns = None if stages is None else price(numbers, stages).step_time_ns
    small = contract(numbers, known_ns)
    hint, limit_ns = None, NO_LIMIT
    if stages is not None and known_ns is not None:
        hint = np.zeros(small.numbers.count, int)
        hint[small.node_of] = stages
        # The known cut may not be one of the contracted problem, whose cuts are all
        # faster.
        hint = hint if (small.expand(hint) == stages).all() else None
        limit_ns = known_ns - (hint is None)
    found = best(small.numbers, hint, limit_ns=limit_ns, **limits)
    chosen, chosen_ns, bound = stages, known_ns, 0
    if found.stages is not None:
        chosen, bound = small.expand(found.stages), found.bound_ns
        chosen_ns = price(numbers, chosen).step_time_ns
        if known_ns is not None and known_ns <= chosen_ns:
            chosen, chosen_ns = stages, known_ns
    if chosen is None or chosen_ns is None:
        raise _infeasible(problem, numbers, is_proved=found.is_proved)
    bound = chosen_ns if found.is_proved else min(bound, chosen_ns)
    return cut_of(numbers, chosen, bound, small.numbers.count)


def _check(problem: CutProblem, numbers: CutArrays) -> None:
    """Refuse more stages than ops with work, and pins that no cut satisfies."""
    names, works = [op.name for op in problem.ops.ops], (numbers.op_ns > 0).any(axis=1)
    working, pins = int(works.sum()), numbers.pins
    if working < numbers.stages:
        known = dict.fromkeys(names[i] for i in np.flatnonzero(works))
        raise StageError(
            "There are more stages than ops that take time.",
            where="`stages=`",
            numbers=f"{numbers.stages} stages, {working} ops: {', '.join(known)}",
            fix=f"take at most {working} stages. A loop is one op, unless it is over"
            " layers whose number the stages divide: leave one over micro-batches to"
            " `microbatches=`.",
        )
    edges = sorted(
        (int(source), reader)
        for source, readers in zip(numbers.sources, numbers.readers, strict=True)
        for reader in readers
    )
    # The first stage that each op can be in, and the last.
    earliest, before = np.where(pins >= 0, pins, 0), None
    while before is None or (earliest != before).any():
        before = earliest.copy()
        for op, reader in edges:
            earliest[reader] = max(earliest[reader], earliest[op])
            if 0 <= pins[reader] < earliest[op]:
                raise StageOrderError(
                    "A pinned op needs what a later stage makes.",
                    where=f"op {reader} {names[reader]}".strip(),
                    numbers=f"pinned to stage {pins[reader]}; what it reads is in stage"
                    f" {earliest[op]} or later",
                    fix=f"pin it to stage {earliest[op]} or later, or what it reads"
                    f" to {pins[reader]} or earlier.",
                )
        for chain in numbers.chains:
            at = {op: k for k, link in enumerate(chain) for op in link}
            first = max(int(earliest[op]) - k for op, k in at.items())
            for op, k in at.items():
                earliest[op] = first + k
                limit = numbers.stages - 1 if pins[op] < 0 else pins[op]
                if limit < earliest[op]:
                    raise StageOrderError(
                        f"{len(chain)} parts of a loop do not lie in as many stages in"
                        " a row.",
                        where=f"op {op} {names[op]}".strip(),
                        numbers=f"part {k} is in stage {earliest[op]} at least, and in"
                        f" stage {limit} at most",
                        fix="take more stages, or other pins.",
                    )
    latest = np.where(pins >= 0, pins, numbers.stages - 1)
    for op, reader in reversed(edges):
        latest[op] = min(latest[op], latest[reader])
    for stage in range(numbers.stages):
        if not (works & (earliest <= stage) & (stage <= latest)).any():
            held = np.flatnonzero(works & (pins >= 0))
            raise PinError(
                f"Pins leave stage {stage} nothing to do.",
                where=", ".join(names[op] for op in held[:3]),
                numbers=f"{numbers.stages} stages; of {working} ops that take"
                f" time, {len(held)} pinned, none can be in stage {stage}",
                fix=f"pin something to stage {stage}, or leave an op free.",
            )


def _infeasible(
    problem: CutProblem, numbers: CutArrays, *, is_proved: bool
) -> InfeasiblePlanError:
    """Return the error for a problem without a cut."""
    if (numbers.limit_bytes >= NO_LIMIT).all():
        return InfeasiblePlanError(
            f"No cut into {numbers.stages} stages gives each of them work.",
            where="`stages=` and `pins=`",
            numbers=f"{int((numbers.op_ns > 0).any(axis=1).sum())} ops that take time,"
            f" {int((numbers.pins >= 0).sum())} pinned ops",
            fix="take fewer stages, or pin less.",
        )
    in_flight = int(numbers.in_flight.min())
    total = numbers.own_bytes.sum() + numbers.shared_bytes.sum()
    total += in_flight * numbers.activation_bytes.sum()
    limits = numbers.limit_bytes
    is_limited = bool((limits < NO_LIMIT).all())
    single = numbers.own_bytes + in_flight * numbers.activation_bytes
    largest = int(single.argmax())
    room = format_bytes(int(limits.sum())) if is_limited else "no common limit"
    return InfeasiblePlanError(
        f"No cut into {numbers.stages} stages fits."
        if is_proved
        else f"No cut into {numbers.stages} stages was found that fits.",
        where=f"largest: op {largest} {problem.ops.ops[largest].name}".strip()
        + f", {format_bytes(int(single[largest]))}",
        numbers=f"{format_bytes(int(total))} with {in_flight} micro-batches in flight,"
        f" {room} in all groups",
        fix="take more stages, smaller micro-batches, or recompute activations.",
    )
