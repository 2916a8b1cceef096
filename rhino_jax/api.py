"""The face: `auto_shard` and `plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from rhino_jax.errors import RhinoError
from rhino_jax.explain.results.plan import Plan
from rhino_jax.frontend.parameters import (
    CALLING,
    Parameters,
    check_misspelt,
    read_parameters,
)
from rhino_jax.frontend.tracing.wrappers import check_no_shardings
from rhino_jax.hardware.target import Target
from rhino_jax.plan.files.store import load_plan as load
from rhino_jax.plan.pins.trees import check_pins
from rhino_jax.planner.like import hardware_of_like
from rhino_jax.planner.options import Wishes
from rhino_jax.runtime.meshes import read_mesh
from rhino_jax.runtime.sharded import ShardedFunction


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
    """Make a function that was written for one device run on many.

    Plans once per signature, moves arguments to where the plan wants them, and runs
    one compiled program. Inside of `jit`, `grad` and `vmap`, only constraints are
    placed. Plans are kept on disk (`rhino_jax.plan.files.cache`). Where a mesh is of
    several processes, the first plans for all (`rhino_jax.runtime.processes.agree`):
    they plan the same functions in the same order.

    Args:
      fn: the function; a `jax.jit` or `nnx.jit` object is taken off. Of one that
        `auto_shard` made, hardware, budget, pins and time limit hold where nothing
        else is said here; its mesh and `like`, where neither mesh nor hardware is.
      mesh: a `Mesh`, `AbstractMesh`, or mapping of axis name to size. None: the mesh
        in context (`jax.set_mesh`), or else rhino chooses.
      hardware: name, path of a TOML file, or `Target`; None: the devices present.
      memory_budget_bytes: per device, as 12e9 or "16GiB"; None: what the hardware
        has.
      pins: tree path or glob → PartitionSpec, of arguments and results; or argument
        name → a pytree of them; or all arguments' (`plan.in_specs`). A spec may stand
        for a whole subtree, None pins nothing, and a NamedSharding over the same mesh
        is a spec too. Values inside of the function by source line ("model.py:61") or
        scope ("encoder/layer_*"), or with `rhino.pin`. A number instead of a spec is
        the stage in which what reads an argument, or is on a line or in a scope, runs.
      in_shardings, out_shardings: pins of arguments and results, written as in
        `jax.jit`: pytree prefixes of PartitionSpecs or NamedShardings; None leaves a
        subtree to the planner. `pins` of the same arrays hold before them.
      level: "best" solves the whole at once and reports the gap, "fast" stops at the
        first good plan.
      time_limit_s: wall-clock limit of planning, tracing apart, in seconds, or as
        "2min". To build the model and to read a plan back cannot stop (0.4 s for GPT-2
        small); then the best recipe is taken. A plan that the clock cut says so in
        its notes.
      seed: of the search.
      refine: compile this many of the most promising plans (the best, recipes,
        runners-up), and besides dp, zero1 and fsdp with every activation pinned to
        the batch, as most people type them, where these promise a step at most 30 %
        longer; keep the one that the compiler makes fastest within memory. 0: believe
        the prediction.
      microbatches: into how many parts the batch is cut, which run one after the other
        and whose gradients are added up; results are those of the whole batch. 1: it
        is not. "auto": where the program would not fit, or is faster so; where logits
        of a vocabulary are what is too large, tokens go through the loss alone in
        chunks.
      per_microbatch: where sums over the batch are taken of each micro-batch and not of
        the whole batch, which changes results, as of BatchNorm in other frameworks:
        modules or scopes ("BatchNorm", "encoder/norm_*"), functions ("batch_norm") or
        lines ("model.py:61"), of ops that use such sums. What is updated by them, as
        running statistics, is updated once, by their mean over the micro-batches, so
        that its momentum is that of a step, however many these are.
      recompute: what of the forward pass is made again in the backward pass. "auto":
        what pays, whatever `jax.checkpoint` says; "as written": what `jax.checkpoint`
        says; "none": nothing. In several stages "auto" is as written, and of a stage
        that does not fit so, or fits only by slower layouts, or is faster with less
        that is written and read, the values that pay. Only with "auto" do values wait
        in the host's memory, where the hardware file has `host_bytes_per_s`.
      stages: into how many groups devices are divided, each of which runs a part of
        the model, on one micro-batch after another. "auto": as many as the mesh has by
        an axis named `stage`; without a mesh, those that are fastest, where slow links
        or too little memory say that several may be. `[4, 2, 2]`: groups of so many
        devices, which together are all.
      schedule: in which order stages run their micro-batches: "gpipe", "1f1b", "kfkb";
        "zero-bubble": gradients of weights fill the gaps; "interleaved" and
        "zero-bubble-v": two chunks of the model on each; "searched"; "auto": the
        fastest of these that fits; "one-program" where none does or that is clearly
        faster, in which layers are a scan over stacks [layers, …], of which stages have
        equal parts, and all stages are one compiled program, as of one mesh: for
        `lower` and TPU pods; in the order of "gpipe", and what is in no layer is shared
        by the stages. "token-slices":
        causal sequences pass through the stages slice by slice, forward from the first
        on and back from the last on: for few long ones, a batch of one too ("auto"
        compares it where micro-batches are fewer than stages). Slices are as many and
        as long as is best; "token-slices:4": four; "token-slices:768,640,640": of so
        many tokens.
      storage: "blocks": state may be stored with columns of fused weights `(d, 3·h·k)`,
        `(d, 2·f)` in another order, where steps are faster so; shapes stay. Arrays come
        from `plan.init` and `plan.put`, and `plan.as_written` puts them back in order;
        others are refused. "as written": they keep the order that they have. With
        `like`, as the other has them.
      while_trips: how often `while` loops that data may end run, to plan and to verify
        with: a number for all, or by line ("model.py:61"), function or scope. None:
        the bound that the program has for a loop, else 10.
      like: a function that `auto_shard` made (its last plan counts), or a plan, that
        shares state with this one. The mesh and hardware are the same, and arguments
        of equal tree path and shape, or of equal structure, keep their sharding where
        `pins` say nothing else; and their stage, so that a model that is edited here
        and there is cut where it was. `stages=` with a number has it cut anew; so does
        rhino where it cannot be cut so any more, and a note says why.
      donate_argnums, donate_argnames, static_argnums, static_argnames: as in
        `jax.jit`.
      progress: show a line while planning takes long; or a function that is called
        with (best, bound) in seconds.
      dump: a folder, made if need be; every pass from the program to the plan writes
        there as text what it gives (`rhino_jax.planner.search.passes`).
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
    # A Mesh is callable: it may be a decorator of its own.
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
    wishes = Wishes(what=what, **said)
    if isinstance(fn, ShardedFunction) and isinstance(fn.wishes, Wishes):
        is_elsewhere = mesh is not None or hardware is not None
        mesh = mesh if is_elsewhere else fn.mesh
        wishes = wishes.beside(fn.wishes, is_elsewhere)
    parameters = _parameters(fn, calling, what)
    sharded = ShardedFunction(parameters, wishes.plan, read_mesh(mesh, what), what)
    sharded.wishes = wishes
    sharded.hardware = wishes.hardware
    if sharded.hardware is None:
        sharded.hardware = hardware_of_like(wishes.like)
    return sharded


def _parameters(
    fn: Callable[..., Any], calling: Mapping[str, Any], what: str
) -> Parameters:
    """How `fn` is called; of one that `auto_shard` made, as was said there where
    nothing is said here."""
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
      fn: a function, or what `auto_shard` made of one (then what was said there holds
        where nothing else is said here).
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
