"""Costs of the stages of a pipeline, from which schedules take their tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from rhino_jax.errors import ScheduleError
from rhino_jax.pipeline.tasks import TransferLink
from rhino_jax.plan.stages import Between


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCost:
    """Cost of a chunk of the model for one micro-batch, or for one slice of it.

    Attributes:
      forward_s: seconds of its forward pass.
      ahead_s: seconds of the task ahead of all forward passes, which recompute its
        values (`StepWork.is_twice`).
      backward_s: seconds of its backward pass, in one task.
      input_gradient_s, weight_gradient_s: seconds of the backward pass split into two
        tasks; None: half of it each. Their sum may exceed `backward_s`, if both need
        the same intermediate.
      activation_bytes: residuals that the forward pass saves for the backward pass,
        received values included.
      weight_residual_bytes: the part of these that is live until the weight gradients
        are computed; None: all.
      output_gradient_bytes: further bytes that the input-gradient task saves for the
        weight-gradient task.
      working_bytes: temporary memory of any of its tasks, including received values
        that it does not save.
    """

    forward_s: float
    ahead_s: float = 0.0
    backward_s: float = 0.0
    input_gradient_s: float | None = None
    weight_gradient_s: float | None = None
    activation_bytes: int = 0
    weight_residual_bytes: int | None = None
    output_gradient_bytes: int = 0
    working_bytes: int = 0

    @property
    def split_s(self) -> tuple[float, float]:
        """Seconds of the input gradients and of the weight gradients."""
        of_input, of_weight = self.input_gradient_s, self.weight_gradient_s
        if of_input is None:
            rest = self.backward_s - (of_weight or 0.0)
            of_input = self.backward_s / 2 if of_weight is None else rest
        if of_weight is None:
            of_weight = self.backward_s - of_input
        return max(of_input, 0.0), max(of_weight, 0.0)

    @property
    def split_bytes(self) -> tuple[int, int]:
        """Residuals freed after the input gradients, and after the weight gradients."""
        late = self.weight_residual_bytes
        late = self.activation_bytes if late is None else late
        return self.activation_bytes - late, late


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of the model that a group runs as one task.

    Attributes:
      group: position of the group.
      costs: cost of every slice of the sequence; a single one without slices.
    """

    group: int
    costs: tuple[ChunkCost, ...]


@dataclass(frozen=True, slots=True)
class ChunkEdge:
    """Transfers between a chunk and a later one, for every micro-batch.

    Attributes:
      source, target: positions of the chunks.
      forward_bytes: bytes by slice, from source to target; of one device.
      backward_bytes: bytes of the gradients by slice, from target to source.
      ahead_bytes: bytes by slice of the tasks ahead of forward passes, from source to
        target; empty for none.
    """

    source: int
    target: int
    forward_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    ahead_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Costs of one step of a pipeline, without a schedule.

    Attributes:
      chunks: parts of the model, along the forward pass.
      edges: transfers between chunks, each pair once.
      micro_batches: number of micro-batches.
      links: links of the transfers.
      routes: (from group, to group) → position of its link. Other pairs depend on one
        another without time or bytes.
      loss_s: seconds of the loss after the last chunk, if it is a separate task; else
        0.
      update_s: seconds of the optimizer by group; empty for none.
      update_bytes: temporary memory of the update by group; empty for none.
      between: by group, the task after all forward passes and before any of its
        backward passes; empty if micro-batches are not coupled.
      is_twice: whether that task waits for tasks ahead of the forward passes, which
        save nothing else, instead of the forward passes.
      coupling_bytes: bytes that all groups exchange before any updates, as for the
        global norm of gradients; 0 for none.
      fixed_bytes, limit_bytes: bytes live throughout the step, and memory limit, of
        every group's devices; empty for none.
    """

    chunks: tuple[Chunk, ...]
    edges: tuple[ChunkEdge, ...]
    micro_batches: int
    links: tuple[TransferLink, ...] = ()
    routes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    loss_s: float = 0.0
    update_s: tuple[float, ...] = ()
    update_bytes: tuple[int, ...] = ()
    between: tuple[Between, ...] = ()
    is_twice: bool = False
    coupling_bytes: int = 0
    fixed_bytes: tuple[int, ...] = ()
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


def chain(
    costs: Sequence[ChunkCost | Sequence[ChunkCost]],
    micro_batches: int,
    *,
    groups: int | None = None,
    is_v: bool = False,
    sent_bytes: int = 0,
    link: TransferLink | None = None,
    fixed_bytes: Sequence[int] = (),
    limit_bytes: Sequence[int] = (),
) -> StepWork:
    """Return the work of chunks each of which feeds the next.

    Args:
      costs: cost of every chunk, or of every chunk's slices.
      micro_batches: number of micro-batches.
      groups: number of groups of devices; None: as many as chunks.
      is_v: whether chunks are placed up to the last group and back, instead of
        round-robin.
      sent_bytes: bytes from chunk to chunk, and back, for a micro-batch, over all its
        slices.
      link: link of every pair of groups that send to one another, per direction; None:
        transfers take no time.
      fixed_bytes, limit_bytes: of every group, as in `StepWork`.
    """
    groups = len(costs) if groups is None else groups
    round_trip = [*range(groups), *reversed(range(groups))] if is_v else range(groups)
    chunks = tuple(
        Chunk(
            round_trip[i % len(round_trip)],
            (cost,) if isinstance(cost, ChunkCost) else tuple(cost),
        )
        for i, cost in enumerate(costs)
    )
    slices = len(chunks[0].costs)
    sizes = (sent_bytes // slices,) * slices
    edges = tuple(ChunkEdge(i, i + 1, sizes, sizes) for i in range(len(chunks) - 1))
    pairs = [(chunks[e.source].group, chunks[e.target].group) for e in edges]
    both = [(a, b) for pair in pairs for a, b in (pair, pair[::-1]) if a != b]
    routes = {pair: i for i, pair in enumerate(dict.fromkeys(both))} if link else {}
    return StepWork(
        chunks=chunks,
        edges=edges,
        micro_batches=micro_batches,
        links=tuple(replace(link, name=f"{a} → {b}") for a, b in routes)
        if link
        else (),
        routes=routes,
        fixed_bytes=tuple(fixed_bytes),
        limit_bytes=tuple(limit_bytes),
    )
