"""The tasks of an SPMD pipeline, tick by tick.

All devices run the same program: on every tick each runs its layers for its current
micro-batch, sends the result to the next stage, and waits until the transfer is
complete. A stage without a micro-batch computes on unused data; here it counts as idle.
Ops outside of the layers run on all stages at once: `between` before each pass, and the
update after the last.
"""

from __future__ import annotations

from functools import partial
from itertools import chain, count, product

from rhino_jax.pipeline.tasks import (
    Hold,
    Schedule,
    Task,
    TaskGraph,
    TaskKind,
    Transfer,
    TransferLink,
)
from rhino_jax.plan.stages import Pipeline


def in_ticks(pipeline: Pipeline) -> Schedule:
    """Return the schedule of an SPMD pipeline, which has only one order.

    The step takes `before_s` of each pass and m + S - 1 times its `tick_s` +
    `send_s`; then `update_s`.

    Args:
      pipeline: an SPMD pipeline.
    """
    passes, costs, m = pipeline.passes, pipeline.costs, pipeline.micro_batches
    # Backward passes run the layer loops of the forward passes, the last one first.
    ahead = sum(not one.is_backward for one in passes)
    forward, backward = count(), chain(reversed(range(ahead)), count(ahead))
    loops = [next(backward if one.is_backward else forward) for one in passes]
    # Each stage has a task before each pass, those of its ticks, and the update.
    size = len(passes) * (m + 1) + 1
    tasks: list[Task] = []

    def at(stage: int, number: int, micro_batch: int) -> int:
        return stage * size + number * (m + 1) + 1 + micro_batch

    for stage, cost in enumerate(costs):
        add = partial(Task, group=stage, working_bytes=cost.working_bytes)
        # All ticks' residuals are held until the last tick reads them.
        held = cost.activation_bytes * pipeline.ticks
        until = (at(stage, len(passes) - 1, m - 1),)
        holds = (Hold(held, until),) if held else ()
        sent_s, ends = 0.0, tuple[int, ...]()
        for number, one in enumerate(passes):
            tasks.append(
                add(
                    kind=TaskKind.BETWEEN,
                    chunk=stage,
                    slice=number,
                    seconds=one.before_s + sent_s,
                    holds=holds,
                    after=ends,
                )
            )
            kind = TaskKind.BACKWARD if one.is_backward else TaskKind.FORWARD
            chunk = loops[number] * len(costs) + stage
            tasks += (
                add(kind=kind, chunk=chunk, micro_batch=j, seconds=one.tick_s)
                for j in range(m)
            )
            # The last tick of a pass sends like all others, though nothing is read.
            sent_s, holds = one.send_s, ()
            ends = (at(0 if one.is_reversed else len(costs) - 1, number, m - 1),)
        seconds = cost.update_s + sent_s
        tasks.append(
            add(kind=TaskKind.UPDATE, chunk=stage, seconds=seconds, after=ends)
        )
    links: dict[tuple[int, int], int] = {}
    transfers = []
    for (number, one), j, stage in product(
        enumerate(passes), range(m), range(len(costs))
    ):
        to = stage + (-1 if one.is_reversed else 1)
        if 0 <= to < len(costs):
            # The stage itself waits before its next tick, too.
            targets = [at(to, number, j), at(stage, number, j + 1)]
            transfers.append(
                Transfer(
                    source=at(stage, number, j),
                    targets=tuple(targets if j + 1 < m else targets[:1]),
                    link=links.setdefault((stage, to), len(links)),
                    bytes=one.send_bytes,
                    seconds=one.send_s,
                )
            )
    graph = TaskGraph(
        groups=len(costs),
        tasks=tuple(tasks),
        transfers=tuple(transfers),
        links=tuple(TransferLink(f"{a} → {b}") for a, b in links),
        fixed_bytes=tuple(cost.fixed_bytes for cost in costs),
    )
    starts = range(0, len(tasks), size)
    orders = tuple(tuple(range(start, start + size)) for start in starts)
    return Schedule(pipeline.schedule, graph, orders)
