"""Audit a program that its user sharded by hand, and compare it with rhino's plan.

The program is compiled unchanged and its HLO is read. Then rhino plans the same
function, without its user's shardings, on the same mesh; both are judged by their
compiled programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import AxisType

from rhino_jax.errors import InfeasiblePlanError, RhinoError
from rhino_jax.frontend.call import split_call
from rhino_jax.frontend.parameters import Parameters, read_parameters
from rhino_jax.frontend.trace import trace_call
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.records import Predicted
from rhino_jax.runtime.meshes import axes_of_mesh
from rhino_jax.runtime.sharded import BoundMethod, Planner, ShardedFunction
from rhino_jax.runtime.with_plan import sharded_by
from rhino_jax.verify.by_hand.culprits import (
    Culprits,
    SourceCost,
    costs_of,
    culprits_of,
)
from rhino_jax.verify.by_hand.hand_sharded import (
    HandSharded,
    axes_in,
    read_by_hand,
    sharded_ops,
    without_constraints,
)
from rhino_jax.verify.hlo.collectives.repeated_sums import RepeatedSum, by_compiler
from rhino_jax.verify.hlo.reading import read_compiled
from rhino_jax.verify.hlo.records import CompiledCollective, MemoryUse, OutOfMemory
from rhino_jax.verify.places import CompilePlace, place_on
from rhino_jax.verify.verification import VerificationData, verification_of


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditData:
    """Cost and memory use of a hand-sharded program, next to rhino's plan.

    Attributes:
      program_name: name of the audited function.
      mesh_axes: (name, size) of every mesh axis, major first.
      platform: platform that the program was compiled for: "cpu", "tpu" or "gpu".
      hardware: name of the target whose rates turn compiled work into seconds.
      memory_budget_bytes: memory budget, bytes per device.
      compiled: step time, peak memory and FLOPs of the unchanged program; None where it
        does not fit.
      collectives: collectives of the unchanged program, most seconds first.
      memory: the compiler's memory statistics; None where the program does not fit.
      costs: communication cost of each source line, most seconds first.
      out_of_memory: the compiler's error that the program does not fit, or None.
      rematerialised: the compiler's messages on values that it replicated in full.
      plan: rhino's plan of the same function; None where there is none.
      rhino: verification of that plan, compiled for the same mesh; None without a plan.
      notes: notes for the user, one sentence each.
      seconds: wall time of compiling the unchanged program.
    """

    program_name: str
    mesh_axes: tuple[tuple[str, int], ...]
    platform: str
    hardware: str
    memory_budget_bytes: int
    compiled: Predicted | None
    collectives: tuple[CompiledCollective, ...]
    memory: MemoryUse | None
    costs: tuple[SourceCost, ...]
    out_of_memory: OutOfMemory | None
    rematerialised: tuple[str, ...]
    plan: PlanData | None
    rhino: VerificationData | None
    notes: tuple[str, ...]
    seconds: float

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device puts on the wire per step."""
        return sum(c.bytes for c in self.collectives)

    @property
    def gain(self) -> float | None:
        """Compiled step time of the unchanged program ÷ that of rhino's plan.

        Above 1, rhino's is faster; infinite where only rhino's fits, 0 where only the
        user's does; None where neither does or there is no plan.
        """
        ours = None if self.rhino is None else self.rhino.compiled
        if self.compiled is None:
            return None if ours is None else float("inf")
        if ours is None:
            return None if self.rhino is None else 0.0
        if not ours.step_time_s:
            return 1.0 if not self.compiled.step_time_s else float("inf")
        return self.compiled.step_time_s / ours.step_time_s


