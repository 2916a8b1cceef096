"""The tasks of an SPMD pipeline, tick by tick.

All devices run the same program: on every tick each runs its layers for its current
micro-batch, sends the result to the next stage, and waits until the transfer is
complete. A stage without a micro-batch computes on unused data; here it counts as idle.
Ops outside of the layers run on all stages at once: `between` before each pass, and the
update after the last.
"""

from __future__ import annotations

from collections.abc import Iterator

from rhino_jax.pipeline.tasks import (
    Hold,
    Key,
    Schedule,
    Task,
    TaskGraph,
    TaskKind,
    Transfer,
    TransferLink,
)
from rhino_jax.plan.stages import Pipeline, PipelinePass


def in_ticks(pipeline: Pipeline) -> Schedule:
    """Return the schedule of an SPMD pipeline, which has only one order.

    The step takes `before_s` of each pass and m + S - 1 times its `tick_s` +
    `send_s`; then `update_s`.

    Args:
      pipeline: an SPMD pipeline.
    """
    return _Ticks(pipeline).schedule()


class _Ticks:
    """Builder of the schedule.

    Attributes:
      order: tasks by stage.
      at: task → its position.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.stages = len(pipeline.costs)
        self.chunks = [*_chunks(pipeline.passes)]
        self.order = [[*self._keys(stage)] for stage in range(self.stages)]
        every = (key for order in self.order for key in order)
        self.at = {key: i for i, key in enumerate(every)}

    def _keys(self, stage: int) -> Iterator[Key]:
        for number in range(len(self.pipeline.passes)):
            yield self._once(number, stage)
            for j in range(self.pipeline.micro_batches):
                yield self._tick(number, j, stage)
        yield self._once(len(self.pipeline.passes), stage)

    def _once(self, number: int, stage: int) -> Key:
        """Return the task before a pass; after the last pass, the update."""
        if number == len(self.pipeline.passes):
            return TaskKind.UPDATE, stage, 0, 0
        return TaskKind.BETWEEN, stage, 0, number

    def _tick(self, number: int, micro_batch: int, stage: int) -> Key:
        is_backward = self.pipeline.passes[number].is_backward
        kind = TaskKind.BACKWARD if is_backward else TaskKind.FORWARD
        return kind, self.chunks[number] * self.stages + stage, micro_batch, 0

    def schedule(self) -> Schedule:
        tasks = {
            key: task
            for stage in range(self.stages)
            for key, task in self._tasks(stage)
        }
        links, transfers = self._handed()
        graph = TaskGraph(
            groups=self.stages,
            tasks=tuple(tasks[key] for key in self.at),
            transfers=transfers,
            links=links,
            fixed_bytes=tuple(c.fixed_bytes for c in self.pipeline.costs),
        )
        orders = tuple(tuple(self.at[k] for k in order) for order in self.order)
        return Schedule(self.pipeline.schedule, graph, orders)

    def _tasks(self, stage: int) -> Iterator[tuple[Key, Task]]:
        passes, cost = self.pipeline.passes, self.pipeline.costs[stage]
        for number in range(len(passes) + 1):
            is_last = number == len(passes)
            seconds = cost.update_s if is_last else passes[number].before_s
            # The last tick of a pass sends like all others, though nothing is read.
            seconds += passes[number - 1].send_s if number else 0.0
            yield self._named(
                self._once(number, stage),
                stage,
                seconds,
                holds=self._left(stage) if not number else (),
                after=self._ends(number - 1) if number else (),
            )
            for j in range(0 if is_last else self.pipeline.micro_batches):
                key = self._tick(number, j, stage)
                yield self._named(key, stage, passes[number].tick_s)

    def _named(
        self,
        key: Key,
        stage: int,
        seconds: float,
        holds: tuple[Hold, ...] = (),
        after: tuple[int, ...] = (),
    ) -> tuple[Key, Task]:
        kind, chunk, micro_batch, part = key
        return key, Task(
            kind=kind,
            group=stage,
            chunk=chunk,
            micro_batch=micro_batch,
            slice=part,
            seconds=seconds,
            working_bytes=self.pipeline.costs[stage].working_bytes,
            holds=holds,
            after=after,
        )

    def _left(self, stage: int) -> tuple[Hold, ...]:
        """Return the memory of all ticks' residuals until the last tick reads them."""
        size = self.pipeline.costs[stage].activation_bytes * self.pipeline.ticks
        last = len(self.pipeline.passes) - 1
        until = self._tick(last, self.pipeline.micro_batches - 1, stage)
        return (Hold(size, (self.at[until],)),) if size else ()

    def _ends(self, number: int) -> tuple[int, ...]:
        """Return the last task of a pass."""
        place = 0 if self.pipeline.passes[number].is_reversed else self.stages - 1
        last = self.pipeline.micro_batches - 1
        return (self.at[self._tick(number, last, place)],)

    def _handed(self) -> tuple[tuple[TransferLink, ...], tuple[Transfer, ...]]:
        """Return links and transfers of the ticks' results.

        The next stage waits for them, and the stage itself before its next tick.
        """
        links: dict[tuple[int, int], int] = {}
        found = []
        for number, one in enumerate(self.pipeline.passes):
            step = -1 if one.is_reversed else 1
            for j in range(self.pipeline.micro_batches):
                for stage in range(self.stages):
                    to = stage + step
                    if not 0 <= to < self.stages:
                        continue
                    targets = [self.at[self._tick(number, j, to)]]
                    if j + 1 < self.pipeline.micro_batches:
                        targets.append(self.at[self._tick(number, j + 1, stage)])
                    found.append(
                        Transfer(
                            source=self.at[self._tick(number, j, stage)],
                            targets=tuple(targets),
                            link=links.setdefault((stage, to), len(links)),
                            bytes=one.send_bytes,
                            seconds=one.send_s,
                        )
                    )
        return tuple(TransferLink(f"{a} → {b}") for a, b in links), tuple(found)


def _chunks(passes: tuple[PipelinePass, ...]) -> Iterator[int]:
    """Yield by pass the layer loop that it runs.

    Backward passes run those of the forward passes, the last one first.
    """
    ahead = sum(not p.is_backward for p in passes)
    forward, backward = 0, 0
    for one in passes:
        if one.is_backward:
            backward += 1
            yield ahead - backward if backward <= ahead else backward - 1
        else:
            yield forward
            forward += 1
