"""The function that a user calls: plans once per signature, moves arrays, runs.

Called with arrays, it moves those that are not in the plan's shardings and runs one
compiled program. Called with tracers (inside `jit`, `grad` or `vmap`), it only applies
sharding constraints. `jit_with_plan` makes one of an existing plan.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic

import jax
from jax.sharding import Mesh

from rhino_jax._compat import context_mesh
from rhino_jax.errors import (
    InfeasiblePlanError,
    PinError,
    RhinoWarning,
    TraceError,
)
from rhino_jax.frontend.call import Call, Signature, split_call
from rhino_jax.frontend.parameters import Parameters, read_parameters
from rhino_jax.frontend.trace import Traced, another_program, trace_call
from rhino_jax.frontend.weak_types import compute_the_same, differ_in_weakness
from rhino_jax.passes.apply import apply_passes
from rhino_jax.plan.fingerprint import fingerprint, first_change, outline, outline_of
from rhino_jax.plan.fits import check_fits
from rhino_jax.plan.lines import with_lines
from rhino_jax.plan.plan import AnyPlan
from rhino_jax.plan.trees import on_mesh
from rhino_jax.runtime.bound import Arguments, Bound, Lowered, lower
from rhino_jax.runtime.buffers import difference, kept_text, tied, without
from rhino_jax.runtime.constraints import auto_mesh
from rhino_jax.runtime.meshes import axes_of_mesh, make_mesh, read_mesh
from rhino_jax.runtime.processes.agree import agreed, attending, processes_of_mesh
from rhino_jax.utils.progress import Progress


Planner = Callable[[Traced, Any, AnyPlan | None], AnyPlan]
"""Makes a plan with a mesh from a traced function.

