"""Audit a program that its user sharded by hand, and compare it with rhino's plan.

The program is compiled unchanged and its HLO is read. Then rhino plans the same
function, without its user's shardings, on the same mesh; both are judged by their
compiled programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jax.sharding import AxisType

from rhino_jax.errors import InfeasiblePlanError, RhinoError
from rhino_jax.frontend.call import split_call
from rhino_jax.frontend.parameters import Parameters, read_parameters
from rhino_jax.frontend.trace import trace_call
from rhino_jax.plan.plan import AnyPlan
from rhino_jax.runtime.meshes import axes_of_mesh
from rhino_jax.runtime.sharded import BoundMethod, Planner, ShardedFunction
from rhino_jax.runtime.with_plan import sharded_by
from rhino_jax.verify.by_hand.culprits import (
    Culprits,
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
from rhino_jax.verify.places import CompilePlace, place_on
from rhino_jax.verify.results.audit import Audit
from rhino_jax.verify.results.verification import Verification
from rhino_jax.verify.verification import verification_of


def audit(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    planner: Planner[AnyPlan],
    *,
    mesh: Any,
    hardware: Any,
    memory_budget_bytes: int | None,
    **calling: Any,
) -> Audit[AnyPlan]:
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
    found, verified, notes = _with_rhino(program, parameters, planner, place)
    loops = () if found is None else found.while_loops
    reading = read_compiled(compilation, axes, place.target, while_loops=loops)
    collectives = tuple(
        sorted(reading.collectives, key=lambda c: (-c.seconds, -c.bytes))
    )
    budget = place.target.device.hbm_bytes
    return Audit(
        **reading.facts()
        | {
            "collectives": collectives,
            "notes": (
                *map(_wrong_numbers, by_compiler(reading.repeated_sums)),
                *reading.notes,
                *notes,
            ),
        },
        program_name=parameters.name,
        mesh_axes=axes,
        hardware=place.target.name,
        memory_budget_bytes=budget
        if memory_budget_bytes is None
        else memory_budget_bytes,
        costs=costs_of(
            collectives,
            reading.rematerialised,
            _culprits(program, parameters, what),
        ),
        plan=found,
        rhino=verified,
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
    program: HandSharded,
    parameters: Parameters,
    planner: Planner[AnyPlan],
    place: CompilePlace,
) -> tuple[AnyPlan | None, Verification | None, list[str]]:
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
