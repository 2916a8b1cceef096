"""Run a plan of several stages as an executable.

`step_of` splits a step into the tasks of its plan. `Stacks` converts layer stacks
between one array over all stages and the stages' parts, without copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from rhino_jax._compat import with_weak_types
from rhino_jax.errors import StageError
from rhino_jax.frontend.leaves import is_python_scalar
from rhino_jax.frontend.trace import Traced
from rhino_jax.passes.staged.apart import take_apart
from rhino_jax.passes.staged.group import group_program
from rhino_jax.passes.staged.in_slices import staged_in_slices
from rhino_jax.passes.staged.remat import StagedRemat
from rhino_jax.passes.staged.sides import apart_as_planned
from rhino_jax.passes.staged.stacks import LayerStack, Unstacked
from rhino_jax.passes.staged.staging import staged
from rhino_jax.passes.staged.step import StagedStep, ValueKey, ValueKind
from rhino_jax.pipeline.of_plan import schedule_of
from rhino_jax.plan.plan import Leaf, PlanData
from rhino_jax.plan.stages import Pipeline
from rhino_jax.plan.trees import mesh_of_stages, stage_mesh
from rhino_jax.runtime.constraints import check_divides, spec_on_mesh
from rhino_jax.runtime.meshes import can_run
from rhino_jax.runtime.processes.across import assembled, here, placed
from rhino_jax.runtime.processes.agree import processes_of_mesh
from rhino_jax.runtime.tasks.controller import Controller, order_of
from rhino_jax.runtime.tasks.moves import shards_of
from rhino_jax.runtime.tasks.processes import join, shown_results
from rhino_jax.runtime.tasks.programs import GroupPrograms


def step_of(of_step: Unstacked, pipeline: Pipeline) -> StagedStep:
    """Return the tasks of a plan.

    Args:
      of_step: the function, with layer stacks split as planned.
      pipeline: pipeline of its plan.
    Raises:
      PlanFileError: the plan is of a version that splits micro-batches otherwise.
    """
    step = of_step.closed, of_step.program
    count, places = pipeline.micro_batches, pipeline.per_microbatch
    remat = StagedRemat.of(pipeline.recomputed, (x.choice for x in pipeline.remat))
    if pipeline.slices:
        groups = pipeline.groups
        return staged_in_slices(
            take_apart(*step, count, places),
            pipeline.stage_of,
            groups[: len(groups) // len(pipeline.slices)],
            pipeline.slices,
            remat=remat,
            together=of_step.together,
        )
    planned = len(pipeline.stage_of), bool(pipeline.between)
    return staged(
        apart_as_planned(*step, count, places, planned),
        pipeline.stage_of,
        pipeline.group_of,
        is_split=pipeline.is_split,
        remat=remat,
        together=of_step.together,
    )


@dataclass(frozen=True, eq=False)
class Stacks:
    """Splits stacked inputs into parts per stage, and joins stacked results.

    Attributes:
      of_step: the function with stacks split: which inputs and results are parts of
        which array.
      step: its tasks.
      programs: programs of every submesh.
      out_shardings: shardings of the whole results.
    """

    of_step: Unstacked
    step: StagedStep
    programs: Sequence[GroupPrograms]
    out_shardings: Sequence[NamedSharding]
    # Parts of results that are alive: the next step reads them again, and splitting
    # arrays costs as much time as dispatching tasks.
    _made: dict[int, tuple[Any, dict[int, Any]]] = field(default_factory=dict)

    def parts(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the arrays with stacks split into parts, which share their buffers."""
        shards: dict[int, dict[Any, Any]] = {}
        found = []
        for i, end in enumerate(self.of_step.inputs):
            x = arrays[end.whole]
            if end.part is None:
                found.append(x)
                continue
            key = ValueKey(ValueKind.INPUT, i)
            sharding = self.programs[self.step.home[i]].shardings[key]
            # A remembered part of a result of an earlier step.
            of, parts = self._made.get(id(x), (None, {}))
            part = parts.get(end.part) if of is not None and of() is x else None
            if part is not None and part.sharding == sharding:
                found.append(part)
                continue
            if end.whole not in shards:
                shards[end.whole] = shards_of(x)
            mine = shards[end.whole]
            like = self.step.types[key]
            found.append(assembled(like, sharding, [mine[d] for d in here(sharding)]))
        return found

    def delete_donated(self, arrays: Sequence[Any], parts: Sequence[Any]) -> None:
        """Delete stacks whose parts were donated: their buffers are gone."""
        for end, part in zip(self.of_step.inputs, parts, strict=True):
            if end.part is not None and part.is_deleted():
                arrays[end.whole].delete()

    def whole(self, results: Sequence[Any]) -> list[Any]:
        """Return the results with the parts of each stack joined into one array."""
        parts: dict[int, list[Any]] = {}
        for end, x in zip(self.of_step.outputs, results, strict=True):
            parts.setdefault(end.whole, []).append((end.part, x))
        found = []
        for i, sharding in enumerate(self.out_shardings):
            if parts[i][0][0] is None:
                found.append(parts[i][0][1])
                continue
            of_part = dict(parts[i])
            arrays = [*of_part.values()]
            shards = {d: data for x in arrays for d, data in shards_of(x).items()}
            length = sum(x.shape[0] for x in arrays)
            shape = (length, *arrays[0].shape[1:])
            like = jax.ShapeDtypeStruct(shape, arrays[0].dtype)
            x = assembled(like, sharding, [shards[d] for d in here(sharding)])
            self._remember(x, of_part)
            found.append(x)
        return found

    def _remember(self, whole: Any, parts: dict[int, Any]) -> None:
        at = id(whole)
        dropped = weakref.ref(whole, lambda _: self._made.pop(at, None))
        self._made[at] = dropped, parts