def audit(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    planner: Planner,
    *,
    mesh: Any,
    hardware: Any,
    memory_budget_bytes: int | None,
    **calling: Any,
) -> AuditData:
    """Compile a hand-sharded program unchanged and compare it with rhino's plan.

    See `rhino.audit`, which documents the arguments.

    Args:
      fn: the function, or its `jax.jit` object.
      args: positional arguments: arrays or `jax.ShapeDtypeStruct`s, or pytrees of them.
      kwargs: keyword arguments, likewise.
      planner: plans the function without its user's shardings.
      mesh: mesh to compile for; None: the mesh that the arguments or `jax.jit` name.
      hardware: target, or its name, whose rates turn work into seconds; None: detected
        from the devices.
      memory_budget_bytes: bytes per device; None: the target's HBM.
      calling: donated and static arguments, as for `read_parameters`.
    """
    what = "`rhino.audit`"
    if isinstance(fn, ShardedFunction | BoundMethod):
        raise RhinoError(
            f"{what}: this function is sharded by rhino, not by hand.",
            where=f"`{getattr(fn, '__name__', type(fn).__name__)}`",
            fix="call fn.plan(*args).verify(fn, *args); or audit the plain function.",
        )
    parameters = read_parameters(fn, what=what, **calling)
    program = read_by_hand(fn, parameters, args, kwargs, mesh=mesh, what=what)
    axes = axes_of_mesh(program.mesh)
    place = place_on(program.mesh, hardware)
    compilation = place.compile(program.lowered)
    is_out = compilation.out_of_memory is not None
    found, verified, notes = _with_rhino(program, parameters, planner, place)
    loops = () if found is None else found.while_loops
    reading = read_compiled(compilation, axes, place.target, while_loops=loops)
    collectives = tuple(
        sorted(reading.collectives, key=lambda c: (-c.seconds, -c.bytes))
    )
    budget = place.target.hbm_bytes
    return AuditData(
        program_name=parameters.name,
        mesh_axes=axes,
        platform=compilation.platform,
        hardware=place.target.name,
        memory_budget_bytes=budget
        if memory_budget_bytes is None
        else memory_budget_bytes,
        compiled=None if is_out else reading.compiled,
        collectives=collectives,
        memory=compilation.memory,
        costs=costs_of(
            collectives,
            reading.rematerialised,
            _culprits(program, parameters, what),
        ),
        out_of_memory=compilation.out_of_memory,
        rematerialised=reading.rematerialised,
        plan=found,
        rhino=verified,
        notes=(
            *map(_wrong_numbers, by_compiler(reading.repeated_sums)),
            *reading.notes,
            *notes,
        ),
        seconds=compilation.seconds,
    )


def _wrong_numbers(found: RepeatedSum) -> str:
    return (
        f"wrong numbers: {found} Another sharding of this op, by"
        " `with_sharding_constraint` on its operands and result, avoids it."
    )


def _culprits(program: HandSharded, parameters: Parameters, what: str) -> Culprits:
    """Index the user's own shardings, to find those that cause collectives."""
    call = split_call(parameters, program.args, program.kwargs, what)
    traced = trace_call(parameters, call, mesh=program.mesh, what=what)
    leaves = call.leaves
    return culprits_of(
        traced.program,
        traced.closed_jaxpr,
        {
            path: axes_in(x.sharding.spec)
            for path, x in zip(leaves.array_paths, leaves.arrays, strict=True)
            if getattr(x, "sharding", None) is not None
        },
    )


def _with_rhino(
    program: HandSharded, parameters: Parameters, planner: Planner, place: CompilePlace
) -> tuple[PlanData | None, VerificationData | None, list[str]]:
    """Plan the same function on the same mesh and compile it.

    Returns rhino's plan, its verification (both None where there is no plan), and
    notes.
    """
    free = replace(parameters, fn=without_constraints(parameters.fn))
    sharded = ShardedFunction(free, planner, program.mesh, "`rhino.audit`")
    try:
        plan = sharded.plan(*program.args, **program.kwargs)
    except InfeasiblePlanError as error:
        return None, None, [f"rhino has no plan that fits: {error.what}"]
    except ValueError as error:
        # A function that names Explicit axes cannot be traced on Auto ones.
        if AxisType.Explicit not in program.mesh.axis_types:
            raise
        first = str(error).splitlines()[0]
        return None, None, [f"rhino plans on Auto axes, where JAX says: {first}"]
    as_planned = sharded_by(free, plan, "`rhino.audit`")
    lowered = as_planned.lower(*program.args, **program.kwargs)
    notes = []
    manual = sharded_ops(lowered.bound.traced.program).get("shard_map", 0)
    if manual:
        notes.append(
            f"{manual} shard_map calls stay as their user wrote them; rhino plans"
            " around them."
        )
    compilation = place.compile(lowered.lowered)
    return plan, verification_of(plan, lowered, compilation, place), notes
