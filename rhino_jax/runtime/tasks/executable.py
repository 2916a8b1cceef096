"""Run a plan of several stages as an executable."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from rhino_jax._compat import is_compile_only
from rhino_jax.errors import StageError
from rhino_jax.frontend.leaves import is_python_scalar
from rhino_jax.frontend.trace import Traced
from rhino_jax.passes.staged.group import group_program
from rhino_jax.passes.staged.stacks import Unstacked
from rhino_jax.passes.staged.step import StagedStep
from rhino_jax.pipeline.of_plan import schedule_of
from rhino_jax.plan.plan import Leaf, PlanData
from rhino_jax.plan.trees import mesh_of_stages, stage_mesh
from rhino_jax.runtime.constraints import check_divides, partition_spec
from rhino_jax.runtime.processes.across import placed
from rhino_jax.runtime.processes.agree import processes_of_mesh
from rhino_jax.runtime.tasks.controller import Controller, order_of
from rhino_jax.runtime.tasks.joining import join, shown_results
from rhino_jax.runtime.tasks.programs import GroupPrograms
from rhino_jax.runtime.tasks.stacks import Stacks, stacks_of
from rhino_jax.runtime.tasks.steps import step_of


class TaskExecutable:
    """Runs a program as tasks on submeshes; see `runtime.executable.Executable`.

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
        return NamedSharding(mesh, partition_spec(leaf.spec, leaf.shape, mesh))

    @cached_property
    def of_step(self) -> Unstacked:
        """The function with its layer stacks split into parts, as planned."""
        assert self.plan.pipeline is not None
        traced = self.traced
        return Unstacked.of(traced.closed_jaxpr, traced.program, stacks_of(self.plan))

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
        if not self._processes:
            return Controller(self.step, self.programs, order, is_emulated)
        shown = {
            i: self.out_shardings[end.whole]
            for i, end in enumerate(self.of_step.outputs)
            if end.part is None and self.out_shardings[end.whole].mesh == self.mesh
        }
        return join(
            Controller(self.step, self.programs, order, is_emulated),
            self.mesh,
            self._processes,
            shown,
            self.traced.name,
        )

    @cached_property
    def is_runnable(self) -> bool:
        return isinstance(self.mesh, Mesh) and not is_compile_only(
            self.mesh.devices.flat[0]
        )

    def run(self, arrays: Sequence[Any], compiled: Any = None) -> Sequence[Any]:
        arrays = self._on_devices(arrays)
        if not self.of_step.stacks:
            return self._controller.run(arrays)
        parts = self._stacks.parts(arrays)
        results = self._stacks.whole(self._controller.run(parts))
        self._stacks.delete_donated(arrays, parts)
        return results

    def _on_devices(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Convert Python numbers to arrays on their home submesh.

        They too are sent to other submeshes.
        """
        at = [i for i, x in enumerate(arrays) if is_python_scalar(x)]
        if not at:
            return arrays
        found = list(arrays)
        shardings = [self.in_shardings[i] for i in at]
        for i, x in zip(at, placed([arrays[i] for i in at], shardings), strict=True):
            found[i] = x
        return found

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
