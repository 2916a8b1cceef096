"""What waits in the host's memory between a forward pass and its backward pass.

    group       F0   F1   F2   F3        B0   F4   B1
    to host          0    1    2         3         4
    from host                       0         1         2

It leaves when its forward pass is done, beside what the group does next, and is fetched
one task ahead of its backward pass; where that task follows a forward pass, whose own
values are still on their way, after it. A device holds those of two micro-batches: one
that it works on, and one on its way. While the link is slower than tasks are, forward
passes wait until there is room, and backward passes for what they read. A backward pass
that follows its own forward pass finds all where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rhino_jax.pipeline.tasks import (
    Hold,
    PassKind,
    Schedule,
    Task,
    Transfer,
    TransferLink,
)


MOVING = 2
"""Micro-batches whose values a device holds while all others' are on the host."""


@dataclass(frozen=True, slots=True)
class Moved:
    """One micro-batch of a chunk. Tasks are positions in the graph.

    Attributes:
      forward, backward: its passes.
      fetched_after: the task of its group whose end its way back waits for.
      gone: the forward pass whose values are on the host before its own is run: the
        last but one of its group that leaves any.
      made_room: the same of when it is fetched: the last before that task.
    """

    forward: int
    backward: int
    fetched_after: int
    gone: int | None
    made_room: int


def moved(schedule: Schedule, chunks: Sequence[int]) -> list[Moved]:
    """What leaves for the host and comes back in a step.

    Args:
      schedule: of backward passes that are whole.
      chunks: those whose values do.
    Returns:
      In every group, in the order of forward passes.
    """
    found = []
    for order in schedule.orders:
        backward = _leaving(schedule, order, chunks)
        leaves = [i for i in order if i in backward]
        place = {task: n for n, task in enumerate(order)}
        for n, forward in enumerate(leaves):
            i = backward[forward]
            before, last = order[place[i] - 2], order[place[i] - 1]
            gate = last if before in backward else before
            found.append(
                Moved(
                    forward,
                    i,
                    gate,
                    leaves[n - MOVING] if n >= MOVING else None,
                    max(
                        (f for f in leaves if place[f] < place[gate]),
                        key=place.__getitem__,
                    ),
                )
            )
    return found


def _leaving(
    schedule: Schedule, order: Sequence[int], chunks: Sequence[int]
) -> dict[int, int]:
    """Of a group, forward pass → backward pass, with something in between."""
    graph, found = schedule.graph, {}
    place = {task: n for n, task in enumerate(order)}
    for i in order:
        task = graph.tasks[i]
        if task.kind is PassKind.BACKWARD and task.chunk in chunks:
            of = task.chunk, task.micro_batch, task.slice
            forward = graph.find(PassKind.FORWARD, *of)
            if place[i] - place[forward] > 1:
                found[forward] = i
    return found


def with_offload(
    schedule: Schedule, sizes: Sequence[int], bytes_per_s: float
) -> Schedule:
    """A schedule with what goes over the links to the hosts' memory.

    Args:
      schedule: with all of it on devices.
      sizes: of every chunk, bytes of one device that wait on the host, of what its
        forward pass leaves for its backward pass.
      bytes_per_s: of a device's link, each way.
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
        tasks[move.forward] = _without(forward, size, move.backward)
        own = Hold(size, (move.backward,))
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


def _without(forward: Task, size: int, backward: int) -> Task:
    """A forward pass that holds so much less until its backward pass."""
    holds = tuple(
        replace(h, bytes=h.bytes - size) if h.until == (backward,) else h
        for h in forward.holds
    )
    return replace(forward, holds=holds)
