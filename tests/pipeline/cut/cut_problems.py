"""Small random problems, and their best cuts by looking at all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from rhino_jax.pipeline.cut.ops import (
    IN_FLIGHT,
    CutOp,
    CutOps,
    CutProblem,
    CutValue,
    Parameter,
    StageDevices,
)
from rhino_jax.pipeline.tasks import TransferLink


def random_problem(
    seed: int,
    count: int,
    stages: int,
    *,
    is_limited: bool = False,
    is_mixed: bool = False,
    links: int = 0,
) -> CutProblem:
    """A graph with ops without work, values of all sizes, and a shared parameter; with
    so many links, a chain of ops and one of pairs of ops."""
    rng, ops = np.random.default_rng(seed), []
    for i in range(count):
        is_idle = rng.random() < 0.3
        ops.append(
            CutOp(
                name=f"op{i}",
                forward_s=0.0 if is_idle else int(rng.integers(1, 9)) * 1e-3,
                backward_s=0.0 if is_idle else int(rng.integers(1, 17)) * 1e-3,
                activation_bytes=0 if is_idle else int(rng.integers(0, 50)),
            )
        )
    values = []
    for i in range(count - 1):
        later = np.arange(i + 1, min(count, i + 6))
        number = min(len(later), int(rng.integers(1, 3)))
        readers = tuple(int(r) for r in rng.choice(later, number, replace=False))
        sizes = int(rng.integers(1, 40)), int(rng.integers(0, 40))
        values.append(CutValue(i, readers, *sizes))
    parameters = [
        Parameter((i,), int(rng.integers(0, 60))) for i in range(count) if i % 3
    ]
    tied = tuple(int(r) for r in rng.choice(count, 2, replace=False))
    parameters.append(Parameter(tied, 40, 2000))
    limits = [None] * stages
    if is_limited:
        held = sum(p.held_bytes for p in parameters)
        held += stages * sum(o.activation_bytes for o in ops)
        limits = [int(held / stages * rng.uniform(0.9, 1.6)) for _ in range(stages)]
    speeds = rng.choice([0.5, 1.0, 2.0], stages) if is_mixed else np.ones(stages)
    m = int(rng.integers(1, 9))
    at = np.sort(rng.choice(count, 2 * links, replace=False)).tolist()
    pairs = tuple(tuple(at[k : k + 2]) for k in range(0, 2 * links, 2))
    alone = np.sort(rng.choice(count, links, replace=False)).tolist()
    chains = (tuple((op,) for op in alone), pairs)[: 1 + seed % 2]
    return CutProblem(
        ops=CutOps(tuple(ops), tuple(values), tuple(parameters)),
        groups=tuple(
            StageDevices(limit, float(speed))
            for limit, speed in zip(limits, speeds, strict=True)
        ),
        hops=tuple(
            TransferLink("", float(rng.choice([2e3, 1e4, 1e5])), 1e-4)
            for _ in range(stages - 1)
        ),
        micro_batches=m,
        in_flight=IN_FLIGHT["1f1b"](stages, m),
        pins={int(rng.integers(count)): int(rng.integers(stages))}
        if rng.random() < 0.2
        else {},
        chains=chains if links else (),
    )


def every_cut(problem: CutProblem) -> Iterator[tuple[int, ...]]:
    """All stages of ops that are monotone along edges and obey pins."""
    before: dict[int, list[int]] = {}
    for value in problem.ops.values:
        for reader in value.readers:
            before.setdefault(reader, []).append(value.source)

    def in_row(stages: tuple[int, ...]) -> bool:
        rows = [[{stages[i] for i in k} for k in chain] for chain in problem.chains]
        return all(
            {stage + 1 for stage in a} == b and len(a) == 1
            for row in rows
            for a, b in pairwise(row)
        )

    def rest(stages: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        op = len(stages)
        if op == len(problem.ops.ops):
            if in_row(stages):
                yield stages
            return
        first = max((stages[b] for b in before.get(op, ())), default=0)
        for stage in range(first, problem.stages):
            if problem.pins.get(op, stage) == stage:
                yield from rest((*stages, stage))

    return rest(())


def step_time_ns(problem: CutProblem, stages: tuple[int, ...]) -> int | None:
    """By the definitions; None for a stage that idles or does not fit."""
    ops, count = problem.ops, problem.stages

    def ns(seconds: float) -> int:
        return int(np.rint(seconds * 1e9))

    times, held = [0] * count, [0] * count
    for op, s in zip(ops.ops, stages, strict=True):
        times[s] += ns((op.forward_s + op.backward_s) / problem.groups[s].speed)
        held[s] += problem.in_flight[s] * op.activation_bytes
    sent = [[ns(hop.latency_s)] * 2 for hop in problem.hops]
    for value in ops.values:
        last = max(stages[r] for r in value.readers)
        for s in range(stages[value.source], last):
            rate = problem.hops[s].bytes_per_s
            sent[s][0] += ns(value.forward_bytes / rate)
            sent[s][1] += ns(value.backward_bytes / rate)
            held[s + 1] += (problem.in_flight[s + 1] + 1) * value.forward_bytes
            held[s] += value.backward_bytes
    once = 0
    for parameter in ops.parameters:
        among = {stages[r] for r in parameter.readers}
        for s in among:
            held[s] += parameter.held_bytes
        for s in range(min(among), max(among)):
            once += ns(2 * parameter.gradient_bytes / problem.hops[s].bytes_per_s)
    for s, group in enumerate(problem.groups):
        limit = group.limit_bytes
        if not times[s] or (limit is not None and held[s] > limit):
            return None
    ways = [t for hop in sent for t in hop]
    paces = times + ways
    for s, k in enumerate(problem.in_flight):
        if k < problem.micro_batches:
            trip = sum(times[s:]) + sum(t for hop in sent[s:] for t in hop)
            paces.append(-(-trip // k))
    steady = (problem.micro_batches - 1) * max(paces)
    return steady + sum(times) + sum(ways) + once


def best_of_all(problem: CutProblem) -> int | None:
    """Step time of the best of all cuts; None where none fits."""
    found = (step_time_ns(problem, stages) for stages in every_cut(problem))
    return min((ns for ns in found if ns is not None), default=None)
