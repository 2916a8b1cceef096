"""Conversion of a cut to the work that schedules are built from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from rhino_jax.pipeline.cut.ops import CutProblem, StageCut
from rhino_jax.pipeline.tasks import TransferLink
from rhino_jax.pipeline.work import Chunk, ChunkCost, ChunkEdge, StepWork


def as_work(problem: CutProblem, cut: StageCut) -> StepWork:
    """Convert stages to chunks, and values that cross hops to edges between neighbours.

    A stage holds received values until its backward pass, together with its own
    residuals.
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
    links: list[TransferLink] = []
    routes: dict[tuple[int, int], int] = {}
    for hop, link in enumerate(problem.hops):
        for a, b in ((hop, hop + 1), (hop + 1, hop)):
            routes[a, b] = len(links)
            links.append(TransferLink(f"{a} → {b}", link.bytes_per_s, link.latency_s))
    limits = [g.limit_bytes for g in problem.groups]
    return StepWork(
        chunks=tuple(
            Chunk(
                s,
                (
                    ChunkCost(
                        forward_s=forward[s],
                        backward_s=backward[s],
                        activation_bytes=left[s],
                    ),
                ),
            )
            for s in range(stages)
        ),
        edges=tuple(
            ChunkEdge(hop, hop + 1, (sent[hop][0],), (sent[hop][1],))
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


def in_groups(work: StepWork, group_of: Sequence[int]) -> StepWork:
    """Place several chunks of a chain in each group, instead of one.

    Links are those between neighbours in the chain: groups and their links are
    equivalent.

    Args:
      work: a chain with chunk c in group c.
      group_of: new group of every chunk.
    """
    groups = 1 + max(group_of)
    routes: dict[tuple[int, int], int] = {}
    links: list[TransferLink] = []
    for (a, b), at in work.routes.items():
        ends = group_of[a], group_of[b]
        if ends[0] != ends[1] and ends not in routes:
            routes[ends] = len(links)
            links.append(replace(work.links[at], name=f"{ends[0]} → {ends[1]}"))
    fixed = [0] * groups
    for group, size in zip(group_of, work.fixed_bytes, strict=True):
        fixed[group] += size
    firsts = [list(group_of).index(g) for g in range(groups)]
    return replace(
        work,
        chunks=tuple(
            replace(chunk, group=group)
            for chunk, group in zip(work.chunks, group_of, strict=True)
        ),
        links=tuple(links),
        routes=routes,
        fixed_bytes=tuple(fixed),
        limit_bytes=tuple(work.limit_bytes[c] for c in firsts)
        if work.limit_bytes
        else (),
    )
