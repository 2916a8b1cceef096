"""Choice of a cut for a problem: the fast way, or the best; and contraction of ops that
stay in one stage, so that cuts of fewer nodes are searched.

Contraction is exact: some optimal cut satisfies all of these.

- An op without work, activations or parameters is in the stage of its operand, if that
  is a single value that is not smaller than all the op's results and that has no other
  reader; or if the op's results have no readers.
- Such an op is in the stage of its only reader, if its results are not smaller than its
  operands.
- A value stays in one stage, if any cut that sends it over a hop takes at least as long
  as a known cut.
- The ops of a link of a chain are in one stage.
- All ops between two ops of one stage are in that stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from rhino_jax.errors import (
    InfeasiblePlanError,
    PinError,
    StageError,
    StageOrderError,
)
from rhino_jax.pipeline.cut.fast import fast
from rhino_jax.pipeline.cut.numbers import (
    NO_LIMIT,
    CutArrays,
    ReadGraph,
    cut_of,
    numbers_of,
    price,
)
from rhino_jax.pipeline.cut.ops import CutProblem, StageCut
from rhino_jax.units import format_bytes


@dataclass(frozen=True)
class Contracted:
    """A contracted problem.

    Attributes:
      numbers: the problem of its nodes, in a topological order.
      node_of: node of every op of the original problem.
    """

    numbers: CutArrays
    node_of: np.ndarray

    def expand(self, stages: np.ndarray) -> np.ndarray:
        """Return stages of ops from stages of nodes."""
        return stages[self.node_of]


def contract(numbers: CutArrays, known_ns: int | None = None) -> Contracted:
    """Merge ops that stay in one stage.

    Args:
      numbers: the cut problem.
      known_ns: step time of a known cut; cuts that the contraction excludes are no
        faster. None: no cut is known.
    """
    node_of = np.arange(numbers.count)
    links = [pair for chain in numbers.chains for k in chain for pair in pairwise(k)]
    heavy = [] if known_ns is None else _too_heavy(numbers, known_ns)
    pairs = links + heavy
    if _sets_pins_against(numbers, pairs):
        pairs = links
    while True:
        pairs += _idle_pairs(numbers)
        merged = _merge(numbers, pairs)
        if merged.numbers.count == numbers.count:
            return Contracted(merged.numbers, merged.node_of[node_of])
        numbers, node_of = merged.numbers, merged.node_of[node_of]
        pairs = []


def _too_heavy(numbers: CutArrays, known_ns: int) -> list[tuple[int, int]]:
    """Return (source, reader) of values that no faster cut sends over any hop."""
    if numbers.stages < 2:
        return []
    least = numbers.least_work_ns + numbers.base_ns
    steady = numbers.micro_batches - 1
    slowest = (numbers.value_ns + numbers.latency_ns[None, :, None]).max(axis=2)
    pace = np.maximum(slowest, numbers.least_bottleneck_ns)
    takes = (least + numbers.value_ns.sum(axis=2) + steady * pace).min(axis=1)
    return [
        (int(numbers.sources[v]), reader)
        for v, readers in enumerate(numbers.readers)
        if takes[v] >= known_ns
        for reader in readers
    ]


def _sets_pins_against(numbers: CutArrays, pairs: list[tuple[int, int]]) -> bool:
    """Whether merging `pairs` would contradict pins or chains.

    That is, a node would have ops that are pinned to different stages, or of different
    links of a chain.
    """
    merged = _merge(numbers, pairs)
    node_of = merged.node_of
    for chain in merged.numbers.chains:
        if len({node for link in chain for node in link}) < sum(map(len, chain)):
            return True
    is_pinned = numbers.pins >= 0
    found = np.stack([node_of[is_pinned], numbers.pins[is_pinned]])
    return len(np.unique(found, axis=1).T) > len(np.unique(found[0]))


def _idle_pairs(numbers: CutArrays) -> list[tuple[int, int]]:
    """Return (op without work, op whose stage it shares)."""
    made, read = numbers.ends
    is_idle = (numbers.op_ns == 0).all(axis=1) & numbers.is_movable
    is_idle &= (numbers.activation_bytes == 0) & (numbers.own_bytes == 0)
    # Bytes and times of values, concatenated: a value is smaller if all entries are.
    sizes = np.concatenate(
        [numbers.value_bytes, *np.moveaxis(numbers.value_ns, 1, 0)],
        axis=1,
    )
    pairs = []
    for op in map(int, np.flatnonzero(is_idle)):
        all_made = sizes[made[op]].sum(axis=0)
        readers = {r for v in made[op] for r in numbers.readers[v]}
        if (
            len(read[op]) == 1
            and (numbers.readers[read[op][0]] == (op,) or not made[op])
            and (all_made <= sizes[read[op][0]]).all()
        ):
            pairs.append((op, int(numbers.sources[read[op][0]])))
        elif len(readers) == 1 and (sizes[read[op]].sum(axis=0) <= all_made).all():
            pairs.append((op, min(readers)))
    return pairs


def _merge(numbers: CutArrays, pairs: list[tuple[int, int]]) -> Contracted:
    """Merge both ops of every pair, and all ops between them, into one node."""
    edges: list[list[int]] = [[] for _ in range(numbers.count)]
    for v, readers in enumerate(numbers.readers):
        edges[numbers.sources[v]] += readers
    for a, b in pairs:
        edges[a].append(b)
        edges[b].append(a)
    node_of = np.array(_components(edges))
    count = int(node_of.max()) + 1

    def summed(of_ops: np.ndarray) -> np.ndarray:
        total = np.zeros((count, *of_ops.shape[1:]), of_ops.dtype)
        np.add.at(total, node_of, of_ops)
        return total

    pins = np.full(count, -1)
    np.maximum.at(pins, node_of, numbers.pins)
    own = summed(numbers.own_bytes)
    shared = [tuple(sorted({int(node_of[r]) for r in rs})) for rs in numbers.shared]
    for p, nodes in enumerate(shared):
        if len(nodes) == 1:
            own[nodes[0]] += numbers.shared_bytes[p]
    still = [p for p, nodes in enumerate(shared) if len(nodes) > 1]
    # Values between nodes: source and readers → the original values.
    members: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for v, readers in enumerate(numbers.readers):
        source = int(node_of[numbers.sources[v]])
        others = tuple(sorted({int(node_of[r]) for r in readers} - {source}))
        if others:
            members.setdefault((source, others), []).append(v)

    def sums(of_values: np.ndarray) -> np.ndarray:
        rows = [of_values[of].sum(axis=0) for of in members.values()]
        return np.array(rows, np.int64).reshape(len(members), *of_values.shape[1:])

    merged = replace(
        numbers,
        op_ns=summed(numbers.op_ns),
        activation_bytes=summed(numbers.activation_bytes),
        own_bytes=own,
        sources=np.array([source for source, _ in members], np.int64),
        readers=tuple(readers for _, readers in members),
        value_bytes=sums(numbers.value_bytes),
        value_ns=sums(numbers.value_ns),
        shared=tuple(shared[p] for p in still),
        shared_bytes=numbers.shared_bytes[still],
        shared_ns=numbers.shared_ns[still],
        pins=pins,
        chains=tuple(
            tuple(tuple(sorted({int(node_of[op]) for op in link})) for link in chain)
            for chain in numbers.chains
        ),
    )
    return Contracted(merged, node_of)


def _components(edges: list[list[int]]) -> list[int]:
    """Return the strongly connected component of every op, in a topological order.

    Source: Tarjan, "Depth-first search and linear graph algorithms" (SIAM 1972), which
    finds components in reverse topological order.
    """
    count = len(edges)
    index, low, component = [-1] * count, [0] * count, [-1] * count
    stack: list[int] = []
    found = step = 0
    for root in range(count):
        work = [(root, 0)] if index[root] < 0 else []
        while work:
            op, at = work.pop()
            if index[op] < 0:
                index[op] = low[op] = step
                step += 1
                stack.append(op)
            for k in range(at, len(edges[op])):
                other = edges[op][k]
                if index[other] < 0:
                    work += [(op, k), (other, 0)]
                    break
                if component[other] < 0:
                    low[op] = min(low[op], low[other])
            else:
                if low[op] == index[op]:
                    while component[op] < 0:
                        component[stack.pop()] = found
                    found += 1
    return _renumbered([found - 1 - c for c in component], edges)


def _renumbered(component: list[int], edges: list[list[int]]) -> list[int]:
    """Renumber components so that independent ones are in their original order."""
    count = max(component) + 1
    first = [len(component)] * count
    for op, c in enumerate(component):
        first[c] = min(first[c], op)
    between = (
        (component[op], component[other])
        for op, others in enumerate(edges)
        for other in others
        if component[op] != component[other]
    )
    order = ReadGraph.of_edges(count, between).by_key(first)
    number = {c: k for k, c in enumerate(order)}
    return [number[c] for c in component]


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
        return cut_of(numbers, stages, bound)
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
    return cut_of(numbers, chosen, bound)


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
