"""Run a plan of one stage as one SPMD program with sharding constraints.

An `Executable` is that, or the tasks of a plan of several stages: it runs a plan on
flat arrays, as one program or many. Arrays are the arguments, then captured constants;
the results, then values that are written back.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from rhino_jax._compat import context_mesh, in_current_mesh, with_weak_types
from rhino_jax.errors import StageError
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.emulated import WATCHDOG
from rhino_jax.ir.transform import stages_in_one
from rhino_jax.plan.plan import Leaf, PlanData
from rhino_jax.plan.stages import STAGE_AXIS
from rhino_jax.runtime.constraints import (
    auto_mesh,
    check_divides,
    explicit_part,
    spec_on_mesh,
)
from rhino_jax.runtime.interpret import constrained
from rhino_jax.runtime.meshes import can_run
from rhino_jax.runtime.tasks.executable import TaskExecutable


class SpmdExecutable:
    """Runs a program as one compiled SPMD program.

    Attributes:
      traced: the traced function.
      plan: its plan, of one stage.
      mesh: the mesh of arguments and results.
      in_shardings: shardings of arguments, then constants.
      out_shardings: shardings of results.
    """

    def __init__(self, traced: Traced, plan: PlanData, mesh: Any) -> None:
        self.traced, self.plan, self.mesh = traced, plan, mesh
        self._types: Sequence[jax.ShapeDtypeStruct] | None = None
        self.in_shardings: Sequence[NamedSharding] = [
            self._sharding(leaf) for leaf in plan.inputs
        ]
        self.out_shardings: Sequence[NamedSharding] = [
            self._sharding(leaf) for leaf in plan.outputs
        ]

    def _sharding(self, leaf: Leaf) -> NamedSharding:
        check_divides(leaf.path, leaf.spec, leaf.shape, self.mesh)
        return NamedSharding(
            self.mesh,
            spec_on_mesh(leaf.spec, leaf.shape, self.mesh),
            memory_kind=leaf.memory_kind,
        )

    def function(self) -> Any:
        """Return the flat function of arguments and constants, with constraints."""
        if stages_in_one(self.plan.transforms) > 1:
            run = over_stages(self.traced, self.plan, auto_mesh(self.mesh))
        else:
            run = constrained(
                self.traced.closed_jaxpr,
                self.traced.program,
                self.plan.decisions,
                auto_mesh(self.mesh),
            )
        if any(kind is AxisType.Explicit for kind in self.mesh.axis_types):
            run = jax.sharding.auto_axes(
                run,
                axes=self.mesh.axis_names,
                out_sharding=[explicit_part(s) for s in self.out_shardings],
            )
        types = self.traced.out_types

        def typed(*arrays: Any) -> list[Any]:
            return with_weak_types(run(*arrays), types)

        typed.__name__ = typed.__qualname__ = self.traced.name
        return typed

    @cached_property
    def jitted(self) -> Any:
        """The jitted function for arrays: donates, and fixes the output shardings."""
        inputs, run = self.traced.program.inputs, self.function()

        def ordered(*arrays: Any) -> list[Any]:
            results = run(*arrays)
            return [results[i] for i in self.order]

        ordered.__name__ = ordered.__qualname__ = self.traced.name
        return jax.jit(
            ordered,
            donate_argnums=[i for i, entry in enumerate(inputs) if entry.is_donated],
            out_shardings=[self.out_shardings[i] for i in self.order],
        )

    @cached_property
    def order(self) -> list[int]:
        """Positions of results in the order in which the compiled program returns them.

        JAX gives donated buffers, in their order, to results with the same shape on one
        device and the same type, in their order (`_set_up_aliases` in
        jax/_src/interpreters/mlir.py). If that is another result than the one that
        replaces the argument, XLA copies both. So results of one shape and type change
        places: those that replace arguments come first, in the order of these.
        """
        inputs, outputs = self.traced.program.inputs, self.traced.program.outputs

        def slot(i: int) -> int:
            replaced = outputs[i].state_of
            if replaced is None or not inputs[replaced].is_donated:
                return len(inputs)
            return replaced

        alike = defaultdict[Any, list[int]](list)
        for i, (leaf, sharding) in enumerate(
            zip(self.plan.outputs, self.out_shardings, strict=True)
        ):
            alike[sharding.shard_shape(leaf.shape), leaf.dtype].append(i)
        found = [*range(len(outputs))]
        for places in alike.values():
            for place, i in zip(places, sorted(places, key=slot), strict=True):
                found[place] = i
        return found

    @cached_property
    def _places(self) -> list[int]:
        """The places of results in what the compiled program returns."""
        return sorted(self.order, key=self.order.__getitem__)

    def for_types(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> SpmdExecutable:
        """Return a copy, with its compiled programs, for other weak types.

        Args:
          shapes: types of the arrays that it was compiled for.
        """
        found = copy.copy(self)
        found._types = shapes
        found.__dict__.pop("_for_types", None)
        return found

    @cached_property
    def _for_types(self) -> Any:
        """The compiled function for these types.

        It accepts weak and strong types alike, which `jitted` compiles separately.
        """
        with self._in_mesh():
            return self.jitted.lower(*(self._types or ())).compile()

    @cached_property
    def _staged(self) -> Any:
        """The jitted function for tracers: with constraints only."""
        if stages_in_one(self.plan.transforms) > 1:
            return jax.jit(self._undifferentiated())
        return jax.jit(self.function())

    def _undifferentiated(self) -> Any:
        """Return the function with a derivative rule that raises.

        JAX 0.10.2 fails to differentiate a loop where some axes of a mesh are manual.
        """
        run, name = jax.custom_jvp(self.function()), self.traced.name

        @run.defjvp
        def refused(primals: Any, tangents: Any) -> Any:
            raise StageError(
                f"`{name}` is planned in several stages of one program, and is"
                " differentiated from outside.",
                where=f"`{name}`",
                numbers=f"{self.plan.num_stages} stages",
                fix="take the gradient inside of the function that is planned, as in a"
                " training step.",
            )

        return run

    def run(self, arrays: Sequence[Any], compiled: Any = None) -> Sequence[Any]:
        """Run on arrays in `in_shardings`; donated ones are consumed.

        Args:
          arrays: concrete arrays.
          compiled: the compiled result of `lower`; None: compile where needed.
        """
        call = compiled
        if call is None:
            call = self.jitted if self._types is None else self._for_types
        if not self._is_emulated:
            with self._in_mesh():
                return self._restored(call(*arrays))
        with WATCHDOG.watching(lambda: f"`{self.traced.name}`"), self._in_mesh():
            outs: Sequence[Any] = call(*arrays)
            if not any(isinstance(x, jax.core.Tracer) for x in outs):
                jax.block_until_ready(outs)
        return self._restored(outs)

    def _restored(self, outs: Sequence[Any]) -> Sequence[Any]:
        """Return what the compiled program returned in the order of results."""
        return [outs[i] for i in self._places]

    def run_staged(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Run inside of an outer trace: only constraints are placed."""
        return self._staged(*arrays)

    def trace(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> jax.stages.Traced:
        """Trace the program that `run` compiles."""
        return self.jitted.trace(*shapes)

    def lower(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> jax.stages.Lowered:
        """Lower the program that `run` compiles, also for an abstract mesh."""
        if isinstance(self.mesh, AbstractMesh):
            platforms = (jax.default_backend(),)
            return self.jitted.trace(*shapes).lower(lowering_platforms=platforms)
        return self.jitted.lower(*shapes)

    def _in_mesh(self) -> AbstractContextManager[Any]:
        """Return a context with the mesh, or a null one where the current mesh fits."""
        return nullcontext() if self._fits_context() else jax.set_mesh(self.mesh)

    def _fits_context(self) -> bool:
        """Whether this call can run within the mesh in context, if any."""
        around = context_mesh()
        if around is None or around is self.mesh:
            return True
        kinds = {*around.axis_types, *self.mesh.axis_types}
        return kinds == {AxisType.Auto} or around == self.mesh

    @cached_property
    def _is_emulated(self) -> bool:
        """Whether several CPU devices share this process's threads.

        XLA:CPU of jax 0.10.2 deadlocks when runs overlap there: a device that has begun
        the next run takes the thread that another needs to finish this one. So each run
        is awaited.
        """
        devices = self.mesh.devices
        return devices.size > 1 and devices.flat[0].platform == "cpu"

    @cached_property
    def is_runnable(self) -> bool:
        """Whether its devices are present."""
        return can_run(self.mesh)


def over_stages(traced: Traced, plan: PlanData, mesh: Any) -> Callable[..., list[Any]]:
    """Return the SPMD pipeline: a `shard_map` over the mesh's stage axis.

    Args:
      traced: the program of one stage (`passes.spmd_pipeline`).
      plan: its plan; leaves that are stacked by layer are sharded over the axis in dim
        0.
      mesh: a mesh with Auto axes; all but the stage axis are left to the compiler.
    """

    def on_stage(*arrays: Any) -> list[Any]:
        here = in_current_mesh(traced.closed_jaxpr)
        around = jax.sharding.get_abstract_mesh()
        return constrained(here, traced.program, plan.decisions, around)(*arrays)

    return jax.shard_map(
        on_stage,
        mesh=mesh,
        axis_names={STAGE_AXIS},
        in_specs=tuple(_by_stage(leaf, mesh) for leaf in plan.inputs),
        out_specs=[_by_stage(leaf, mesh) for leaf in plan.outputs],
        check_vma=False,
    )


def _by_stage(leaf: Leaf, mesh: Any) -> PartitionSpec:
    stage = mesh.axis_names.index(STAGE_AXIS)
    cut = any(stage in dim for dim in leaf.spec)
    return PartitionSpec(STAGE_AXIS) if cut else PartitionSpec()


Executable = SpmdExecutable | TaskExecutable
"""Runs a program as its plan says; both classes have the same methods."""


def executable_of(traced: Traced, plan: PlanData, mesh: Any) -> Executable:
    """Return the executable of a plan of a traced function on a mesh."""
    if plan.has_tasks:
        return TaskExecutable(traced, plan, mesh)
    return SpmdExecutable(traced, plan, mesh)
