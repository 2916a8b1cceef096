"""The Plan that users hold: the data of a plan, and what acts on it.

Every method is a line: what it does stands in `plan/`, `runtime/`, `verify/`
or `explain/report/`, as a function of the data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rhino_jax.explain.report.html import to_html
from rhino_jax.explain.report.line import one_line
from rhino_jax.explain.report.step_trace import save_trace
from rhino_jax.explain.report.text import to_text
from rhino_jax.explain.results.check import Check
from rhino_jax.explain.results.diff import PlanDiff, diff
from rhino_jax.explain.results.dress import dressed
from rhino_jax.explain.results.explored import Explored
from rhino_jax.explain.results.verification import Verification
from rhino_jax.export.code import code_of
from rhino_jax.pipeline.jitter import Jittered, Noise
from rhino_jax.pipeline.of_plan import simulated
from rhino_jax.pipeline.simulation import Simulation
from rhino_jax.plan import plan as data, trees
from rhino_jax.plan.files.schema import plan_from_dict, plan_to_dict
from rhino_jax.plan.files.store import save_plan
from rhino_jax.runtime import placing
from rhino_jax.runtime.with_plan import jit_with_plan
from rhino_jax.verify.check import check
from rhino_jax.verify.verification import verify


class Plan(Explored):
    """How a program is laid out over a mesh, and what that costs.

    `str(plan)` is one line, `plan.table()` the whole story. Its attributes are those of
    `rhino_jax.plan.plan.PlanData`.
    """

    @classmethod
    def of(cls, plan: data.PlanData) -> Plan:
        """The same plan, able to act."""
        return dressed(cls, plan)

    def __reduce__(self) -> Any:
        """For pickle: what a file holds, so without the mesh: devices are of a
        process."""
        return _from_dict, (plan_to_dict(self),)

    def __repr__(self) -> str:
        return one_line(self)

    def _repr_html_(self) -> str:
        return to_html(self)

    @property
    def in_specs(self) -> Any:
        """PartitionSpecs shaped like the arguments.

        The tuple of positional arguments where the call has no keyword arguments,
        else (args, kwargs). Static arguments, and leaves that are no arrays, are None.
        """
        return trees.in_tree_of(self, self._partition_spec)

    @property
    def out_specs(self) -> Any:
        """PartitionSpecs shaped like the result."""
        return trees.out_tree_of(self, self._partition_spec)

    @property
    def in_shardings(self) -> Any:
        """NamedShardings shaped like the arguments, as `in_specs`.

        Raises:
          MeshError: the plan has no mesh.
        """
        return trees.in_tree_of(self, trees.sharding_of(self))

    @property
    def out_shardings(self) -> Any:
        """NamedShardings shaped like the result.

        Raises:
          MeshError: the plan has no mesh.
        """
        return trees.out_tree_of(self, trees.sharding_of(self))

    def _partition_spec(self, leaf: data.Leaf) -> Any:
        return trees.partition_spec(leaf.spec, [name for name, _ in self.mesh_axes])

    def table(self, *, full: bool = False) -> str:
        """The whole story as text, at most 100 columns wide.

        Args:
          full: show every value and every collective; else repeated layers are
            folded and long lists cut, with what was left out in the last line.
        """
        return to_text(self, full=full)

    def with_mesh(self, mesh: Any) -> Plan:
        """The same plan on a concrete (or abstract) mesh with the same axes.

        Raises:
          MeshError: the mesh's axes are not the plan's.
        """
        return trees.with_mesh(self, mesh)

    def jit(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """`fn` as a function that runs sharded, as planned.

        Args:
          fn: the function that was planned.
          options: `donate_argnums`, `donate_argnames`, `static_argnums` and
            `static_argnames`, as in `jax.jit`.
        Raises:
          PlanFileError: on the first call, if the plan is of another program.
        """
        return jit_with_plan(fn, self, **options)

    def init(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`fn(*args, **kwargs)`, made where this plan wants it.

        `fn` runs under `jax.jit` with the plan's shardings: no device holds a sharded
        array whole, unless what makes it cannot be cut (a QR decomposition). Its result
        may be one argument, the first of the arguments in order, or a tuple, list or
        dict of arguments; leaves that are no arrays pass through.

        Args:
          fn: makes state, as `model.init`; may give several, as (params, opt_state).
          args, kwargs: its arguments; arrays are traced, all else is not.
        Raises:
          RhinoError: an array is no argument of the planned function, or could be
            several that are not sharded alike.
          MeshError: there are too few devices.
        """
        return placing.init(self, fn, args, kwargs)

    def put(self, tree: Any, *, local: bool = False, stored: bool = False) -> Any:
        """The same arrays where this plan wants them.

        Args:
          tree: the tuple of arguments, one argument, a part of one, or a tuple, list or
            dict of such, of NumPy arrays or of JAX arrays on any devices and mesh.
          local: each process gives what its own devices hold of every array (or the
            whole), as of `jax.make_array_from_process_local_data`; else all processes
            give whole arrays.
          stored: arrays are in the order in which this plan stores them, as copies of a
            step's results are; else as written (see `as_written`).
        Raises:
          RhinoError: as `init`; or a process gives another part than it holds.
          MeshError: there are too few devices.
        """
        return placing.put(self, tree, local=local, stored=stored)

    def as_written(self, tree: Any) -> Any:
        """The same arrays in the order in which the program is written.

        Of a plan with `storage="blocks"`, for checkpoints and eyes: what `plan.put`,
        `plan.init` and steps give may be stored in blocks. The inverse of `put`; arrays
        stay on their devices.

        Args:
          tree: as of `put`.
        Raises:
          RhinoError: as `put`; or it is not known how an array is stored.
        """
        return placing.as_written(self, tree)

    def abstract_args(self) -> Any:
        """`jax.ShapeDtypeStruct`s with shardings, shaped like the arguments.

        As `in_specs`; what Orbax, for one, restores a checkpoint into. Flax NNX objects
        are their `nnx.state`, a `Variable` around each shape, unless the plan was read
        from a file: then they are dicts of shapes.
        """
        return placing.abstract_args(self)

    def verify(
        self,
        fn: Callable[..., Any],
        *args: Any,
        compile_for: Any = None,
        static_argnums: int | Iterable[int] | None = None,
        static_argnames: str | Iterable[str] | None = None,
        **kwargs: Any,
    ) -> Verification:
        """Compile `fn(*args, **kwargs)` as planned, and see whether the plan holds.

        Allocates and runs nothing. What was donated when it was planned is donated.

        Args:
          fn: the function that was planned, or what `auto_shard` made of it.
          args, kwargs: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them.
          compile_for: None: the plan's mesh, or its hardware where that mesh has no
            devices. "cpu": emulated devices. A name as "v5e:4x4" or "h100:8": that
            hardware, which need not be there (`rhino.compile_target`). Or a mesh
            with the plan's axes.
          static_argnums, static_argnames: as in `jax.jit`.
        Returns:
          Predicted beside compiled. A program that does not fit is a result too.
        Raises:
          PlanFileError: the plan is of another program.
          MeshError: the mesh has other axes.
          HardwareError: there is no compiler for the hardware, or it is not installed.
        """
        return Verification.of(
            verify(
                self,
                fn,
                args,
                kwargs,
                compile_for=compile_for,
                static_argnums=static_argnums,
                static_argnames=static_argnames,
            )
        )

    def simulate(self, jitter: Noise | float | None = None) -> Simulation | Jittered:
        """One step of the pipeline by the clock, or many with noise.

        Args:
          jitter: None: none. A number: sigma of the logarithm of every task's duration,
            as 0.05; transfers have twice that. Or a `rhino_jax.pipeline.jitter.Noise`.
        Returns:
          A simulation: `step_time_s`, `bubble`, `peak_bytes`, `table()`,
          `save_trace(path)`; with noise, the distribution of step times.
        Raises:
          ScheduleError: the plan has one stage.
        """
        return simulated(self, jitter)

    def check(
        self,
        fn: Callable[..., Any],
        *args: Any,
        tolerance: float | None = None,
        static_argnums: int | Iterable[int] | None = None,
        static_argnames: str | Iterable[str] | None = None,
        **kwargs: Any,
    ) -> Check:
        """Run `fn(*args, **kwargs)` as planned and on one device, and compare results.

        Runs on copies: nothing of the arguments is consumed or changed. One device must
        hold the whole program.

        Args:
          fn: the function that was planned, or what `auto_shard` made of it.
          args, kwargs: its arguments, with arrays.
          tolerance: the largest relative difference of floats; None: by element type,
            1e-4 for float32, and what the program's own roundings to 16 bits leave
            open (`rhino_jax.verify.comparison`).
          static_argnums, static_argnames: as in `jax.jit`.
        Returns:
          The differences by tree path, the largest first, and what could not be
          compared. Runs on the plan's mesh, or on emulated devices where it has none.
        Raises:
          PlanFileError: the plan is of another program.
          MeshError: the mesh has no devices, and so many cannot be emulated.
        """
        return Check.of(
            check(
                self,
                fn,
                args,
                kwargs,
                tolerance=tolerance,
                static_argnums=static_argnums,
                static_argnames=static_argnames,
            )
        )

    def donated_arguments(self) -> tuple[int | str, ...]:
        """Positions and names of the arguments whose arrays are all donated."""
        return trees.donated_arguments(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; `rhino.load_plan(path)` reads it back."""
        save_plan(self, path)

    def code(self, style: str = "constraints") -> str:
        """The plan as Python source that does without rhino: `print` it, or write it to
        a file.

        Args:
          style: "specs": PartitionSpecs of arguments and results, for `jax.jit`.
            "constraints": also `with_sharding_constraint` at your lines, as a list and
            as a diff. "nnx", "linen", "maxtext": the same as names of dims and logical
            axis rules. "explicit": as sharding in types.
        Returns:
          The text of a module with `mesh`, `in_specs`, `out_specs`, `jit(fn, *args)`;
          what a style cannot carry stands in its docstring.
        Raises:
          RhinoError: no such style, or the plan has stages; in one program, "specs"
            says what they hold, and has a loop over layers that runs in them.
          PlanFileError: the plan was read from a file, and the style needs your lines.
        """
        return code_of(self, style)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the predicted step for Perfetto or chrome://tracing: compute, the
        collectives over each set of mesh axes, and memory.

        Args:
          path: ends in `.json`, or in `.json.gz` for a compressed file.
        Raises:
          WriteError: the file cannot be written.
        """
        save_trace(self, path)

    def diff(self, other: data.PlanData, *, worth: bool = True) -> PlanDiff:
        """What changes from this plan to `other`; `print` it to read it.

        Args:
          worth: as of `rhino.diff`.
        """
        return diff(self, other, worth=worth)


def _from_dict(data: Mapping[str, Any]) -> Plan:
    return Plan.of(plan_from_dict(data))
