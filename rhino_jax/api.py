"""The entry points: `auto_shard`, `plan`, `plan_together`, `audit`, `load_plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, cast

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
from rhino_jax.hardware.target import Target
from rhino_jax.plan.files.store import load_plan as load
from rhino_jax.plan.pins.trees import check_pins
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.shared import Plans
from rhino_jax.planner.joint.together import planned_together
from rhino_jax.planner.like import hardware_of_like
from rhino_jax.planner.options import PlanOptions
from rhino_jax.runtime.meshes import read_mesh
from rhino_jax.runtime.sharded import Planner, ShardedFunction
from rhino_jax.verify.by_hand.audit import audit as audited
from rhino_jax.verify.results.audit import Audit


def auto_shard(
    fn: Callable[..., Any] | None = None,
    *,
    mesh: Any = None,
    hardware: str | Path | Target | None = None,
    memory_budget_bytes: float | str | None = None,
    pins: Any = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    level: str = "best",
    time_limit_s: float | str | None = None,
    seed: int = 0,
    refine: int = 0,
    microbatches: int | str = "auto",
    per_microbatch: str | Sequence[str] = (),
    recompute: str = "auto",
    stages: int | str | Sequence[int] = "auto",
    schedule: str = "auto",
    storage: str = "as written",
    while_trips: int | Mapping[str, int] | None = None,
    like: ShardedFunction | Plan | None = None,
    donate_argnums: int | Iterable[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    static_argnums: int | Iterable[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    progress: bool | Callable[[float | None, float | None], None] = True,
    dump: str | PathLike[str] | None = None,
) -> Any:
    """Shard a function that was written for one device over many.

    Plans once per signature, moves arguments to the plan's shardings, and runs one
    compiled program. Inside of `jit`, `grad` and `vmap`, only constraints are placed.
    Plans are cached on disk (`rhino_jax.plan.files.cache`). For a mesh of several
    processes, the first plans for all (`rhino_jax.runtime.processes.agree`): all
    processes plan the same functions in the same order.

    Args:
      fn: the function; a `jax.jit` or `nnx.jit` object is unwrapped. If it is a result
        of `auto_shard`, its hardware, budget, pins and time limit are the defaults
        here; its mesh and `like` as well, if neither mesh nor hardware is given here.
      mesh: a `Mesh`, `AbstractMesh`, or mapping of axis name to size. None: the mesh in
        context (`jax.set_mesh`), or else rhino chooses.
      hardware: name, path of a TOML file, or `Target`; None: the devices present.
      memory_budget_bytes: per device, as 12e9 or "16GiB"; None: the memory of the
        hardware.
      pins: tree path or glob → PartitionSpec, of arguments and results; or argument
        name → a pytree of them; or all arguments' (`plan.in_specs`). A spec may be
        given for a whole subtree, None pins nothing, and a NamedSharding over the same
        mesh counts as a spec. Values inside of the function are pinned by source line
        ("model.py:61") or scope ("encoder/layer_*"), or with `rhino.pin`. A number
        instead of a spec is the stage of the ops that read an argument, or that are on
        a line or in a scope.
      in_shardings, out_shardings: pins of arguments and results, written as in
        `jax.jit`: pytree prefixes of PartitionSpecs or NamedShardings; None leaves a
        subtree to the planner. `pins` of the same arrays take precedence.
      level: "best" solves the whole at once and reports the gap, "fast" stops at the
        first good plan.
      time_limit_s: wall-clock limit of planning, without tracing, in seconds, or as
        "2min". Building the model and reading a plan cannot be interrupted (0.4 s for
        GPT-2 small); the best recipe is taken then. The notes of a plan say if the
        limit stopped its search.
      seed: seed of the search.
      refine: compile this many of the most promising plans (the best, recipes,
        runners-up), and in addition dp, zero1 and fsdp with every activation pinned to
        the batch, as most people type them, if their predicted step is at most 30 %
        longer; choose the one with the fastest compiled step within memory. 0: rely on
        the prediction.
      microbatches: number of micro-batches of a batch, run one after the other with
        accumulated gradients; results are those of the whole batch. 1: no
        micro-batches. "auto": if the program would not fit, or is faster with them; if
        the logits of a vocabulary are what does not fit, the loss alone is computed in
        chunks of tokens.
      per_microbatch: ops whose sums over the batch are taken of each micro-batch
        instead of the whole batch, which changes results, as of BatchNorm in other
        frameworks: modules or scopes ("BatchNorm", "encoder/norm_*"), functions
        ("batch_norm") or lines ("model.py:61") of ops that use such sums. State that
        they update, such as running statistics, is updated once, by the mean over the
        micro-batches, so that its momentum is that of a step, whatever their number.
      recompute: rematerialization of forward values in the backward pass. "auto": what
        pays, regardless of `jax.checkpoint`; "as written": as `jax.checkpoint`
        specifies; "none": no remat. In several stages "auto" is as written; in a stage
        that does not fit so, or fits only with slower layouts, or is faster with less
        memory traffic, the values that pay are recomputed. Only with "auto" are values
        offloaded to host memory, if the hardware file has `host_bytes_per_s`.
      stages: number of submeshes into which devices are divided, each of which runs a
        part of the model, on one micro-batch after another. "auto": the size of the
        mesh axis named `stage`; without a mesh, the fastest number, if slow links or
        too little memory suggest several. `[4, 2, 2]`: submeshes of these numbers of
        devices, which together are all.
      schedule: order in which stages run their micro-batches: "gpipe", "1f1b", "kfkb";
        "zero-bubble": gradients of weights fill the bubbles; "interleaved" and
        "zero-bubble-v": two chunks of the model on each stage; "searched"; "auto": the
        fastest of these that fits; "one-program" if none does or if it is clearly
        faster. "one-program" is an SPMD pipeline: layers are a scan over stacks
        [layers, …], of which stages have equal parts, and all stages are one compiled
        program on one mesh, for `lower` and TPU pods; in the order of "gpipe", with ops
        outside of the layers shared by the stages. "token-slices": sequence slices of
        causal sequences pass through the stages one after the other (TeraPipe), forward
        from the first one and backward from the last: for few long sequences, and a
        batch of one ("auto" compares it if micro-batches are fewer than stages). Their
        number and lengths are chosen; "token-slices:4": four;
        "token-slices:768,640,640": slices of these numbers of tokens.
      storage: "blocks": interleaved storage: state may be stored with columns of fused
        weights `(d, 3·h·k)`, `(d, 2·f)` in another order, if steps are faster so;
        shapes stay. Arrays come from `plan.init` and `plan.put`, and `plan.as_written`
        restores their order; other arrays are refused. "as written": arrays keep their
        order. With `like`, as in the other plan.
      while_trips: trip counts of `while` loops with a data-dependent end, for planning
        and verification: a number for all, or by line ("model.py:61"), function or
        scope. None: the program's own bound of a loop, else 10.
      like: a result of `auto_shard` (its last plan counts), or a plan, that shares
        state with this one. The mesh and hardware are the same, and arguments of equal
        tree path and shape, or of equal structure, keep their sharding unless `pins`
        specify another; and their stage, so that a model that was edited in places has
        the same stage cuts. A number for `stages=` chooses new cuts; so does rhino if
        the old cuts are not possible any more, and a note says why.
      donate_argnums, donate_argnames, static_argnums, static_argnames: as in `jax.jit`.
      progress: show a line while planning takes long; or a function that is called with
        (best, bound) in seconds.
      dump: a folder, created if needed, to which every pass from the program to the
        plan writes its result as text (`rhino_jax.planner.search.passes`).

    Returns:
      The sharded function; without `fn`, a decorator.

    Raises:
      MeshError, PinError, HardwareError, InfeasiblePlanError, MicrobatchError,
        ScheduleError, StageError, TraceError, ProcessError.

    Example:
      >>> @auto_shard(donate_argnums=(0, 1))
      ... def train_step(params, opt_state, batch): ...
    """
    said = {k: v for k, v in locals().items() if k != "fn"}
    if fn is None:
        return lambda fn: auto_shard(fn, **said)
    what = "`auto_shard`"
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
    said["pins"] = check_pins(what, pins, *shardings)
    plan_options = PlanOptions(what=what, **said)
    if isinstance(fn, ShardedFunction) and isinstance(fn.plan_options, PlanOptions):
        is_elsewhere = mesh is not None or hardware is not None
        mesh = mesh if is_elsewhere else fn.mesh
        plan_options = plan_options.beside(fn.plan_options, is_elsewhere)
    parameters = _parameters(fn, calling, what)

    planner = _planner(plan_options)
    sharded = ShardedFunction(parameters, planner, read_mesh(mesh, what), what)
    sharded.plan_options = plan_options
    sharded.shows_progress = plan_options.progress is True
    sharded.hardware = plan_options.hardware
    if sharded.hardware is None:
        sharded.hardware = hardware_of_like(plan_options.like)
    return sharded


def _planner(options: PlanOptions) -> Planner[Plan]:
    def plan(traced: Traced, mesh: Any, before: PlanData | None) -> Plan:
        return Plan.of(options.plan(traced, mesh, before))

    return plan


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


def plan(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Any = None,
    hardware: str | Path | Target | None = None,
    memory_budget_bytes: float | str | None = None,
    pins: Any = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    level: str = "best",
    time_limit_s: float | str | None = None,
    seed: int = 0,
    refine: int = 0,
    microbatches: int | str = "auto",
    per_microbatch: str | Sequence[str] = (),
    recompute: str = "auto",
    stages: int | str | Sequence[int] = "auto",
    schedule: str = "auto",
    storage: str = "as written",
    while_trips: int | Mapping[str, int] | None = None,
    like: ShardedFunction | Plan | None = None,
    donate_argnums: int | Iterable[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    static_argnums: int | Iterable[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    progress: bool | Callable[[float | None, float | None], None] = True,
    dump: str | PathLike[str] | None = None,
    **kwargs: Any,
) -> Plan:
    """Plan `fn(*args, **kwargs)`; allocates and runs nothing.

    Args:
      fn: a function, or the result of `auto_shard` for one, whose options are the
        defaults here.
      args, kwargs: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them.
      Others: see `auto_shard`.

    Raises:
      MeshError, PinError, HardwareError, InfeasiblePlanError, TraceError.
    """
    said = {k: v for k, v in locals().items() if k not in ("fn", "args", "kwargs")}
    check_misspelt("`rhino.plan`", fn, kwargs, said)
    return auto_shard(fn, **said).plan(*args, **kwargs)


def load_plan(path: str | PathLike[str]) -> Plan:
    """Read a plan that `plan.save` wrote.

    Raises:
      PlanFileError: the file is missing, damaged, or of another version.
    """
    return Plan.of(load(path))


def plan_together(
    programs: Mapping[str, Sequence[Any]],
    *,
    weights: Mapping[str, float] | None = None,
    mesh: Any = None,
    hardware: str | Path | Target | None = None,
    memory_budget_bytes: int | str | None = None,
    pins: Mapping[str, Any] | None = None,
    level: str = "best",
    time_limit_s: float | str | None = None,
    seed: int = 0,
    progress: bool | Callable[[float | None, float | None], None] = True,
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
    options = {k: v for k, v in locals().items() if k != "programs"}
    found = planned_together(programs, **options)
    plans = {name: Plan.of(data) for name, data in found.items()}
    return cast("Plans[Plan]", replace(found, plans=plans))


def audit(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Any = None,
    hardware: str | Path | Target | None = None,
    memory_budget_bytes: float | str | None = None,
    pins: Any = None,
    level: str = "best",
    time_limit_s: float | str | None = None,
    seed: int = 0,
    refine: int = 0,
    microbatches: int | str = "auto",
    per_microbatch: str | Sequence[str] = (),
    recompute: str = "auto",
    while_trips: int | Mapping[str, int] | None = None,
    donate_argnums: int | Iterable[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    static_argnums: int | Iterable[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    progress: bool | Callable[[float | None, float | None], None] = True,
    **kwargs: Any,
) -> Audit[Plan]:
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
    said = {k: v for k, v in locals().items() if k not in ("fn", "args", "kwargs")}
    mesh, calling = said.pop("mesh"), {k: said.pop(k) for k in CALLING}
    plan_options = PlanOptions(what="`rhino.audit`", **said)
    budget = plan_options.memory_budget_bytes
    return audited(
        fn,
        args,
        kwargs,
        _planner(plan_options),
        mesh=mesh,
        hardware=hardware,
        memory_budget_bytes=budget,
        **calling,
    )
