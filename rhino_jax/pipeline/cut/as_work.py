"""A cut as what schedules are made of."""

from __future__ import annotations

from collections import defaultdict

from rhino_jax.pipeline.cut.ops import Cut, Problem
from rhino_jax.pipeline.tasks import Link
from rhino_jax.pipeline.work import Chunk, Cost, Edge, Work


def as_work(problem: Problem, cut: Cut) -> Work:
    """Stages as chunks, and what crosses hops as edges between neighbours.

    What a stage receives it holds until its backward pass, with what its own ops leave.
    """
    ops, stages = problem.ops, problem.stages
    forward, backward = [0.0] * stages, [0.0] * stages
    left, fixed = [0] * stages, [0] * stages
    for op, s in zip(ops.ops, cut.stages, strict=True):
        forward[s] += op.forward_s / problem.groups[s].speed
        backward[s] += op.backward_s / problem.groups[s].speed
        left[s] += op.activation_bytes
    for parameter in ops.parameters:
        for s in {cut.stages[r] for r in parameter.readers}:
            fixed[s] += parameter.held_bytes
    sent: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for value in ops.values:
        last = max((cut.stages[r] for r in value.readers), default=0)
        for hop in range(cut.stages[value.source], last):
            sent[hop][0] += value.forward_bytes
            sent[hop][1] += value.backward_bytes
            left[hop + 1] += value.forward_bytes
    links: list[Link] = []
    routes: dict[tuple[int, int], int] = {}
    for hop, link in enumerate(problem.hops):
        for a, b in ((hop, hop + 1), (hop + 1, hop)):
            routes[a, b] = len(links)
            links.append(Link(f"{a} → {b}", link.bytes_per_s, link.latency_s))
    limits = [g.limit_bytes for g in problem.groups]
    return Work(
        chunks=tuple(
            Chunk(
                s,
                (
                    Cost(
                        forward_s=forward[s],
                        backward_s=backward[s],
                        activation_bytes=left[s],
                    ),
                ),
            )
            for s in range(stages)
        ),
        edges=tuple(
            Edge(hop, hop + 1, (sent[hop][0],), (sent[hop][1],))
            for hop in range(stages - 1)
        ),
        micro_batches=problem.micro_batches,
        links=tuple(links),
        routes=routes,
        fixed_bytes=tuple(fixed),
        limit_bytes=tuple(2**62 if n is None else n for n in limits)
        if any(n is not None for n in limits)
        else (),
    )
