"""The face: `auto_shard` and `plan`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax.sharding import AbstractMesh, Mesh

from rhino_jax.apply.meshes import axes_of_mesh, devices_here, make_mesh, read_mesh
from rhino_jax.apply.sharded import ShardedFunction, with_trees
from rhino_jax.errors import InfeasiblePlanError, PinError, RhinoError, nearest
from rhino_jax.frontend.parameters import read_parameters
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.files import detect_target, load_target
from rhino_jax.hardware.layout import mesh_axis_names, mesh_shapes
from rhino_jax.hardware.target import Target
from rhino_jax.plan.pins import ResolvedPins, resolve_pins
from rhino_jax.plan.plan import Plan
from rhino_jax.report.progress import Progress


if TYPE_CHECKING:
    from rhino_jax.search.candidates import Candidate
    from rhino_jax.search.records import Request


MeshAxes = tuple[tuple[str, int], ...]
LEVELS = ("fast", "best")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user asked for; see `auto_shard`."""

    hardware: str | Path | Target | None
    memory_budget_bytes: int | None
    pins: Mapping[str, Any]
    level: str
    time_limit_s: float | None
    seed: int
    refine: int
    progress: bool | Callable[[float | None, float | None], None]
    what: str

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise RhinoError(
                f"{self.what}: level {self.level!r} is not known."
                + nearest(str(self.level), LEVELS),
                where="level=",
                numbers=f"known: {', '.join(LEVELS)}",
                fix="write level='fast' or level='best'.",
            )
        is_count = isinstance(self.refine, int) and not isinstance(self.refine, bool)
        if not is_count or self.refine < 0:
            raise RhinoError(
                f"{self.what}: refine must be a number of plans to compile.",
                where="refine=",
                numbers=f"got {self.refine!r}",
                fix="leave it out, or write refine=3.",
            )
        for name in ("memory_budget_bytes", "time_limit_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise RhinoError(
                    f"{self.what}: {name} must be positive.",
                    where=f"{name}=",
                    numbers=f"got {value}",
                    fix="leave it out, or give a positive number.",
                )

    def plan(self, traced: Traced, mesh: Any | None) -> Plan:
        """Plan a traced function, on this mesh or on the best that rhino finds."""
        # The solver takes a second to import; who only loads plans need not wait.
        from rhino_jax.search.driver import choose_plan

        target = self._target(mesh)
        if mesh is not None:
            axes = axes_of_mesh(mesh)
            meshes, pins = [axes], resolve_pins(self.pins, traced.program, axes)
        else:
            meshes, pins = self._meshes(traced, target)
        request = self._request(target, pins)
        with self._progress() as report:
            if self.refine > 1:
                found = self._refined(traced, mesh, meshes, target, request, report)
            else:
                found = choose_plan(
                    traced.program, meshes, target, request, progress=report
                )
        if mesh is None:
            mesh = make_mesh(found.mesh_axes, self.what)
        return with_trees(found, traced, mesh)

    def _refined(
        self,
        traced: Traced,
        mesh: Any | None,
        meshes: list[MeshAxes],
        target: Target,
        request: Request,
        report: Callable[[float | None, float | None], None],
    ) -> Plan:
        """The plan that the compiler makes fastest, of the most promising ones."""
        from rhino_jax.search.driver import make_candidates
        from rhino_jax.verify.refine import judge_of, refine

        def candidates(budget_bytes: float, count: int) -> list[Candidate]:
            found = make_candidates(
                traced.program,
                meshes,
                target,
                replace(request, memory_budget_bytes=budget_bytes),
                count,
                progress=report,
            )
            if mesh is None:
                return list(found)
            return [replace(c, plan=replace(c.plan, mesh=mesh)) for c in found]

        def within(budget_bytes: int) -> Candidate | None:
            try:
                return replace(candidates(budget_bytes, 1)[0], name="less memory")
            except InfeasiblePlanError:
                return None

        budget_bytes = request.memory_budget_bytes
        return refine(
            candidates(budget_bytes, self.refine),
            judge_of(traced, self.what, target),
            int(budget_bytes),
            within,
        )

    def _target(self, mesh: Any | None) -> Target:
        if self.hardware is not None:
            return load_target(self.hardware)
        if isinstance(mesh, Mesh):
            return detect_target(list(mesh.devices.flat))
        return detect_target(devices_here(self.what))

    def _request(self, target: Target, pins: ResolvedPins) -> Request:
        from rhino_jax.search.records import Request

        budget = self.memory_budget_bytes
        return Request(
            memory_budget_bytes=target.hbm_bytes if budget is None else budget,
            pins=pins.inputs,
            output_pins=pins.outputs,
            level=self.level,
            time_limit_s=self.time_limit_s,
            seed=self.seed,
        )

    def _meshes(
        self, traced: Traced, target: Target
    ) -> tuple[list[MeshAxes], ResolvedPins]:
        """The meshes to compare: those on which all pins hold."""
        count = target.num_devices or len(devices_here(self.what))
        meshes: list[MeshAxes] = []
        resolved: ResolvedPins | None = None
        error: PinError | None = None
        for shape in mesh_shapes(target, count):
            axes = tuple(zip(mesh_axis_names(target, len(shape)), shape, strict=True))
            try:
                resolved = resolve_pins(self.pins, traced.program, axes)
            except PinError as failed:
                # The last has the most axes, so what it says is the most useful.
                error = failed
                continue
            meshes.append(axes)
        if resolved is None:
            assert error is not None
            raise error
        return meshes, resolved

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Callable[[float | None, float | None], None]]:
        if callable(self.progress):
            yield self.progress
            return
        with Progress(is_enabled=bool(self.progress)) as shown:
            yield shown.update


