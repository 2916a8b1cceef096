"""The plan of one submesh, on its own devices.

A submesh is planned as one program, in which its tasks follow one another. Each is
compiled separately: all of its arguments are live from its start to its end, all of its
results are written, and its temporaries end with it. The working memory of its tasks is
counted so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

import numpy as np

from rhino_jax.analysis.graph import NodeKind
from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.ir.program import Op
from rhino_jax.ir.spec import Spec
from rhino_jax.model.build import held_ports
from rhino_jax.passes.staged.group import GroupProgram
from rhino_jax.passes.staged.holding import (
    FIXED,
    TaskResiduals,
    earlier_results,
    is_once,
)
from rhino_jax.passes.staged.remat import StagedRemat
from rhino_jax.passes.staged.staging import NOTHING
from rhino_jax.passes.staged.step import StagedStep, StagedTask, ValueKey
from rhino_jax.pipeline.offload import MOVING
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.resolved_pins import ValuePin
from rhino_jax.plan.stages import KEPT, StageRemat
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.staging.shapes import seconds_by_op, with_regions
from rhino_jax.runtime.tasks.programs import donated, held_bytes, held_specs


MAX_TRIES = 3
"""Maximum number of tries to make room for the residuals of micro-batches in flight, or
for inputs that arrive ahead of their use, whose bytes are known once all submeshes are
planned."""

FIX = "take more micro-batches, more stages or more devices."

Pins = tuple[Mapping[int, Spec], Mapping[int, Spec], Mapping[int, ValuePin]]
"""Pins of arguments and of results, by position, and of intermediate values."""


class Refused(Exception):
    """A submesh does not fit.

    Attributes:
      error: the error to raise.
      is_alone: it does not fit even with one micro-batch, and no others in flight.
      wide: the submesh planned with room for one micro-batch; None: there is no such
        plan.
    """

    def __init__(
        self,
        error: InfeasiblePlanError,
        *,
        is_alone: bool,
        wide: PlannedGroup | None = None,
    ) -> None:
        super().__init__(error)
        self.error, self.is_alone, self.wide = error, is_alone, wide


@dataclass(frozen=True, eq=False)
class PlannedGroup:
    """A planned submesh.

    Attributes:
      step: the tasks of all submeshes.
      of: its tasks as one program.
      found: the problem of that program, and its solution.
      plan: the plan of that solution.
      working: for each task, its working bytes in addition to what is live anyway.
      is_bound: whether it could be faster with more memory.
      wide: the submesh planned with room for one micro-batch, which exceeds the budget.
      remat: the values that its backward passes recompute or fetch, if chosen one
        by one.
      waits_s: estimated seconds of a step that it waits for offloaded values.
    """

    step: StagedStep
    of: GroupProgram
    found: SearchResult
    plan: PlanData
    working: tuple[int, ...] = ()
    is_bound: bool = False
    wide: PlannedGroup | None = None
    remat: StageRemat = KEPT
    waits_s: float = 0.0

    @cached_property
    def specs(self) -> Mapping[ValueKey, Spec]:
        """The spec of each value between its tasks."""
        return held_specs(self.of, self.plan.decisions, self.sizes)

    @cached_property
    def timed(self) -> list[tuple[StagedTask, float]]:
        """Its tasks, and the predicted seconds of each in a step."""
        program, seconds = self.of.program, seconds_by_op(self.found.best)
        calls = (with_regions(program, seconds, op) for op in program.body.ops)
        return list(zip(self.of.tasks, calls, strict=True))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.plan.mesh_axes)

    def has(self, pins: Pins, level: str) -> bool:
        """Whether it was planned with these pins or layouts."""
        known, (inputs, outputs, inside) = self.found.request, pins
        specs, of = self.specs, self.of
        return (
            known.level in ("best", level)
            and known.value_pins == inside
            and known.pins.keys() <= inputs.keys()
            and known.output_pins.keys() <= outputs.keys()
            and all(specs[of.arguments[i]] == spec for i, spec in inputs.items())
            and all(specs[of.results[i]] == spec for i, spec in outputs.items())
        )

    @property
    def group(self) -> int:
        """Position of the submesh."""
        return self.of.tasks[0].group

    @cached_property
    def residuals(self) -> TaskResiduals:
        """The values that its tasks leave one another."""
        return TaskResiduals.of(self.of.tasks, self.step.received(self.group))

    def bytes(self, key: ValueKey) -> int:
        """Return the bytes of a value on one device."""
        tile = self.found.target.device.tile
        return held_bytes(self.step.types[key], self.specs[key], self.sizes, tile)

    @property
    def left_bytes(self) -> int:
        """The bytes of the residuals that a micro-batch's forward pass saves for its
        backward pass."""
        return sum(self.held(chunk)[0] for chunk in self.chunks)

    def offloaded_bytes(self, chunk: int | None = None) -> int:
        """Return the bytes of offloaded residuals; of a chunk, or of all."""
        sent = self.step.waits_on_host(self.group)
        left = self.residuals.left if sent else {}
        return sum(
            self.bytes(key)
            for key, at in left.items()
            if key in sent and chunk in (None, at)
        )

    def flying_bytes(self, in_flight: int) -> int:
        """Return the bytes of the residuals of some micro-batches in flight; of
        offloaded values, those in transfer."""
        sent = self.offloaded_bytes()
        kept = self.left_bytes - sent
        return in_flight * kept + min(in_flight, MOVING) * sent

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunks of the model that it runs."""
        of = {t.place for t in self.of.tasks if t.is_per_micro_batch}
        return tuple(sorted(of))

    def held(self, chunk: int) -> tuple[int, int, int]:
        """Return the bytes of a micro-batch's values between a chunk's tasks.

        See `TaskResiduals.of_chunk`.
        """
        of = self.residuals.of_chunk(chunk)
        left, kept, handed = (sum(map(self.bytes, keys)) for keys in of)
        return left, kept, handed

    @property
    def fixed_bytes(self) -> int:
        """The bytes that are live at all times."""
        made = {key for task in self.of.tasks for key in task.makes}
        held = {*self.of.arguments, *made}
        return sum(self.bytes(key) for key in held if key.kind in FIXED)

    def working_bytes(self, chunk: int | None) -> int:
        """Return the largest working bytes of a chunk's tasks; None: of the tasks that
        run once a step."""
        tasks = zip(self.of.tasks, self.working, strict=True)
        mine = (n for t, n in tasks if (None if is_once(t) else t.place) == chunk)
        return max(mine, default=0)

    def taken_bytes(self) -> tuple[int, ...]:
        """Return the bytes per device that each task takes in addition to what is live
        whether or not it runs."""
        of, size_of = self.of, self.bytes
        in_place: set[ValueKey] = set()
        taken = []
        for task, op_id in zip(of.tasks, of.program.body.ops, strict=True):
            held = {*self.residuals.held(task)}
            in_place |= {*donated(self.step, of, task).values()}
            own = [k for k in task.reads if k not in held]
            own += [k for k in earlier_results(of.tasks, task) if k not in in_place]
            op = of.program.ops[op_id]
            made = {
                value: 0 if key in held | in_place else size_of(key)
                for value, key in zip(op.results, task.makes, strict=True)
            }
            taken.append(sum(map(size_of, own)) + self._inside(op, made))
        return tuple(taken)

    @cached_property
    def _usages(self) -> list[tuple[int | None, float, int, int]]:
        """(Port, bytes on one device, first time, end) of all values that are live at
        some time; the port is None for copies."""
        model, labels = self.found.best.model, self.found.best.labels
        nodes, edges = model.problem.node_usages, model.problem.edge_usages
        ports = (port.id for port in held_ports(model.analysis))
        return [
            (port, float(u.usage[labels[u.node]]), u.start, u.stop)
            for port, u in zip_longest(ports, nodes)
        ] + [
            (None, float(u.usage[labels[u.source], labels[u.target]]), u.start, u.stop)
            for u in edges
        ]

    def _inside(self, call: Op, made: Mapping[int, int]) -> int:
        """Return the peak bytes of values that are live inside of a task.

        Args:
          call: the task's call.
          made: result of the task → bytes that it allocates when it is produced.
        """
        graph = self.found.best.model.graph
        ops = {op.id for op, _ in graph.program.within(call)}
        times = [n.time for n in graph.nodes if n.op is not None and n.op.id in ops]
        if not times:
            return sum(made.values())
        first, last = min(times), max(times)
        starts = {port: start for port, _, start, _ in self._usages}
        changes = np.zeros(last - first + 2)
        results = set[int]()
        for value, size in made.items():
            port = graph.held.get(value)
            since = first
            if port is not None:
                node = graph.nodes[port.node]
                # A loop's final carry has the buffer of the carry.
                kept = node.ports[0] if node.kind is NodeKind.CARRY else port
                results.add(kept.id)
                since = max(first, starts.get(kept.id, node.time))
            changes[min(since, last) - first] += size
        for of, amount, start, stop in self._usages:
            if amount and first <= start <= last and of not in results:
                end = min(stop, last + 1)
                if stop > last + 1 and of is not None:
                    # A fused value that another task reads is written here, not
                    # computed there.
                    read = [e.time for e in graph.readers[of] if e.time <= last]
                    end = max(read, default=start) + 1
                changes[start - first] += amount
                changes[end - first] -= amount
        return math.ceil(np.cumsum(changes)[:-1].max())

    def peak_bytes(self, in_flight: int) -> int:
        """Return the peak in bytes, without inputs that arrive early.

        Args:
          in_flight: number of micro-batches whose residuals are live.
        """
        working = max(self.working_bytes(chunk) for chunk in self.chunks)
        flying = self.flying_bytes(in_flight) + working
        return self.fixed_bytes + max(flying, self.working_bytes(None))


@dataclass(frozen=True, slots=True)
class Room:
    """Memory to set aside for values other than those of a submesh's own tasks.

    Attributes:
      in_flight: for each submesh, the number of micro-batches whose residuals are live.
      ahead_bytes: for each submesh, the bytes per device of inputs that arrive early.
      may_recompute: whether submeshes may recompute values to fit.
      is_split: whether their backward passes are split: then values are recomputed only
        where that is faster.
      host_bytes_per_s: bandwidth of a device's link to host memory; None: nothing is
        offloaded.
      would_recompute: the keyword that allows recomputation, where it is not allowed.
      remat: the remat that is fixed in any case.
    """

    in_flight: tuple[int, ...]
    ahead_bytes: tuple[int, ...]
    may_recompute: bool = False
    is_split: bool = False
    host_bytes_per_s: float | None = None
    would_recompute: str = ""
    remat: StagedRemat = NOTHING
