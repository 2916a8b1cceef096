"""The Plan that users get: the data of a plan, with methods.

Every method is a line: its implementation is a function of the data in `plan/`,
`runtime/`, `verify/` or `explain/report/`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from rhino_jax.errors import PlanFileError
from rhino_jax.explain.diff import PlanDiff, diff
from rhino_jax.explain.report.html import to_html
from rhino_jax.explain.report.line import one_line
from rhino_jax.explain.report.step import save_trace
from rhino_jax.explain.report.text import to_text
from rhino_jax.explain.why import Why
from rhino_jax.export.code import code_of
from rhino_jax.pipeline.jitter import Jittered, Noise
from rhino_jax.pipeline.of_plan import simulated
from rhino_jax.pipeline.simulation import Simulation
from rhino_jax.plan import plan as data, trees
from rhino_jax.plan.files.schema import plan_from_dict, plan_to_dict
from rhino_jax.plan.files.store import save_plan
from rhino_jax.runtime import placing
from rhino_jax.runtime.sharded import jit_with_plan
from rhino_jax.verify.check import check
from rhino_jax.verify.results.check import Check
from rhino_jax.verify.results.verification import Verification
from rhino_jax.verify.verification import verify


class Plan(data.PlanData):
    """Layouts of a program over a mesh, and their predicted cost.

    `str(plan)` is one line, `plan.table()` the whole report. Its attributes are those
    of `rhino_jax.plan.plan.PlanData`.
    """

    @classmethod
    def of(cls, plan: data.PlanData) -> Plan:
        """Return a plan's data as this class."""
        if isinstance(plan, cls):
            return plan
        return cls(**{f.name: getattr(plan, f.name) for f in fields(plan)})

    def __reduce__(self) -> Any:
        """Pickle the content of a plan file, without the process's devices."""
        return _from_dict, (plan_to_dict(self),)

    def __repr__(self) -> str:
        return one_line(self)

    def _repr_html_(self) -> str:
        return to_html(self)

    @property
    def in_specs(self) -> Any:
        """PartitionSpecs shaped like the arguments.

        The tuple of positional arguments if the call has no keyword arguments, else
        (args, kwargs). Static arguments, and leaves that are not arrays, are None.
        """
        return trees.in_tree_of(self, self._partition_spec)

    @property
    def out_specs(self) -> Any:
        """PartitionSpecs shaped like the result."""
        return trees.out_tree_of(self, self._partition_spec)

    @property
    def in_shardings(self) -> Any:
        """NamedShardings shaped like the arguments, see `in_specs`.

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
        """Return the whole report as text, at most 100 columns wide.

        Args:
          full: show every value and every collective; else repeated layers are folded
            and long lists shortened, with the rest counted in the last line.
        """
        return to_text(self, full=full)

    def with_mesh(self, mesh: Any) -> Plan:
        """Return the same plan on a concrete (or abstract) mesh with the same axes.

        Raises:
          MeshError: the mesh's axes are not the plan's.
        """
        return trees.with_mesh(self, mesh)

    def jit(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Return `fn` as a function that runs sharded, as planned.

        Args:
          fn: the function that was planned.
          options: `donate_argnums`, `donate_argnames`, `static_argnums` and
            `static_argnames`, as in `jax.jit`.
        Raises:
          PlanFileError: on the first call, if the plan is of another program.
        """
        return jit_with_plan(fn, self, **options)

    def init(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return `fn(*args, **kwargs)`, computed with this plan's shardings.

        `fn` runs under `jax.jit` with the plan's shardings: no device holds a sharded
        array whole, unless the op that produces it cannot be sharded (a QR
        decomposition). Its result may be one argument, the first of the arguments in
        order, or a tuple, list or dict of arguments; leaves that are not arrays pass
        through.

        Args:
          fn: initializes state, as `model.init`; may return several arguments, as
            (params, opt_state).
          args, kwargs: its arguments; arrays are traced, all else is not.

        Raises:
          RhinoError: an array is not an argument of the planned function, or could be
            several arguments with different shardings.
          MeshError: there are too few devices.
        """
        return placing.init(self, fn, args, kwargs)

    def put(self, tree: Any, *, local: bool = False, stored: bool = False) -> Any:
        """Move arrays to the devices and shardings of this plan.

        Args:
          tree: the tuple of arguments, one argument, a part of one, or a tuple, list or
            dict of such, of NumPy arrays or of JAX arrays on any devices and mesh.
          local: each process passes its own devices' part of every array (or the whole
            array), as in `jax.make_array_from_process_local_data`; else all processes
            pass whole arrays.
          stored: arrays are in this plan's storage order, as copies of a step's results
            are; else in the program's order (see `as_written`).

        Raises:
          RhinoError: as `init`; or a process passes another part than that of its
            devices.
          MeshError: there are too few devices.
        """
        return placing.put(self, tree, local=local, stored=stored)

    def as_written(self, tree: Any) -> Any:
        """Return arrays in the program's order, converted from interleaved storage.

        For a plan with `storage="blocks"`, for checkpoints and inspection: results of
        `plan.put`, `plan.init` and steps may be in interleaved (block-cyclic) storage.
        The inverse of `put`; arrays stay on their devices.

        Args:
          tree: as in `put`.

        Raises:
          RhinoError: as `put`; or the storage order of an array is not known.
        """
        return placing.as_written(self, tree)

    def abstract_args(self) -> Any:
        """Return `jax.ShapeDtypeStruct`s with shardings, shaped like the arguments.

        The tree is that of `in_specs`; Orbax, for example, restores a checkpoint into
        it. Flax NNX objects are their `nnx.state`, a `Variable` around each shape,
        unless the plan was read from a file: then they are dicts of shapes.
        """
        return placing.abstract_args(self)

    def verify(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        compile_for: Any = None,
        static_argnums: int | Iterable[int] | None = None,
        static_argnames: str | Iterable[str] | None = None,
        time_limit_s: float | str | None = None,
        **kwargs: Any,
    ) -> Verification:
        """Compile `fn(*args, **kwargs)` as planned; compare with predictions.

        Allocates and runs nothing. Arguments donated in the plan's request are donated.

        Args:
          fn: the planned function, or the result of `auto_shard` for it.
          args, kwargs: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them.
          compile_for: None: the plan's mesh, or its hardware if that mesh has no
            devices. "cpu": emulated devices. A name as "v5e:4x4" or "h100:8": that
            hardware, which need not be present (`rhino.compile_target`). Or a mesh with
            the plan's axes.
          static_argnums, static_argnames: as in `jax.jit`.
          time_limit_s: wall time that compiling for absent hardware may take, in
            seconds or as "5 min"; None: no limit.

        Returns:
          Predicted and compiled quantities. Its `ok` says whether step time, peak
          memory and traffic are as predicted, within the tolerances of `time_ok`,
          `peak_ok` and `traffic_ok`; `time_differences` names the source lines whose
          time is most wrong. A program that does not fit is a result, too.

        Raises:
          PlanFileError: the plan is of another program.
          MeshError: the mesh has other axes.
          HardwareError: there is no compiler for the hardware, or it is not installed.
          CompilerError: compiling took longer than `time_limit_s`, or the compiler
            aborted.
        """
        return verify(
            self,
            fn,
            args,
            kwargs,
            compile_for=compile_for,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            time_limit_s=time_limit_s,
        )

    def simulate(self, jitter: Noise | float | None = None) -> Simulation | Jittered:
        """Simulate one step of the pipeline, or many with noise.

        Args:
          jitter: None: no noise. A number: standard deviation of the logarithm of every
            task's duration, as 0.05; transfers have twice that. Or a
            `rhino_jax.pipeline.jitter.Noise`.
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
        /,
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
          fn: the planned function, or the result of `auto_shard` for it.
          args, kwargs: its arguments, with arrays.
          tolerance: maximum relative difference of floats; None: by element type, 1e-4
            for float32, and what other last bits of its sums and of its conversions to
            narrower types change (`rhino_jax.verify.rounding`).
          static_argnums, static_argnames: as in `jax.jit`.

        Returns:
          The differences by tree path, the largest first, and the leaves that could not
          be compared. Runs on the plan's mesh, or on emulated devices if it has none.

        Raises:
          PlanFileError: the plan is of another program.
          MeshError: the mesh has no devices, and that many cannot be emulated.
        """
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
        """Return positions and names of the arguments whose arrays are all donated."""
        return trees.donated_arguments(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; `rhino.load_plan(path)` reads it back."""
        save_plan(self, path)

    def code(self, style: str = "constraints") -> str:
        """Return the plan as Python source that does not need rhino.

        `print` it, or write it to a file.

        Args:
          style: "specs": PartitionSpecs of arguments and results, for `jax.jit`.
            "constraints": also `with_sharding_constraint` at your lines, as a list and
            as a diff. "nnx", "linen", "maxtext": the same as names of dims and logical
            axis rules. "explicit": as sharding in types.

        Returns:
          The text of a module with `mesh`, `in_specs`, `out_specs`, `jit(fn, *args)`;
          its docstring lists what the style cannot express.

        Raises:
          RhinoError: there is no such style, or the plan has stages; an SPMD pipeline
            has the style "specs" alone, which lists the stages and contains a loop over
            layers that runs in them.
          PlanFileError: the plan was read from a file, and the style needs your lines.
        """
        return code_of(self, style)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the predicted step as a trace for Perfetto or chrome://tracing.

        Its tracks are compute, the collectives over each set of mesh axes, and memory.

        Args:
          path: ends in `.json`, or in `.json.gz` for a compressed file.
        Raises:
          WriteError: the file cannot be written.
        """
        save_trace(self, path)

    def diff(self, other: data.PlanData, *, worth: bool = True) -> PlanDiff:
        """Compare this plan with `other`; `print` the result to read it.

        Args:
          other: the plan to compare with.
          worth: as in `rhino.diff`.
        """
        return diff(self, other, worth=worth)

    def with_(
        self,
        *,
        pins: Any = None,
        memory_budget_bytes: float | str | None = None,
        mesh: Any = None,
        microbatches: int | str | None = None,
        recompute: str | None = None,
        loops: str | None = None,
        grouped: str | None = None,
        stacks: str | None = None,
        attention: str | None = None,
        stages: int | str | None = None,
        schedule: str | None = None,
    ) -> Plan:
        """Plan the same program again with some options changed.

        With other pins or another budget, this plan's search problem is solved again,
        on its mesh and with its passes (micro-batches, remat), in a fraction of the
        time; `recipes` stay those of this plan. The stage cuts of a plan in stages stay
        if only pins of layouts change. If nothing fits this way, and for all other
        changes, everything but tracing is repeated.

        Args:
          pins: as in `auto_shard`; added to the pins of this plan, and replacing those
            with the same key.
          memory_budget_bytes, mesh, microbatches, recompute, loops, grouped, stacks,
            attention, stages, schedule: as in `auto_shard`; None: as in this plan's
            request. A mesh that rhino chose stays, unless `stages` is given.

        Raises:
          PlanFileError: the plan was loaded from a file, without its program. PinError,
            InfeasiblePlanError, …: as `rhino.plan`.
        """
        changes = {
            "pins": pins,
            "memory_budget_bytes": memory_budget_bytes,
            "mesh": mesh,
            "microbatches": microbatches,
            "recompute": recompute,
            "loops": loops,
            "grouped": grouped,
            "stacks": stacks,
            "attention": attention,
            "stages": stages,
            "schedule": schedule,
        }
        return Plan.of(_origin(self, "with_").with_(self, changes))

    def recipe(self, name: str) -> Plan:
        """Return an expert's recipe at its best, as a plan: to run, verify and compare.

        It is the one in this plan's table of recipes, whether it fits or not.

        Args:
          name: as in `plan.recipes`.

        Raises:
          RhinoError: there is no such recipe, or the program does not allow it.
          PlanFileError: as `with_`.
        """
        from rhino_jax.explain.questions import recipe

        _origin(self, "recipe")
        return Plan.of(recipe(self, name))

    def why(self, key: str) -> Why:
        """Explain why a value has its layout, and what each alternative would cost.

        The value is fixed to each of its other layouts, one after the other, and
        everything else is solved again: the cost of a layout is what
        `plan.with_(pins={key: spec})` would find. `print` the result to read it.

        For a plan in stages, the result says on which stage the value is, and why; and
        what its other layouts cost that stage and the simulated step. Values that
        several stages have are explained for each (`Why.also`).

        Args:
          key: a tree path or glob of arguments and results, a source line (`gpt.py:61`;
            in notebooks `In[7]:39`), a scope, an op (`dot_general #12`) or a value
            (`%34`), as the plan's tables name them.

        Raises:
          RhinoError: the key names nothing.
          PlanFileError: as `with_`.
        """
        from rhino_jax.explain.questions import why

        _origin(self, "why")
        return why(self, key)

    def why_not(self, key: str, spec: Any) -> Why:
        """Explain what one layout of a value would cost, or why it is impossible.

        Args:
          key: as in `why`.
          spec: a PartitionSpec; for a plan in stages also the number of a stage: the
            cost of placing the value there, with everything cut and planned again.
        """
        from rhino_jax.explain.questions import why

        _origin(self, "why_not")
        return why(self, key, spec)


def _origin(plan: data.PlanData, what: str) -> Any:
    if plan.origin is None:
        raise PlanFileError(
            f"`plan.{what}`: the program of this plan is not at hand.",
            where=f"the plan of `{plan.program_name}`",
            numbers="it was loaded from a file, or planned inside of another trace",
            fix="plan = rhino.plan(fn, *args, mesh=mesh), which the cache makes quick;"
            " then ask that plan.",
        )
    return plan.origin


def _from_dict(data: Mapping[str, Any]) -> Plan:
    return Plan.of(plan_from_dict(data))