def auto_shard(
    fn: Callable[..., Any] | None = None,
    *,
    mesh: Any = None,
    hardware: str | Path | Target | None = None,
    memory_budget_bytes: int | None = None,
    pins: Mapping[str, Any] | None = None,
    level: str = "best",
    time_limit_s: float | None = None,
    seed: int = 0,
    refine: int = 0,
    donate_argnums: int | Iterable[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    static_argnums: int | Iterable[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    progress: bool | Callable[[float | None, float | None], None] = True,
) -> Any:
    """Make a function that was written for one device run on many.

    Plans once per signature, moves arguments to where the plan wants them, and runs
    one compiled program. Inside of `jit`, `grad` and `vmap`, only constraints are
    placed.

    Args:
      fn: the function; a `jax.jit` object is taken off.
      mesh: a `Mesh`, `AbstractMesh`, or mapping of axis name to size. None: the mesh
        in context (`jax.set_mesh`), or else rhino chooses.
      hardware: name, path of a TOML file, or `Target`; None: the devices present.
      memory_budget_bytes: per device; None: what the hardware has.
      pins: tree path or glob → PartitionSpec, of arguments and results.
      level: "best" solves the whole at once and reports the gap, "fast" stops at the
        first good plan.
      time_limit_s: wall-clock limit of the search, in seconds.
      seed: of the search.
      refine: compile this many of the most promising plans (the best, recipes,
        runners-up) and keep the one that the compiler makes fastest within memory;
        0: believe the prediction.
      donate_argnums, donate_argnames, static_argnums, static_argnames: as in
        `jax.jit`.
      progress: show a line while planning takes long; or a function that is called
        with (best, bound) in seconds.
    Returns:
      The sharded function; without `fn`, a decorator.
    Raises:
      MeshError, PinError, HardwareError, InfeasiblePlanError, TraceError.
    Example:
      >>> @auto_shard(donate_argnums=(0, 1))
      ... def train_step(params, opt_state, batch): ...
    """
    what = "`auto_shard`"
    if fn is None:
        keywords = {k: v for k, v in locals().items() if k not in ("fn", "what")}
        return lambda fn: auto_shard(fn, **keywords)
    # A Mesh is callable: it may be a decorator of its own.
    if not callable(fn) or isinstance(fn, Mesh | AbstractMesh):
        raise RhinoError(
            f"{what}: this cannot be called.",
            where="the first argument",
            numbers=f"got {type(fn).__name__}",
            fix="decorate a function; give the mesh as auto_shard(mesh=mesh).",
        )
    wishes = Wishes(
        hardware=hardware,
        memory_budget_bytes=memory_budget_bytes,
        pins=dict(pins or {}),
        level=level,
        time_limit_s=time_limit_s,
        seed=seed,
        refine=refine,
        progress=progress,
        what=what,
    )
    given = (donate_argnums, donate_argnames, static_argnums, static_argnames)
    if isinstance(fn, ShardedFunction) and given == (None,) * 4:
        parameters = fn.parameters
    else:
        parameters = read_parameters(
            fn.parameters.fn if isinstance(fn, ShardedFunction) else fn,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            what=what,
        )
    return ShardedFunction(parameters, wishes.plan, read_mesh(mesh, what), what)


def plan(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Any = None,
    hardware: str | Path | Target | None = None,
    memory_budget_bytes: int | None = None,
    pins: Mapping[str, Any] | None = None,
    level: str = "best",
    time_limit_s: float | None = None,
    seed: int = 0,
    refine: int = 0,
    donate_argnums: int | Iterable[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    static_argnums: int | Iterable[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    progress: bool | Callable[[float | None, float | None], None] = True,
    **kwargs: Any,
) -> Plan:
    """Plan `fn(*args, **kwargs)`; allocates and runs nothing.

    Args:
      fn: a function, or what `auto_shard` made of one.
      args, kwargs: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them.
      Others: see `auto_shard`.
    Raises:
      MeshError, PinError, HardwareError, InfeasiblePlanError, TraceError.
    """
    sharded = auto_shard(
        fn,
        mesh=mesh,
        hardware=hardware,
        memory_budget_bytes=memory_budget_bytes,
        pins=pins,
        level=level,
        time_limit_s=time_limit_s,
        seed=seed,
        refine=refine,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        progress=progress,
    )
    return sharded.plan(*args, **kwargs)


def load_plan(path: str | PathLike[str]) -> Plan:
    """Read a plan that `plan.save` wrote.

    Raises:
      PlanFileError: the file is missing, damaged, or of another version.
    """
    from rhino_jax.plan.store import load_plan as load

    return load(path)
