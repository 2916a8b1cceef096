"""Choice of a cut for a problem: the fast way, or the best."""

from __future__ import annotations

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
    return _best(problem, numbers, stages, effort, gap, seed)


def _best(
    problem: CutProblem,
    numbers: CutArrays,
    stages: np.ndarray | None,
    effort: float,
    gap: float,
    seed: int,
) -> StageCut:
    from rhino_jax.pipeline.cut.best import best

    known_ns = None if stages is None else price(numbers, stages).step_time_ns
    small = contract(numbers, known_ns)
    # The known cut may not be one of the contracted problem, whose cuts are all faster.
    hint = _as_nodes(small.node_of, stages)
    limit_ns = NO_LIMIT if known_ns is None else known_ns - (hint is None)
    found = best(
        small.numbers, hint, limit_ns=limit_ns, effort=effort, gap=gap, seed=seed
    )
    if found.stages is None:
        if stages is None or known_ns is None:
            raise _infeasible(problem, numbers, is_proved=found.is_proved)
        bound = known_ns if found.is_proved else 0
        return cut_of(numbers, stages, bound, small.numbers.count)
    chosen = small.expand(found.stages)
    chosen_ns = price(numbers, chosen).step_time_ns
    if known_ns is not None and stages is not None and known_ns <= chosen_ns:
        chosen, chosen_ns = stages, known_ns
    bound = chosen_ns if found.is_proved else min(found.bound_ns, chosen_ns)
    return cut_of(numbers, chosen, bound, small.numbers.count)


def _as_nodes(node_of: np.ndarray, stages: np.ndarray | None) -> np.ndarray | None:
    """Convert stages of ops to stages of nodes; None if a node's ops are in several."""
    if stages is None:
        return None
    of_nodes = np.zeros(node_of.max() + 1, int)
    of_nodes[node_of] = stages
    return of_nodes if (of_nodes[node_of] == stages).all() else None


def _check(problem: CutProblem, numbers: CutArrays) -> None:
    places = np.flatnonzero((numbers.op_ns > 0).any(axis=1))
    working = len(places)
    if working < numbers.stages:
        names = dict.fromkeys(problem.ops.ops[i].name for i in places)
        raise StageError(
            "There are more stages than ops that take time.",
            where="`stages=`",
            numbers=f"{numbers.stages} stages, {working} ops: {', '.join(names)}",
            fix=f"take at most {working} stages. A loop is one op, unless it is over"
            " layers whose number the stages divide: leave one over micro-batches to"
            " `microbatches=`.",
        )
    latest = np.where(numbers.pins >= 0, numbers.pins, 0)
    while True:
        before = latest.copy()
        _raise_readers(problem, numbers, latest)
        _raise_chains(problem, numbers, latest)
        if (latest == before).all():
            break
    _check_all_work(problem, numbers, latest)


def _raise_readers(problem: CutProblem, numbers: CutArrays, latest: np.ndarray) -> None:
    """Raise `latest` so that every op is no earlier than the values that it reads."""
    for op in range(numbers.count):
        for v in np.flatnonzero(numbers.sources == op):
            for reader in numbers.readers[v]:
                latest[reader] = max(latest[reader], latest[op])
                pin, name = numbers.pins[reader], problem.ops.ops[reader].name
                if 0 <= pin < latest[op]:
                    raise StageOrderError(
                        "A pinned op needs what a later stage makes.",
                        where=f"op {reader} {name}".strip(),
                        numbers=f"pinned to stage {pin}; what it reads is in stage"
                        f" {latest[op]} or later",
                        fix=f"pin it to stage {latest[op]} or later, or what it reads"
                        f" to {pin} or earlier.",
                    )


def _raise_chains(problem: CutProblem, numbers: CutArrays, latest: np.ndarray) -> None:
    """Raise `latest` so that the links of every chain are in consecutive stages."""
    for chain in numbers.chains:
        at = {op: k for k, link in enumerate(chain) for op in link}
        first = max(int(latest[op]) - k for op, k in at.items())
        for op, k in at.items():
            latest[op] = first + k
            pin, name = numbers.pins[op], problem.ops.ops[op].name
            limit = numbers.stages - 1 if pin < 0 else pin
            if limit < latest[op]:
                raise StageOrderError(
                    f"{len(chain)} parts of a loop do not lie in as many stages in a"
                    " row.",
                    where=f"op {op} {name}".strip(),
                    numbers=f"part {k} is in stage {latest[op]} at least, and in stage"
                    f" {limit} at most",
                    fix="take more stages, or other pins.",
                )


def _check_all_work(
    problem: CutProblem, numbers: CutArrays, latest: np.ndarray
) -> None:
    """Refuse pins that leave a stage without work.

    Args:
      latest: the first stage that each op can be in.
    """
    first = np.full(numbers.count, numbers.stages - 1)
    for op in reversed(range(numbers.count)):
        pin = numbers.pins[op]
        first[op] = pin if pin >= 0 else first[op]
        for v in np.flatnonzero(numbers.sources == op):
            first[op] = min([first[op], *first[list(numbers.readers[v])]])
    works = (numbers.op_ns > 0).any(axis=1)
    for stage in range(numbers.stages):
        if not (works & (latest <= stage) & (stage <= first)).any():
            held = np.flatnonzero(works & (numbers.pins >= 0))
            raise PinError(
                f"Pins leave stage {stage} nothing to do.",
                where=", ".join(problem.ops.ops[op].name for op in held[:3]),
                numbers=f"{numbers.stages} stages; of {int(works.sum())} ops that take"
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