def unstacked_of(traced: Traced, plan: PlanData) -> Unstacked:
    """Return a step with its layer stacks split, and loops unrolled, as planned."""
    trips = plan.pipeline.unrolled_trips if plan.pipeline else 0
    stacks = _stacks_of(plan)
    return Unstacked.of(traced.closed_jaxpr, traced.program, stacks, trips)


def _stacks_of(plan: PlanData) -> list[LayerStack]:
    """Return the layer stacks among a plan's arguments: those split over stages."""
    found: dict[tuple[int, int, int], set[int]] = {}
    for i, leaf in enumerate(plan.inputs):
        if leaf.num_stages > 1:
            at = leaf.stage, leaf.num_stages, leaf.shape[0]
            found.setdefault(at, set()).add(i)
    stacks = []
    for (first, count, length), slots in found.items():
        places = plan.places[first : first + count]
        sizes = tuple(length // sum(places) * n for n in places)
        stacks.append(LayerStack(frozenset(slots), sizes, first))
    return stacks


class TaskExecutable:
    """Runs a program as tasks on submeshes; its methods are those of
    `runtime.spmd.SpmdExecutable`.

    Attributes:
      traced: the traced function.
      plan: its plan, of several stages.
      mesh: the mesh of all devices.
      in_shardings, out_shardings: shardings, each on the devices of its stage.
    """

    def __init__(self, traced: Traced, plan: PlanData, mesh: Any) -> None:
        self.traced, self.plan, self.mesh = traced, plan, mesh
        self.meshes = [stage_mesh(stage, mesh) for stage in plan.stages]
        self.in_shardings: Sequence[NamedSharding] = [*map(self._sharding, plan.inputs)]
        self.out_shardings: Sequence[NamedSharding] = [
            *map(self._sharding, plan.outputs)
        ]
        self._processes = processes_of_mesh(mesh)
        if self._processes:
            shown = shown_results(traced.program, mesh)
            self.out_shardings = [
                shown.get(i, sharding) for i, sharding in enumerate(self.out_shardings)
            ]

    def _sharding(self, leaf: Leaf) -> NamedSharding:
        mesh: Any = self.meshes[leaf.stage]
        if leaf.num_stages > 1:
            mesh = mesh_of_stages(self.plan.stages, leaf, self.mesh)
        check_divides(leaf.path, leaf.spec, leaf.shape, mesh)
        return NamedSharding(mesh, spec_on_mesh(leaf.spec, leaf.shape, mesh))

    @cached_property
    def of_step(self) -> Unstacked:
        """The function with its layer stacks split into parts, as planned."""
        assert self.plan.pipeline is not None
        return unstacked_of(self.traced, self.plan)

    @cached_property
    def step(self) -> StagedStep:
        """The tasks of the step, split as planned."""
        assert self.plan.pipeline is not None
        return step_of(self.of_step, self.plan.pipeline)

    @cached_property
    def programs(self) -> Sequence[GroupPrograms]:
        """The programs of every submesh."""
        step, before = self.step, self.of_step.program
        pairs = enumerate(zip(self.plan.stages, self.meshes, strict=True))
        return [
            GroupPrograms(step, g, group_program(step, g, before), stage, mesh)
            for g, (stage, mesh) in pairs
            if isinstance(mesh, Mesh)
        ]

    @cached_property
    def _controller(self) -> Controller:
        assert self.plan.pipeline is not None
        platform = self.mesh.devices.flat[0].platform
        sizes = [len(stage.devices) for stage in self.plan.stages]
        order = order_of(schedule_of(self.plan.pipeline), self.step.offloading)
        is_emulated = platform == "cpu" and max(sizes) > 1
        alone = Controller(self.step, self.programs, order, is_emulated)
        if not self._processes:
            return alone
        shown = {
            i: self.out_shardings[end.whole]
            for i, end in enumerate(self.of_step.outputs)
            if end.part is None and self.out_shardings[end.whole].mesh == self.mesh
        }
        return join(alone, self.mesh, self._processes, shown, self.traced.name)

    @cached_property
    def is_runnable(self) -> bool:
        return can_run(self.mesh)

    def run(self, arrays: Sequence[Any], compiled: Any = None) -> Sequence[Any]:
        return with_weak_types(self._run(arrays), self.traced.out_types)

    def _run(self, arrays: Sequence[Any]) -> Sequence[Any]:
        # Python numbers too are sent to other submeshes.
        arrays = [
            placed([x], [sharding])[0] if is_python_scalar(x) else x
            for x, sharding in zip(arrays, self.in_shardings, strict=True)
        ]
        if not self.of_step.stacks:
            return self._controller.run(arrays)
        parts = self._stacks.parts(arrays)
        results = self._stacks.whole(self._controller.run(parts))
        self._stacks.delete_donated(arrays, parts)
        return results

    @cached_property
    def _stacks(self) -> Stacks:
        return Stacks(self.of_step, self.step, self.programs, self.out_shardings)

    def for_types(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> TaskExecutable:
        return self

    def run_staged(self, arrays: Sequence[Any]) -> Sequence[Any]:
        raise self._refused("cannot run inside of another trace")

    def trace(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> jax.stages.Traced:
        raise self._refused("has no one program to trace")

    def lower(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> jax.stages.Lowered:
        raise self._refused("has no one program to lower")

    def _refused(self, why: str) -> StageError:
        return StageError(
            f"`{self.traced.name}` is planned in {len(self.plan.stages)} stages and"
            f" {why}.",
            where=f"`{self.traced.name}`",
            numbers=f"{len(self.plan.stages)} stages",
            fix="call it by itself on devices, or plan with `stages=1`.",
        )
