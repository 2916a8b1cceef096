"""Offload of residuals to host memory between a forward and its backward pass.

    group       F0   F1   F2   F3        B0   F4   B1
    to host          0    1    2         3         4
    from host                       0         1         2

Residuals are sent when their forward pass ends, concurrently with the group's next
task, and fetched one task ahead of their backward pass; if that previous task is a
forward pass, whose own residuals are still being sent, they are fetched after it. A
device holds the residuals of two micro-batches: one that is computed, and one in
transfer. If the link is slower than the tasks, forward passes wait for free memory, and
backward passes for their residuals. Nothing is offloaded for a backward pass that
directly follows its own forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rhino_jax.pipeline.tasks import (
    Hold,
    Schedule,
    TaskKind,
    Transfer,
    TransferLink,
)


MOVING = 2
"""Micro-batches whose residuals a device holds while all others are on the host."""


@dataclass(frozen=True, slots=True)
class Moved:
    """The offload of one micro-batch in a chunk. Tasks are positions in the graph.

    Attributes:
      forward, backward: its forward and backward task.
      fetched_after: the task of its group after which it is fetched.
      gone: the forward task whose residuals must be on the host before this one's
        starts: the last but one of the group that offloads; None for the first ones.
      made_room: the last offloading forward task before `fetched_after`, whose
        residuals must be on the host before this one is fetched.
    """

    forward: int
    backward: int
    fetched_after: int
    gone: int | None
    made_room: int


def moved(schedule: Schedule, chunks: Sequence[int]) -> list[Moved]:
    """Return the residuals that a step offloads.

    Args:
      schedule: a schedule whose backward passes are not split.
      chunks: chunks with offloaded residuals.
    Returns:
      By group, in the order of forward passes.
    """
    graph, found = schedule.graph, []
    for order in schedule.orders:
        place = {task: n for n, task in enumerate(order)}
        # Forward → backward pass, for pairs with tasks in between.
        backward = {}
        for i in order:
            kind, chunk, *of = graph.tasks[i].key
            if kind is TaskKind.BACKWARD and chunk in chunks:
                forward = graph.find(TaskKind.FORWARD, chunk, *of)
                if place[i] - place[forward] > 1:
                    backward[forward] = i
        leaves = [i for i in order if i in backward]
        for n, forward in enumerate(leaves):
            i = backward[forward]
            before, last = order[place[i] - 2], order[place[i] - 1]
            gate = last if before in backward else before
            gone = leaves[n - MOVING] if n >= MOVING else None
            made_room = [f for f in leaves if place[f] < place[gate]][-1]
            found.append(Moved(forward, i, gate, gone, made_room))
    return found


def with_offload(
    schedule: Schedule, sizes: Sequence[int], bytes_per_s: float
) -> Schedule:
    """Add transfers to and from host memory to a schedule.

    Args:
      schedule: the schedule without offload.
      sizes: by chunk, bytes of one device's residuals of a micro-batch that are
        offloaded.
      bytes_per_s: bandwidth of a device's link to the host, each way.
    """
    graph = schedule.graph
    moves = moved(schedule, [chunk for chunk, size in enumerate(sizes) if size])
    groups = sorted({graph.tasks[move.forward].group for move in moves})
    first = {group: len(graph.links) + 2 * n for n, group in enumerate(groups)}
    ways = [(f"{g} → host", f"host → {g}") for g in groups]
    links = [TransferLink(name, bytes_per_s) for way in ways for name in way]
    waiting = {m.gone: m.forward for m in moves if m.gone is not None}
    out = {m.forward: len(graph.transfers) + n for n, m in enumerate(moves)}
    tasks, outs, backs = list(graph.tasks), [], []
    for move in moves:
        forward, backward = tasks[move.forward], tasks[move.backward]
        size, link = sizes[forward.chunk], first[forward.group]
        later = waiting.get(move.forward)
        outs.append(
            Transfer(
                source=move.forward,
                targets=() if later is None else (later,),
                link=link,
                bytes=size,
                seconds=size / bytes_per_s,
                is_to_host=True,
            )
        )
        backs.append(
            Transfer(
                source=move.fetched_after,
                targets=(move.backward,),
                link=link + 1,
                bytes=size,
                seconds=size / bytes_per_s,
                after=tuple({out[move.forward], out[move.made_room]}),
            )
        )
        own = Hold(size, (move.backward,))
        # The forward pass holds `size` bytes less until its backward pass.
        less = (
            replace(h, bytes=h.bytes - size) if h.until == own.until else h
            for h in forward.holds
        )
        tasks[move.forward] = replace(forward, holds=tuple(less))
        tasks[move.backward] = replace(backward, holds=(*backward.holds, own))
    return replace(
        schedule,
        graph=replace(
            graph,
            tasks=tuple(tasks),
            transfers=(*graph.transfers, *outs, *backs),
            links=(*graph.links, *links),
        ),
    )
