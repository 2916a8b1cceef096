"""Costs of the tasks of planned submeshes, and transfers between them: costs, layouts.

A submesh that is planned on its own receives a value replicated at no cost, though
every one of its devices then gets all of it over the link between submeshes: a link
that is often a tenth as fast as those inside of a submesh, over which shards can be
gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rhino_jax.analysis.graph import NodeKind
from rhino_jax.ir.spec import Spec, share_of, without
from rhino_jax.passes.staged.step import StagedStep, TaskKind, ValueKey, ValueKind
from rhino_jax.plan.stages import Between, Pipeline, StageCost, StageHop
from rhino_jax.planner.decision import MIN_GAIN
from rhino_jax.planner.search.carried import costs_given
from rhino_jax.planner.staging.planned import PlannedGroup
from rhino_jax.planner.staging.shapes import GroupMeshes


def with_costs(
    pipeline: Pipeline,
    step: StagedStep,
    groups: Sequence[PlannedGroup],
    shapes: GroupMeshes,
) -> Pipeline:
    """Return a pipeline with the costs of its tasks and transfers."""
    return replace(
        pipeline,
        costs=tuple(
            _cost(step, groups[at], chunk, step.chunks.index(at) == chunk)
            for chunk, at in enumerate(step.chunks)
        ),
        hops=_hops(step, groups, *shapes.hop),
        between=_between(step, groups),
    )


def _cost(
    step: StagedStep, group: PlannedGroup, chunk: int, is_first: bool
) -> StageCost:
    parts = dict.fromkeys(TaskKind, 0.0)
    for task, seconds in group.timed():
        if task.place == chunk if task.is_per_micro_batch else is_first:
            parts[task.kind] += seconds
    times = step.micro_batches
    left, kept, handed = group.held(step, chunk)
    return StageCost(
        forward_s=parts[TaskKind.FORWARD] / times,
        backward_s=parts[TaskKind.BACKWARD] / times,
        update_s=parts[TaskKind.START] + parts[TaskKind.UPDATE],
        activation_bytes=left,
        fixed_bytes=group.fixed_bytes(step) if is_first else 0,
        working_bytes=group.working_bytes(chunk),
        update_bytes=group.update_bytes if is_first else 0,
        weights_s=parts[TaskKind.WEIGHT_GRADIENT] / times,
        weight_residual_bytes=kept,
        output_gradient_bytes=handed,
        offloaded_bytes=group.offloaded_bytes(step, chunk),
    )


def bytes_between(
    step: StagedStep, source: PlannedGroup, target: PlannedGroup, key: ValueKey
) -> int:
    """Return the bytes per device of a value that one submesh sends to another: in the
    target's layout, sharded over the mesh axes of equal size. Sent to more devices,
    they count in proportion."""
    unlike = [
        axis
        for axis, sizes in enumerate(zip(source.sizes, target.sizes, strict=True))
        if len({*sizes}) > 1
    ]
    aval = step.types[key]
    spec = without(target.specs[key], unlike)
    share = share_of(spec, tuple(aval.shape), target.sizes)
    times = max(1.0, math.prod(target.sizes) / math.prod(source.sizes))
    return math.ceil(aval.size * getattr(aval.dtype, "itemsize", 4) * share * times)


def _between(step: StagedStep, groups: Sequence[PlannedGroup]) -> tuple[Between, ...]:
    """Return the tasks of every submesh between forward and backward passes; empty
    where there are none."""
    kinds = {task.kind for tasks in step.tasks for task in tasks}
    if TaskKind.BETWEEN not in kinds:
        return ()
    receives = [dict[int, int]() for _ in groups]
    seconds = [
        sum((s for task, s in group.timed() if task.kind is TaskKind.BETWEEN), 0.0)
        for group in groups
    ]
    for send in step.met:
        ends = groups[send.source], groups[send.target]
        size = bytes_between(step, *ends, send.key)
        of = receives[send.target]
        of[send.source] = of.get(send.source, 0) + size
    return tuple(
        Between(s, tuple(sorted(of.items())))
        for s, of in zip(seconds, receives, strict=True)
    )


def _hops(
    step: StagedStep,
    groups: Sequence[PlannedGroup],
    bytes_per_s: float,
    latency_s: float,
) -> tuple[StageHop, ...]:
    """Return the chunks between which anything is sent, and bytes per micro-batch.

    Sums over all micro-batches, and values that updates exchange, are sent once a step
    and count no bytes. A value that several chunks of a submesh read is sent to the
    first of them, after which the others run; within a submesh nothing is sent.
    """
    sizes: dict[tuple[int, int], list[int]] = {}  # forward, backward
    made: dict[ValueKey, int] = {}
    readers: dict[tuple[ValueKey, int], int] = {}
    tasks = [t for mine in step.tasks for t in mine]
    for task in tasks:
        if task.is_per_micro_batch:
            made.update(
                (k, task.place) for k in task.makes if k.kind is ValueKind.INSIDE
            )
    for task in tasks:
        for key in task.reads:
            source = made.get(key, task.place)
            if not task.is_per_micro_batch or source == task.place:
                continue
            pair = min(source, task.place), max(source, task.place)
            into = sizes.setdefault(pair, [0, 0])
            if step.chunks[source] == task.group:
                continue
            if (first := readers.get((key, task.group))) is not None:
                if first != task.place:
                    near = min(first, task.place), max(first, task.place)
                    sizes.setdefault(near, [0, 0])
                continue
            readers[key, task.group] = task.place
            ends = groups[step.chunks[source]], groups[task.group]
            into[source > task.place] += bytes_between(step, *ends, key)
    for send in step.sends:
        pair = min(send.source, send.target), max(send.source, send.target)
        known = {tuple(sorted((step.chunks[a], step.chunks[b]))) for a, b in sizes}
        if pair not in known:
            sizes[step.chunks.index(pair[0]), step.chunks.index(pair[1])] = [0, 0]
    return tuple(
        StageHop(min(pair), max(pair), forward, backward, bytes_per_s, latency_s)
        for pair, (forward, backward) in sorted(sizes.items())
    )


@dataclass(frozen=True, eq=False)
class GroupCrossing:
    """The values that one submesh sends and receives of every micro-batch.

    Attributes:
      step: the tasks of all submeshes.
      group: the submesh.
      known: values whose layout another submesh's plan, or a pin, prescribes.
      bytes_per_s: bandwidth of the link between submeshes, for one device.
      on_all: spec on a submesh → the part of it that is possible on all submeshes.
    """

    step: StagedStep
    group: int
    known: Collection[ValueKey]
    bytes_per_s: float
    on_all: Callable[[Spec], Spec]

    @cached_property
    def keys(self) -> list[ValueKey]:
        """The values whose layouts are free."""
        ends = {s.key for s in self.step.sends if self.group in (s.source, s.target)}
        free = (k for k in ends if k.kind is ValueKind.INSIDE and k not in self.known)
        return sorted(free)

    def seconds(self, group: PlannedGroup) -> float:
        """Return the predicted step of a submesh, and the seconds of its transfers."""
        sent = sum(
            self._link_s(group, key, group.specs[key])
            for key in self.keys
            if key in group.specs
        )
        return group.found.step_s + group.waits_s + sent

    def _link_s(self, group: PlannedGroup, key: ValueKey, spec: Spec) -> float:
        aval = self.step.types[key]
        size = aval.size * getattr(aval.dtype, "itemsize", 4)
        share = share_of(self.on_all(spec), tuple(aval.shape), group.sizes)
        return self.step.micro_batches * size * share / self.bytes_per_s

    def cheaper(self, group: PlannedGroup) -> dict[ValueKey, Spec]:
        """Return specs with which a submesh and the link take less time together.

        All other choices stay, so each spec is an improvement on its own.

        Returns:
          Value → spec; empty where it saves less than another search is worth
            (`MIN_GAIN`).
        """
        if not group.found.fits or not self.keys:
            return {}
        model, labels = group.found.best.model, group.found.best.labels
        # The submesh's exchanged arguments and results.
        ends = {NodeKind.INPUT: group.of.arguments, NodeKind.OUTPUT: group.of.results}
        nodes = {
            node.id: ends[node.kind][node.slot]
            for node in model.graph.nodes
            if node.kind in ends and ends[node.kind][node.slot] in self.keys
        }
        costs = costs_given(model.problem, labels, nodes)
        found: dict[ValueKey, Spec] = {}
        saved_s = 0.0
        for n, key in nodes.items():
            specs = [s.results[0] for s in model.options[n].strategies]
            total = costs[n] + np.array([self._link_s(group, key, s) for s in specs])
            # A spec that some submesh cannot have would be another one on the link.
            total[[self.on_all(s) != s for s in specs]] = np.inf
            best = int(total.argmin())
            if total[best] < total[labels[n]]:
                found[key] = specs[best]
                saved_s += float(total[labels[n]] - total[best])
        return found if saved_s > MIN_GAIN * group.found.step_s else {}
