"""The Plan: every choice, what it is predicted to cost, and how it was found."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rhino_jax.ir.spec import Spec
from rhino_jax.plan.decisions import Decisions
from rhino_jax.plan.records import (
    Collective,
    CompiledCandidate,
    Coverage,
    Holding,
    Predicted,
    SearchReport,
)


if TYPE_CHECKING:
    from rhino_jax.plan.diff import PlanDiff
    from rhino_jax.verify.check import Check
    from rhino_jax.verify.verification import Verification


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array that enters or leaves the program.

    Attributes:
      path: tree path.
      shape: global shape.
      dtype: element type.
      spec: chosen spec.
      bytes_per_device: bytes of one device's shard.
      is_donated: whether its memory may be reused for results.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    bytes_per_device: int
    is_donated: bool = False


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """How a program is laid out over a mesh, and what that costs.

    `str(plan)` is one line, `plan.table()` the whole story. The text, the HTML
    and the files are written by `rhino_jax.report` and `rhino_jax.plan.store`.

    Attributes:
      program_name: the planned function's name.
      fingerprint: hash of the program (shapes, ops, factors); a plan is applied
        only to the program it was made for.
      mesh_axes: (name, size) of every mesh axis, major first.
      hardware: name of the target.
      inputs: the program's inputs (arguments, then captured constants).
      outputs: the program's results.
      decisions: specs of all values, by the program's ids.
      predicted: predicted cost.
      collectives: predicted collectives, most expensive first.
      search: how the plan was found.
      coverage: share of the program that rules cover.
      recipes: the experts' plans, by name: what each would cost, or None where
        the program or the budget does not allow it.
      memory_budget_bytes: the budget that was planned for, per device.
      at_peak: what is live at the predicted peak, largest first.
      pins: the user's pins, path → spec text.
      meshes: mesh shapes that were compared, with their objective in seconds,
        where rhino chose the shape.
      refined: the plans that the compiler was asked about, this one among them,
        where the plan was refined.
      notes: things the user should know, in sentences.
      mesh: the JAX mesh, if one was given or could be built.
      in_tree, out_tree: tree structures of (args, kwargs) and of the result, over
        all their leaves.
      in_leaf_positions, out_leaf_positions: where, among all leaves of the trees,
        the arrays are; the arguments come first in `inputs`, in this order.
      lines: the source lines that its text names, each with an op of the program that
        is there; see `rhino_jax.plan.lines`.
      versions: of what made the plan, as {"rhino_jax": …, "jax": …}; filled in
        when a plan is loaded from a file.
      cached: the file of the cache that it was read from, where it was not searched;
        `search.seconds` then says how long that took once.
    """

    program_name: str
    fingerprint: str
    mesh_axes: tuple[tuple[str, int], ...]
    hardware: str
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    decisions: Decisions
    predicted: Predicted
    collectives: tuple[Collective, ...]
    search: SearchReport
    coverage: Coverage
    recipes: Mapping[str, Predicted | None]
    memory_budget_bytes: int
    at_peak: tuple[Holding, ...] = ()
    pins: Mapping[str, str] = field(default_factory=dict)
    meshes: tuple[tuple[tuple[int, ...], float], ...] = ()
    refined: tuple[CompiledCandidate, ...] = ()
    notes: tuple[str, ...] = ()
    mesh: Any = None
    in_tree: Any = None
    out_tree: Any = None
    in_leaf_positions: tuple[int, ...] = ()
    out_leaf_positions: tuple[int, ...] = ()
    lines: Mapping[str, int] = field(default_factory=dict, compare=False)
    versions: Mapping[str, str] = field(default_factory=dict, compare=False)
    cached: str = field(default="", compare=False)

    def __reduce__(self) -> Any:
        """For pickle: what a file holds, so without the mesh: devices are of a
        process."""
        from rhino_jax.plan.schema import plan_from_dict, plan_to_dict

        return plan_from_dict, (plan_to_dict(self),)

    def __copy__(self) -> Plan:
        return self  # nothing of it changes

    def __deepcopy__(self, memo: Any) -> Plan:
        return self

    def __repr__(self) -> str:
        from rhino_jax.report.line import one_line

        return one_line(self)

    def _repr_html_(self) -> str:
        from rhino_jax.report.html import to_html

        return to_html(self)

    @property
    def in_specs(self) -> Any:
        """PartitionSpecs shaped like the arguments.

        The tuple of positional arguments where the call has no keyword arguments,
        else (args, kwargs). Static arguments, and leaves that are no arrays, are None.
        """
        from rhino_jax.plan.trees import in_tree_of

        return in_tree_of(self, self._partition_spec)

    @property
    def out_specs(self) -> Any:
        """PartitionSpecs shaped like the result."""
        from rhino_jax.plan.trees import out_tree_of

        return out_tree_of(self, self._partition_spec)

    @property
    def in_shardings(self) -> Any:
        """NamedShardings shaped like the arguments, as `in_specs`.

        Raises:
          MeshError: the plan has no mesh.
        """
        from rhino_jax.plan.trees import in_tree_of, sharding_of

        return in_tree_of(self, sharding_of(self))

    @property
    def out_shardings(self) -> Any:
        """NamedShardings shaped like the result.

        Raises:
          MeshError: the plan has no mesh.
        """
        from rhino_jax.plan.trees import out_tree_of, sharding_of

        return out_tree_of(self, sharding_of(self))

    def _partition_spec(self, leaf: Leaf) -> Any:
        from rhino_jax.plan.trees import partition_spec

        return partition_spec(leaf.spec, [name for name, _ in self.mesh_axes])

    def table(self, *, full: bool = False) -> str:
        """The whole story as text, at most 100 columns wide.

        Args:
          full: show every value and every collective; else repeated layers are
            folded and long lists cut, with what was left out in the last line.
        """
        from rhino_jax.report.text import to_text

        return to_text(self, full=full)

    def with_mesh(self, mesh: Any) -> Plan:
        """The same plan on a concrete (or abstract) mesh with the same axes.

        Raises:
          MeshError: the mesh's axes are not the plan's.
        """
        from rhino_jax.plan.trees import check_mesh

        check_mesh("`plan.with_mesh`", mesh, self.mesh_axes)
        return replace(self, mesh=mesh)

    def jit(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """`fn` as a function that runs sharded, as planned.

        Args:
          fn: the function that was planned.
          options: `donate_argnums`, `donate_argnames`, `static_argnums` and
            `static_argnames`, as in `jax.jit`.
        Raises:
          PlanFileError: on the first call, if the plan is of another program.
        """
        from rhino_jax.apply.with_plan import jit_with_plan

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
        from rhino_jax.apply.placing import init

        return init(self, fn, args, kwargs)

    def put(self, tree: Any, *, local: bool = False) -> Any:
        """The same arrays where this plan wants them.

        Args:
          tree: the tuple of arguments, one argument, a part of one, or a tuple, list or
            dict of such, of NumPy arrays or of JAX arrays on any devices and mesh.
          local: each process gives what its own devices hold of every array (or the
            whole), as of `jax.make_array_from_process_local_data`; else all processes
            give whole arrays.
        Raises:
          RhinoError: as `init`; or a process gives another part than it holds.
          MeshError: there are too few devices.
        """
        from rhino_jax.apply.placing import put

        return put(self, tree, local=local)

    def abstract_args(self) -> Any:
        """`jax.ShapeDtypeStruct`s with shardings, shaped like the arguments.

        As `in_specs`; what Orbax, for one, restores a checkpoint into.
        """
        from rhino_jax.apply.placing import abstract_args

        return abstract_args(self)

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
        from rhino_jax.verify.verification import verify

        return verify(
            self,
            fn,
            args,
            kwargs,
            compile_for=compile_for,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
        )

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
            1e-4 for float32 (`rhino_jax.verify.comparison`).
          static_argnums, static_argnames: as in `jax.jit`.
        Returns:
          The differences by tree path, the largest first, and what could not be
          compared. Runs on the plan's mesh, or on emulated devices where it has none.
        Raises:
          PlanFileError: the plan is of another program.
          MeshError: the mesh has no devices, and so many cannot be emulated.
        """
        from rhino_jax.verify.check import check

        return check(
            self,
            fn,
            args,
            kwargs,
            tolerance=tolerance,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
        )

    def donated_arguments(self) -> tuple[int | str, ...]:
        """Positions and names of the arguments whose arrays are all donated."""
        from rhino_jax.plan.trees import donated_arguments

        return donated_arguments(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; `rhino.load_plan(path)` reads it back."""
        from rhino_jax.plan.store import save_plan

        save_plan(self, path)

    def diff(self, other: Plan) -> PlanDiff:
        """What changes from this plan to `other`; `print` it to read it."""
        from rhino_jax.plan.diff import diff

        return diff(self, other)
