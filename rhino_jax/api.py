"""The entry points: `auto_shard`, `plan`, `plan_together`, `audit`, `load_plan`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, Unpack, cast

from jax.sharding import AbstractMesh, Mesh

from rhino_jax.errors import RhinoError
from rhino_jax.explain.plan import Plan
from rhino_jax.frontend.parameters import (
    CALLING,
    Parameters,
    check_misspelt,
    check_no_shardings,
    read_parameters,
)
from rhino_jax.frontend.trace import Traced
from rhino_jax.options import (
    DEFAULTS,
    UserOptions,
    split_options,
    with_options,
    with_options_of_call,
)
from rhino_jax.plan.files.store import load_plan as load
from rhino_jax.plan.pin_trees import check_pins
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.shared import Plans
from rhino_jax.planner.joint import planned_together
from rhino_jax.planner.options import PlanOptions
from rhino_jax.planner.origin import hardware_of_like
from rhino_jax.runtime.meshes import read_mesh
from rhino_jax.runtime.sharded import ShardedFunction
from rhino_jax.verify.audit import audit as audited
from rhino_jax.verify.results.audit import Audit


@with_options(*DEFAULTS)
def auto_shard(
    fn: Callable[..., Any] | None = None, **options: Unpack[UserOptions]
) -> Any:
    """Shard a function that was written for one device over many.

    Plans once per signature, moves arguments to the plan's shardings, and runs one
    compiled program. Inside of `jit`, `grad` and `vmap`, only constraints are placed.
    Plans are cached on disk (`rhino_jax.plan.files.cache`). For a mesh of several
    processes, the first plans for all (`rhino_jax.runtime.processes.agree`): all
    processes plan the same functions in the same order.

    Args:
      fn: the function; a `jax.jit` or `nnx.jit` object is unwrapped. If it is a result
        of `auto_shard`, its options are the defaults here, but for `progress` and
        `dump`; its mesh and `like` only if neither mesh nor hardware is given here.
      **options: options.

    Returns:
      The sharded function; without `fn`, a decorator.

    Raises:
      MeshError, PinError, HardwareError, InfeasiblePlanError, MicrobatchError,
        ScheduleError, StageError, TraceError, ProcessError.

    Example:
      >>> @auto_shard(donate_argnums=(0, 1))
      ... def train_step(params, opt_state, batch): ...
    """
    said, _ = split_options(auto_shard, options)
    if fn is None:
        return lambda fn: auto_shard(fn, **options)
    return _sharded(fn, said, "`auto_shard`")


def _sharded(fn: Any, said: dict[str, Any], what: str) -> ShardedFunction[Plan]:
    """Return a function under the options of `auto_shard`.

    Args:
      fn: the function, as in `auto_shard`.
      said: the options; emptied of those that `PlanOptions` does not have.
      what: name of the calling API, for messages.
    """
    # A Mesh is callable, as it may be used as a decorator.
    if not callable(fn) or isinstance(fn, Mesh | AbstractMesh):
        raise RhinoError(
            f"{what}: this cannot be called.",
            where="the first argument",
            numbers=f"got {type(fn).__name__}",
            fix="decorate a function; give the mesh as auto_shard(mesh=mesh).",
        )
    mesh, calling = said.pop("mesh"), {k: said.pop(k) for k in CALLING}
    shardings = said.pop("in_shardings"), said.pop("out_shardings")
    said["pins"] = check_pins(what, said["pins"], *shardings)
    plan_options = PlanOptions(what=what, **said)
    if isinstance(fn, ShardedFunction) and isinstance(fn.plan_options, PlanOptions):
        is_elsewhere = mesh is not None or said["hardware"] is not None
        mesh = mesh if is_elsewhere else fn.mesh
        plan_options = plan_options.beside(fn.plan_options, is_elsewhere)
    parameters = _parameters(fn, calling, what)

    planner = functools.partial(_planned, plan_options)
    sharded = ShardedFunction(parameters, planner, read_mesh(mesh, what), what)
    sharded.plan_options = plan_options
    sharded.shows_progress = plan_options.progress is True
    sharded.hardware = plan_options.hardware
    if sharded.hardware is None:
        sharded.hardware = hardware_of_like(plan_options.like)
    return sharded


def _planned(
    options: PlanOptions, traced: Traced, mesh: Any, before: PlanData | None
) -> Plan:
    return Plan.of(options.plan(traced, mesh, before))


def _parameters(
    fn: Callable[..., Any], calling: Mapping[str, Any], what: str
) -> Parameters:
    """Return the signature of `fn` with its static and donated arguments.

    A result of `auto_shard` keeps its own if none are given here.
    """
    nothing_said = all(given is None for given in calling.values())
    if isinstance(fn, ShardedFunction) and nothing_said:
        return fn.parameters
    check_no_shardings(fn, what)
    written = fn.parameters.fn if isinstance(fn, ShardedFunction) else fn
    return read_parameters(written, what=what, **calling)


@with_options_of_call(*DEFAULTS)
def plan(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Plan:
    """Plan `fn(*args, **kwargs)`; allocates and runs nothing.

    Args:
      fn: a function, or the result of `auto_shard` for one, whose options are the
        defaults here.
      args, kwargs: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them.
      Others: see `auto_shard`.

    Raises:
      MeshError, PinError, HardwareError, InfeasiblePlanError, TraceError.
    """
    options, kwargs = split_options(plan, kwargs)
    check_misspelt("`rhino.plan`", fn, kwargs, options)
    return _sharded(fn, options, "`rhino.plan`").plan(*args, **kwargs)


def load_plan(path: str | PathLike[str]) -> Plan:
    """Read a plan that `plan.save` wrote.

    Raises:
      PlanFileError: the file is missing, damaged, or of another version.
    """
    return Plan.of(load(path))


NOT_OF_AUDITS = (
    "in_shardings",
    "out_shardings",
    "stages",
    "schedule",
    "storage",
    "like",
    "dump",
)
"""UserOptions that plan something other than the audited program on its mesh."""


class TogetherOptions(UserOptions, total=False):
    """Options of `rhino.plan_together`, which `plan_together` describes."""

    weights: Mapping[str, float] | None


@with_options(
    "weights",
    *("mesh", "hardware", "memory_budget_bytes", "pins"),
    *("level", "time_limit_s", "seed", "progress"),
    own={
        "weights": "Mapping[str, float] | None",
        "memory_budget_bytes": "int | str | None",
        "pins": "Mapping[str, Any] | None",
    },
)
def plan_together(
    programs: Mapping[str, Sequence[Any]], **options: Unpack[TogetherOptions]
) -> Plans[Plan]:
    """Plan programs that share state as one problem; allocates and runs nothing.

    Arguments of equal tree path and shape (or of equal structure, where that is
    unambiguous) have one sharding in all programs, and there is one mesh. The objective
    is the weighted sum of the programs' step times. While one program runs, the state
    that the others need later stays allocated: all but the last argument of each,
    unless it is fed back. Where no mesh is given, meshes of one and two axes are
    compared.

    Args:
      programs: name → (function, args) or (function, args, kwargs), arrays or
        `jax.ShapeDtypeStruct`s. Donated and static arguments are declared by `jax.jit`
        or `auto_shard` around the function; all other options of `auto_shard` (mesh,
        pins, budget) are given here instead.
      weights: name → how often it runs, relative to the others; 1 where a name is
        absent.
      pins: name → pins of that program, as for `auto_shard`.
      Others: see `auto_shard`.
    Returns:
      A mapping of name to `Plan`; `print` it to read it.
    Raises:
      RhinoError: `programs` or `weights` are not understood.
      MeshError, PinError, HardwareError, InfeasiblePlanError, TraceError.
    Example:
      >>> plans = rhino.plan_together(
      ...     {"train": (train_step, (params, opt_state, batch)),
      ...      "eval": (evaluate, (params, batch))},
      ...     weights={"train": 10, "eval": 1})
      >>> evaluate = plans["eval"].jit(evaluate)
    """
    said, _ = split_options(plan_together, options)
    found = planned_together(programs, **said)
    plans = {name: Plan.of(data) for name, data in found.items()}
    return cast("Plans[Plan]", replace(found, plans=plans))


@with_options_of_call(
    *(name for name in DEFAULTS if name not in NOT_OF_AUDITS),
)
def audit(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Audit[Plan]:
    """Compare a program that its user sharded by hand with rhino's plan of it.

    Compiles `fn(*args, **kwargs)` as it is and reads the HLO back: every collective
    with its source line, and the cost of each line. Then plans the same function,
    without its user's sharding annotations, for the same mesh, and compiles that too.
    Allocates and runs nothing; the hardware need not be there (`rhino.compile_target`).

    Args:
      fn: a `jax.jit` object, or a function. Constraints and `shard_map` inside are
        compiled as they are; in rhino's plan the constraints are left out.
      args, kwargs: arrays or `jax.ShapeDtypeStruct`s, or pytrees of them, with
        `NamedSharding`s.
      mesh: a mesh with devices, or a compile-only one; set as the mesh in context while
        `fn` is traced, and arguments that are sharded over a mesh with the same axes
        are moved to it. None: the mesh of the arguments, of `in_shardings`, or in
        context.
      donate_argnums, donate_argnames, static_argnums, static_argnames: as in `jax.jit`;
        a `jax.jit` object has its own.
      Others: options of rhino's plan, see `auto_shard`.
    Returns:
      The audit. A program that does not fit is a result too.
    Raises:
      MeshError: there is no mesh, or there are several.
      RhinoError: `fn` is sharded by rhino.
    Example:
      >>> found = rhino.audit(train_step, params, batch)  # doctest: +SKIP
      >>> found.costs[0].source, found.gain  # doctest: +SKIP
    """
    said, kwargs = split_options(audit, kwargs)
    mesh, calling = said.pop("mesh"), {k: said.pop(k) for k in CALLING}
    plan_options = PlanOptions(what="`rhino.audit`", **said)
    return audited(
        fn,
        args,
        kwargs,
        functools.partial(_planned, plan_options),
        mesh=mesh,
        hardware=plan_options.hardware,
        memory_budget_bytes=plan_options.memory_budget_bytes,
        **calling,
    )