Its arguments: the traced function, a mesh (None: choose one), and the function's last
plan for another signature, if any.
"""


class ShardedFunction(Generic[AnyPlan]):
    """A function that runs sharded; see `rhino_jax.auto_shard`.

    Has what `jax.jit` objects have: `lower`, `trace`, `eval_shape`, `clear_cache`,
    `__wrapped__`; and `plan` and `last_plan`.

    Attributes:
      hardware: the hardware that the user specified for it, which `like=` takes over;
        or None.
      plan_options: all options that the user requested for it, or None.
      shows_progress: show a line while a first call compiles.
    """

    def __init__(
        self,
        parameters: Parameters,
        planner: Planner[AnyPlan],
        mesh: Any,
        what: str,
        *,
        plans: bool = True,
    ) -> None:
        """Wrap a function.

        Args:
          parameters: the function, with names, static and donated arguments.
          planner: makes its plans.
          mesh: the mesh that the user specified, or None.
          what: name of the calling API, for messages.
          plans: whether `planner` makes plans, and does not only return an existing
            one.
        """
        self._parameters, self._planner = parameters, planner
        self._mesh, self._what = mesh, what
        self._last: Bound[AnyPlan] | None = None
        self._last_context: Any = None
        self._bounds: dict[tuple[Signature, Any], Bound[AnyPlan]] = {}
        self._plans: dict[tuple[str, Any], AnyPlan] = {}
        self._programs: dict[tuple[Signature, Any], str] = {}
        self._cleared: dict[str, str] = {}
        self._plans_itself = plans
        self._has_warned = not plans
        self._has_told_ties = False
        self.hardware: Any = None
        self.plan_options: Any = None
        self.shows_progress = True
        functools.update_wrapper(self, parameters.fn)
        self.__wrapped__: Callable[..., Any] = parameters.fn
        self.__name__ = parameters.name

    @property
    def mesh(self) -> Any | None:
        """The mesh that the user specified, or None."""
        return self._mesh

    @property
    def parameters(self) -> Parameters:
        """The function's parameters: names, static and donated ones."""
        return self._parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        last = self._last
        if last is not None and (
            self._mesh is not None or context_mesh() is self._last_context
        ):
            arguments = self._match(last, args, kwargs)
            if arguments is not None:
                if arguments.to_move and self._plans_itself:
                    tied_up = self._tie_what_came_back(last, arguments)
                    if tied_up is not last:
                        last, arguments = tied_up, self._match(tied_up, args, kwargs)
                        assert arguments is not None
                return last.run(arguments)
        return self._call(args, kwargs)

    def _match(self, bound: Bound[AnyPlan], args: Any, kwargs: Any) -> Arguments | None:
        if self._parameters.static:
            args, kwargs, statics = self._parameters.take_statics(args, kwargs)
            if statics != bound.traced.signature.statics:
                return None
        return bound.read(args, kwargs)

    def _call(self, args: Any, kwargs: Any) -> Any:
        call = split_call(self._parameters, args, kwargs, self._what)
        arrays = call.leaves.arrays
        for path, x in zip(call.leaves.array_paths, arrays, strict=True):
            if isinstance(x, jax.ShapeDtypeStruct):
                raise TraceError(
                    f"`{self.__name__}` was called with a shape in place of an array.",
                    where=path,
                    numbers=str(x),
                    fix="call it with arrays; .plan(...) and .lower(...) take shapes.",
                )
        bound = self._bind(call)
        is_traced = any(isinstance(x, jax.core.Tracer) for x in arrays)
        if is_traced or bound.traced.has_captured_tracers:
            return bound.run_staged(arrays, call.lifted)
        # Our own references must not be taken for the user's: see `copies.unshared`.
        del call, arrays
        arguments = self._match(bound, args, kwargs)
        assert arguments is not None
        self._last, self._last_context = bound, context_mesh()
        is_shown = self.shows_progress and jax.process_index() == 0
        doing = f"compiling `{self.__name__}`"
        with Progress(doing=doing, is_enabled=is_shown).ticking():
            return bound.run(arguments)

    def _bind(self, call: Call) -> Bound[AnyPlan]:
        """Trace and plan, unless this signature was planned before."""
        mesh = self._mesh
        if mesh is None:
            mesh = read_mesh(context_mesh(), self._what)
        key = (call.signature(), mesh)
        found = self._bounds.get(key)
        if found is not None:
            return found
        with attending(mesh):
            twin = None if mesh is None else auto_mesh(mesh)
            traced = trace_call(self._parameters, call, mesh=twin, what=self._what)
            axes = () if mesh is None else axes_of_mesh(mesh)
            print_of = fingerprint(traced.program, axes)
            before_of = self._programs.get(key)
            if before_of not in (None, print_of):
                was = self._outlines().get(str(before_of), "")
                change = first_change(was, outline(traced.program))
                raise another_program(traced, change, self._what)
            twin = self._twin(key, traced)
            plan = self._plans.get((print_of, mesh)) if twin is None else twin.plan
            if plan is None:
                # The bound that was planned last for this mesh.
                before = next(
                    (b for (_, m), b in reversed(self._bounds.items()) if m == mesh),
                    None,
                )
                plan = self._planner(traced, mesh, before.plan if before else None)
                if before is not None:
                    self._say_that_it_replans(before, call, plan)
                self._plans[print_of, mesh] = plan
            else:
                agreed(traced, processes_of_mesh(plan.mesh), plan, self._what)
        bound = Bound(traced, plan, plan.mesh) if twin is None else twin
        self._programs[key] = print_of
        if not traced.has_captured_tracers:
            self._bounds[key] = bound
        return bound

    def _twin(
        self, key: tuple[Signature, Any], traced: Traced
    ) -> Bound[AnyPlan] | None:
        """Find the bound of a signature that differs in weak types alone.

        None unless this trace computes the same.
        """
        signature, mesh = key
        for (other, its_mesh), bound in reversed(self._bounds.items()):
            if its_mesh == mesh and differ_in_weakness(signature, other):
                if compute_the_same(bound.traced, traced):
                    return bound.with_types(signature)
        return None

    def _tie_what_came_back(
        self, bound: Bound[AnyPlan], arguments: Arguments
    ) -> Bound[AnyPlan]:
        """Plan again with results of the last call tied to arguments, if any came back.

        Returns `bound` itself where no result came back that would have to move.
        """
        ties = bound.feedback.came_back(arguments.arrays, arguments.to_move)
        # A new plan could store arrays in another order than the existing ones.
        if not ties or bound.storage.inputs:
            return bound
        key = next(k for k, b in self._bounds.items() if b is bound)
        mesh = key[1]
        traced = tied(bound.traced, ties)
        before = without(bound.plan, set(ties.values()))
        try:
            with attending(mesh):
                plan = self._planner(traced, bound.mesh, before)
        except (PinError, InfeasiblePlanError):  # the user's options forbid it
            bound.feedback.ignore()
            return bound
        self._say_what_came_back(bound.traced, ties)
        self._plans[self._programs[key], mesh] = plan
        self._last = self._bounds[key] = Bound(traced, plan, bound.mesh)
        return self._last

    def _say_what_came_back(self, traced: Traced, ties: dict[int, int]) -> None:
        if self._has_told_ties:
            return
        self._has_told_ties = True
        paths = traced.arguments.array_paths
        outputs = traced.program.outputs
        said = "; ".join(
            f"`{outputs[o].path}` as `{paths[i]}`" for o, i in ties.items()
        )
        warnings.warn(
            f"{self._what}: results of `{self.__name__}` come back as arguments, laid"
            f" out otherwise: {said}. It is planned again so that they have one"
            " sharding. This is said once; donate such arguments, and it is known from"
            " the start.",
            RhinoWarning,
            stacklevel=4,
        )

    @property
    def last_plan(self) -> AnyPlan | None:
        """The plan that was made last; None where nothing was planned yet."""
        return next((b.plan for b in reversed(self._bounds.values())), None)

    def _say_that_it_replans(self, before: Bound, call: Call, plan: AnyPlan) -> None:
        if self._has_warned:
            return
        reason = difference(before.traced, call)
        if reason is None:
            return
        self._has_warned = True
        warnings.warn(
            f"{self._what}: `{self.__name__}` is planned again, because {reason}."
            f" {kept_text(before.plan, plan)} This is said once; keep shapes the same"
            " from call to call to plan once, or clear_cache() to plan freely.",
            RhinoWarning,
            stacklevel=5,
        )

    def plan(self, *args: Any, **kwargs: Any) -> AnyPlan:
        """Return the plan for these arguments (arrays or `jax.ShapeDtypeStruct`s).

        Allocates and runs nothing.
        """
        return self.bound(*args, **kwargs).plan

    def bound(self, *args: Any, **kwargs: Any) -> Bound[AnyPlan]:
        """Trace and plan for these arguments (arrays or `jax.ShapeDtypeStruct`s)."""
        return self._bind(split_call(self._parameters, args, kwargs, self._what))

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Lower for these arguments, on compile-only meshes too."""
        return lower(self.bound(*args, **kwargs))

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Trace the sharded program with `jax.jit`, over flat arrays."""
        bound = self.bound(*args, **kwargs)
        return bound.executable.trace(bound.abstract_arrays())

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Return shapes, dtypes and shardings of the result."""
        bound = self.bound(*args, **kwargs)
        traced, shapes = bound.traced, bound.traced.out_types
        outs = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            for x, sharding in zip(shapes, bound.executable.out_shardings, strict=True)
        ]
        return bound.result(traced.captured.split(outs)[0])

    def clear_cache(self) -> None:
        """Clear all traces, plans and compiled programs."""
        self._cleared = self._outlines()
        self._last = None
        self._bounds.clear()
        self._plans.clear()

    def _outlines(self) -> dict[str, str]:
        """Return outlines of planned programs by fingerprint, cleared ones too."""
        planned = {name: outline_of(plan) for (name, _), plan in self._plans.items()}
        return {**self._cleared, **planned}

    def __reduce__(self) -> Any:
        """Pickle by name where the function's module has this object, as functions are;
        else as function, options and axes of the mesh, for the devices of the process
        that reads it; without plans and compiled programs."""
        found: Any = sys.modules.get(self.__module__)
        qualified = getattr(self, "__qualname__", "")
        for name in qualified.split("."):
            found = getattr(found, name, None)
        if found is self:
            return qualified
        options = ("hardware", "plan_options", "shows_progress")
        mesh, what = self._mesh, self._what
        axes = dict(mesh.shape) if isinstance(mesh, Mesh) else mesh
        call = self._parameters, self._planner, axes, what, self._plans_itself
        return _unpickled, call, {name: getattr(self, name) for name in options}

    def __copy__(self) -> ShardedFunction[AnyPlan]:
        return self

    def __deepcopy__(self, memo: Any) -> ShardedFunction[AnyPlan]:
        return self

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundMethod(self, instance)

    def __repr__(self) -> str:
        return f"<{self._what} of {self.__name__}, {len(self._bounds)} signatures>"


def _unpickled(
    parameters: Parameters, planner: Planner[Any], mesh: Any, what: str, plans: bool
) -> ShardedFunction[Any]:
    mesh = read_mesh(mesh, what)
    return ShardedFunction(parameters, planner, mesh, what, plans=plans)


def _of_function(name: str) -> Any:
    """Return a method of `ShardedFunction` as one of its bound methods."""

    def method(self: BoundMethod[Any], *args: Any, **kwargs: Any) -> Any:
        return getattr(self.__func__, name)(self.__self__, *args, **kwargs)

    return functools.update_wrapper(method, getattr(ShardedFunction, name))


class BoundMethod(Generic[AnyPlan]):
    """A sharded method bound to its instance; see `ShardedFunction.__get__`."""

    def __init__(self, function: ShardedFunction[AnyPlan], instance: Any) -> None:
        self.__func__, self.__self__ = function, instance
        functools.update_wrapper(self, function)

    def clear_cache(self) -> None:
        self.__func__.clear_cache()

    __call__ = _of_function("__call__")
    plan, lower = _of_function("plan"), _of_function("lower")
    trace, eval_shape = _of_function("trace"), _of_function("eval_shape")


def unbound(fn: Any, args: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """Return a function and its arguments; of a method, its instance is the first."""
    if isinstance(fn, BoundMethod):
        return fn.__func__, (fn.__self__, *args)
    return fn, tuple(args)


def jit_with_plan(
    fn: Callable[..., Any], plan: AnyPlan, **options: Any
) -> ShardedFunction[AnyPlan]:
    """Return `fn` as a function that runs by an existing plan.

    Args:
      fn: the function that was planned, or one that `auto_shard` made.
      plan: its plan; without a mesh, one is made of the present devices.
      options: `donate_argnums`, `donate_argnames`, `static_argnums`,
        `static_argnames`, as in `jax.jit`.
    Raises:
      PlanFileError: on the first call, if the plan is of another program.
    """
    what = "`plan.jit`"
    if isinstance(fn, ShardedFunction) and not options:
        parameters = fn.parameters
    else:
        raw = fn.parameters.fn if isinstance(fn, ShardedFunction) else fn
        parameters = read_parameters(raw, **options, what=what)
    return sharded_by(parameters, plan, what)


def sharded_by(
    parameters: Parameters, plan: AnyPlan, what: str
) -> ShardedFunction[AnyPlan]:
    """Return the function of `parameters` under a plan; see `jit_with_plan`."""
    mesh = plan.mesh if plan.mesh is not None else make_mesh(plan.mesh_axes, what)
    planner = functools.partial(_fitted, plan, what)
    return ShardedFunction(parameters, planner, mesh, what, plans=False)


def _fitted(
    plan: AnyPlan, what: str, traced: Traced, mesh: Any, before: AnyPlan | None
) -> AnyPlan:
    """Return an existing plan, once checked, as a `Planner` does."""
    axes = axes_of_mesh(mesh)
    found = fingerprint(traced.program, axes)
    check_fits(plan, found, axes, program=traced.program, what=what)
    agreed(traced, processes_of_mesh(mesh), plan, what)
    return with_trees(plan, traced, mesh)


def with_trees(plan: AnyPlan, traced: Traced, mesh: Any) -> AnyPlan:
    """Return the plan on a mesh, with the function's trees and source lines."""
    in_tree, in_leaf_positions = traced.in_tree
    out_tree, out_leaf_positions = traced.out_tree
    return replace(
        on_mesh(with_lines(plan, apply_passes(traced, plan.transforms).program), mesh),
        in_tree=in_tree,
        out_tree=out_tree,
        in_leaf_positions=in_leaf_positions,
        out_leaf_positions=out_leaf_positions,
        traced=None if traced.has_captured_tracers else traced,
    )
