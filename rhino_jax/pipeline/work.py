"""The work of one step of a pipeline, from which schedules take their tasks.

It is that of a plan's stages (`work_of`), or of a cut (`as_work`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from rhino_jax.errors import ScheduleError
from rhino_jax.pipeline.cut.ops import CutProblem, StageCut
from rhino_jax.pipeline.tasks import TransferLink
from rhino_jax.plan.stages import Between, Pipeline, StageCost


FORWARD_ONLY = "forward-only"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of the model that a group runs as one task.

    Attributes:
      group: position of the group.
      costs: cost of every slice of the sequence; a single one without slices.
    """

    group: int
    costs: tuple[StageCost, ...]


@dataclass(frozen=True, slots=True)
class ChunkEdge:
    """Transfers between a chunk and a later one, for every micro-batch.

    Attributes:
      source, target: positions of the chunks.
      forward_bytes: bytes by slice, from source to target; of one device.
      backward_bytes: bytes of the gradients by slice, from target to source.
    """

    source: int
    target: int
    forward_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Costs of one step of a pipeline, without a schedule.

    Costs of a group as a whole are on the first slice of its first chunk.

    Attributes:
      chunks: parts of the model, along the forward pass.
      edges: transfers between chunks, each pair once.
      micro_batches: number of micro-batches.
      links: links of the transfers.
      routes: (from group, to group) → position of its link. Other pairs depend on one
        another without time or bytes.
      dispatch_s: seconds that every pass of a micro-batch takes in addition.
      has_update: whether every group has a task for its optimizer.
      between: by group, the task after all forward passes and before any of its
        backward passes; empty if micro-batches are not coupled.
      limit_bytes: memory limit of every group's devices; empty for none.
    """

    chunks: tuple[Chunk, ...]
    edges: tuple[ChunkEdge, ...]
    micro_batches: int
    links: tuple[TransferLink, ...] = ()
    routes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    dispatch_s: float = 0.0
    has_update: bool = False
    between: tuple[Between, ...] = ()
    limit_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        slices = {len(chunk.costs) for chunk in self.chunks}
        present = {chunk.group for chunk in self.chunks}
        if not self.chunks or self.micro_batches < 1 or slices == {0}:
            raise ScheduleError(
                "A pipeline needs a chunk and a micro-batch at least.",
                numbers=f"{len(self.chunks)} chunks, m = {self.micro_batches}",
                fix="give one `Chunk` for every stage, and micro_batches >= 1.",
            )
        if len(slices) > 1 or present != set(range(len(present))):
            raise ScheduleError(
                "Chunks of a pipeline differ in their slices, or leave a group out.",
                numbers=f"slices {sorted(slices)}, groups {sorted(present)}",
                fix="give every chunk as many costs, and number groups from 0.",
            )

    @property
    def slices(self) -> int:
        return len(self.chunks[0].costs)

    @cached_property
    def groups(self) -> int:
        return 1 + max(chunk.group for chunk in self.chunks)

    @cached_property
    def chunks_of(self) -> tuple[tuple[int, ...], ...]:
        """The chunks of every group, along the forward pass."""
        return tuple(
            tuple(c for c, chunk in enumerate(self.chunks) if chunk.group == g)
            for g in range(self.groups)
        )

    @property
    def fixed_bytes(self) -> tuple[int, ...]:
        """Bytes live throughout the step on the devices of every group."""
        firsts = (self.chunks[chunks[0]] for chunks in self.chunks_of)
        return tuple(first.costs[0].fixed_bytes for first in firsts)

    @property
    def is_one_chunk_each(self) -> bool:
        return self.groups == len(self.chunks)

    @property
    def is_loop(self) -> bool:
        """Whether chunks go round the groups: 0, 1, 2, 0, 1, 2."""
        count = self.groups
        is_whole = len(self.chunks) % count == 0
        return is_whole and all(c.group == i % count for i, c in enumerate(self.chunks))

    @property
    def is_v(self) -> bool:
        """Whether chunks are placed up to the last group and back: 0, 1, 2, 2, 1, 0."""
        there = list(range(self.groups))
        return [c.group for c in self.chunks] == there + there[::-1]


def links_of(
    pairs: Iterable[tuple[int, int, TransferLink]],
) -> tuple[tuple[TransferLink, ...], dict[tuple[int, int], int]]:
    """Return the links between groups, one for each direction, and their routes.

    Args:
      pairs: (group, group, link), the first of several between two groups counts.
    Returns:
      The links, named by their ends; (from group, to group) → position of its link.
    """
    found: dict[tuple[int, int], TransferLink] = {}
    for a, b, link in pairs:
        for ends in ((a, b), (b, a)):
            if a != b and ends not in found:
                found[ends] = replace(link, name=f"{ends[0]} → {ends[1]}")
    return tuple(found.values()), {ends: i for i, ends in enumerate(found)}


def as_work(
    problem: CutProblem, cut: StageCut, group_of: Sequence[int] = ()
) -> StepWork:
    """Return the work of a cut's stages, with values that cross hops as edges between
    neighbours.

    A stage holds received values until its backward pass, together with its own
    residuals. Links are those between neighbours: groups and their links are
    equivalent.

    Args:
      problem, cut: the cut problem and its cut, one chunk for each of its stages.
      group_of: group of every chunk; empty: each has its own.
    """
    ops, stages = problem.ops, problem.stages
    group_of = group_of or range(stages)
    forward, backward, left = [0.0] * stages, [0.0] * stages, [0] * stages
    for op, s in zip(ops.ops, cut.stages, strict=True):
        forward[s] += op.forward_s / problem.groups[s].speed
        backward[s] += op.backward_s / problem.groups[s].speed
        left[s] += op.activation_bytes
    firsts = [list(group_of).index(g) for g in range(1 + max(group_of))]
    fixed = [0] * stages
    for parameter in ops.parameters:
        for s in {cut.stages[r] for r in parameter.readers}:
            fixed[firsts[group_of[s]]] += parameter.held_bytes
    sent = [[0, 0] for _ in problem.hops]
    for value in ops.values:
        last = max((cut.stages[r] for r in value.readers), default=0)
        for hop in range(cut.stages[value.source], last):
            sent[hop][0] += value.forward_bytes
            sent[hop][1] += value.backward_bytes
            left[hop + 1] += value.forward_bytes
    links, routes = links_of(
        (group_of[i], group_of[i + 1], link) for i, link in enumerate(problem.hops)
    )
    limits = [problem.groups[c].limit_bytes for c in firsts]
    return StepWork(
        chunks=tuple(
            Chunk(
                group_of[s],
                (
                    StageCost(
                        forward_s=forward[s],
                        backward_s=backward[s],
                        activation_bytes=left[s],
                        fixed_bytes=fixed[s],
                    ),
                ),
            )
            for s in range(stages)
        ),
        edges=tuple(
            ChunkEdge(i, i + 1, (ahead,), (back,))
            for i, (ahead, back) in enumerate(sent)
        ),
        micro_batches=problem.micro_batches,
        links=links,
        routes=routes,
        limit_bytes=tuple(2**62 if n is None else n for n in limits)
        if any(n is not None for n in limits)
        else (),
    )


def work_of(pipeline: Pipeline, limit_bytes: int = 0) -> StepWork:
    """Return the work of a plan's stages.

    Args:
      pipeline: pipeline of the plan.
      limit_bytes: memory limit of every device; 0: no limit.
    """
    groups, costs = pipeline.groups, pipeline.costs
    firsts = [groups.index(g) for g in range(1 + max(groups))]
    is_forward_only = pipeline.schedule == FORWARD_ONLY
    if is_forward_only:
        # No task of its own stands for the work that runs once per step.
        once = [costs[firsts[g]].update_bytes for g in groups]
        pairs = zip(costs, once, strict=True)
        costs = tuple(
            replace(c, working_bytes=max(c.working_bytes, n)) for c, n in pairs
        )
    links, routes = links_of(
        (
            groups[h.source],
            groups[h.target],
            TransferLink("", h.bytes_per_s, h.latency_s),
        )
        for h in pipeline.hops
    )
    parts = len(costs) // max(1, len(pipeline.slices))
    return StepWork(
        chunks=tuple(Chunk(groups[c], costs[c::parts]) for c in range(parts)),
        edges=_edges(pipeline),
        micro_batches=pipeline.micro_batches,
        links=links,
        routes=routes,
        has_update=not is_forward_only,
        limit_bytes=(limit_bytes,) * len(firsts) if limit_bytes else (),
        between=pipeline.between,
    )


def _edges(pipeline: Pipeline) -> tuple[ChunkEdge, ...]:
    """Return the transfers between chunks, by sequence slice.

    A forward transfer counts for the slice that sends it, a backward transfer for the
    slice whose gradient sends it. Slices of one chunk are ordered anyway.
    """
    groups, slices = pipeline.groups, max(1, len(pipeline.slices))
    parts = len(pipeline.costs) // slices
    sizes: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for h in pipeline.hops:
        (early, a), (late, b) = divmod(h.source, parts), divmod(h.target, parts)
        is_sent = h.forward_bytes or h.backward_bytes or pipeline.slices
        if a != b and (is_sent or groups[a] == groups[b]):
            none = [0] * slices, [0] * slices
            forward, backward = sizes.setdefault((min(a, b), max(a, b)), none)
            forward[early] += h.forward_bytes
            backward[late] += h.backward_bytes
    return tuple(
        ChunkEdge(*pair, *map(tuple, of)) for pair, of in sorted(sizes.items())
    )
