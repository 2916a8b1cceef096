"""Audit a program that its user sharded by hand, and compare it with rhino's plan.

The program is compiled unchanged, on the mesh of its arguments or constraints, and its
HLO is read. Then rhino plans the same function, without its user's shardings, on the
same mesh; both are judged by their compiled programs.

`with_sharding_constraint` (and `reshard` on Auto axes) are removed everywhere: in
loops, branches and nested calls. Inner `jax.jit` calls are inlined, since they may have
`in_shardings`. Bodies of `shard_map` stay: their collectives are part of the program.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from rhino_jax._compat import (
    context_mesh,
    fused_attention_traced,
    jaxpr_consts,
    jit_shardings,
    low_jaxpr,
    open_jaxpr,
)
from rhino_jax.errors import InfeasiblePlanError, MeshError, RhinoError
from rhino_jax.frontend.call import array_type, split_call
from rhino_jax.frontend.leaves import is_array, split_result
from rhino_jax.frontend.parameters import Parameters, read_parameters
from rhino_jax.frontend.regions import (
    PLAIN_CALLS,
    bind_within,
    evaluate,
    inline_call,
)
from rhino_jax.frontend.rules.elementwise import ANNOTATIONS
from rhino_jax.frontend.trace import trace_call
from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import axes_text, entry_axes
from rhino_jax.plan.plan import AnyPlan
from rhino_jax.runtime.meshes import axes_of_mesh, read_mesh
from rhino_jax.runtime.placing import on_arrays
from rhino_jax.runtime.sharded import BoundMethod, Planner, ShardedFunction, sharded_by
from rhino_jax.verify.culprits import (
    Culprits,
    costs_of,
    culprits_of,
)
from rhino_jax.verify.hlo.collectives.repeated_sums import RepeatedSum, by_compiler
from rhino_jax.verify.hlo.reading import read_compiled
from rhino_jax.verify.places import CompilePlace, place_on
from rhino_jax.verify.results.audit import Audit
from rhino_jax.verify.results.verification import Verification
from rhino_jax.verify.verification import verification_of


def without_constraints(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` without the shardings in it, for tracing only.

    Every array among the arguments must be a tracer.
    """

    @functools.wraps(fn)
    def free(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        places = [i for i, x in enumerate(leaves) if isinstance(x, jax.core.Tracer)]
        flat, results = on_arrays(fn, leaves, tree, places, split_result)
        flat.__name__ = flat.__qualname__ = getattr(fn, "__name__", "fn")
        tracers = [leaves[i] for i in places]
        with fused_attention_traced():
            closed = low_jaxpr(jax.make_jaxpr(flat)(*tracers))
        opened, consts = open_jaxpr(closed), jaxpr_consts(closed)
        outs = evaluate(opened, consts, tracers, _equation)
        return results[-1].unflatten(outs)

    return free


def _equation(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    name = eqn.primitive.name
    if name in ANNOTATIONS:
        return list(operands)
    if name in PLAIN_CALLS:
        return inline_call(eqn, operands, _equation)
    return bind_within(eqn, operands, _equation)


def sharded_ops(program: Program) -> dict[str, int]:
    """Count the ops of a program that its user sharded by hand, by primitive."""
    found: dict[str, int] = {}
    for op in program.ops:
        if op.name in ANNOTATIONS or op.name == "shard_map":
            found[op.name] = found.get(op.name, 0) + 1
    return found


@dataclass(frozen=True, slots=True)
class HandSharded:
    """A hand-sharded program, lowered.

    Attributes:
      mesh: mesh that the program is sharded over.
      args, kwargs: `jax.ShapeDtypeStruct`s of its arguments, with their shardings.
      lowered: the lowered program, unchanged.
    """

    mesh: Mesh
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    lowered: jax.stages.Lowered


def read_by_hand(
    fn: Callable[..., Any],
    parameters: Parameters,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    mesh: Any,
    what: str,
) -> HandSharded:
    """Find the mesh of a hand-sharded program and lower the program unchanged.

    Args:
      fn: a `jax.jit` object, or a function that is put into one.
      parameters: names, static and donated arguments of `fn`.
      args, kwargs: arrays or `jax.ShapeDtypeStruct`s, or pytrees of them, with their
        `NamedSharding`s where they have any.
      mesh: the mesh; None: the mesh of the arguments, of `jit`'s shardings, or in
        context. Shardings over another mesh with the same axes are moved to it.
      what: name of the calling API, for messages.
    Raises:
      MeshError: no mesh is found, several differ, or it has no devices.
    """
    own = tuple(_own_meshes(fn, args, kwargs))
    around = context_mesh()
    chosen = read_mesh(mesh, what)
    if chosen is None:
        candidates = [m for m in (*own, around) if m is not None]
        chosen = next((m for m in candidates if isinstance(m, Mesh)), None)
    if not isinstance(chosen, Mesh):
        raise _no_mesh(parameters.name, what, chosen or next(iter(own), around))
    for other in own:
        _check_same(other, chosen, parameters.name, what)
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
    shapes, named = jax.tree.unflatten(tree, [_shape_of(x, chosen) for x in leaves])
    jitted = fn if hasattr(fn, "lower") else _jitted(parameters)
    is_around = mesh is None or around is not None
    with contextlib.nullcontext() if is_around else jax.set_mesh(chosen):
        lowered = jitted.lower(*shapes, **named)
    return HandSharded(chosen, shapes, named, lowered)


def axes_in(spec: PartitionSpec) -> frozenset[str]:
    """Return the mesh axes that a spec shards over."""
    return frozenset(x for dim in spec for x in entry_axes(dim) if isinstance(x, str))


def _own_meshes(
    fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[Mesh | AbstractMesh]:
    """Yield the meshes that the arguments and `jit` name, in this order."""
    given = [getattr(x, "sharding", None) for x in jax.tree.leaves((args, kwargs))]
    for sharding in (*given, *jit_shardings(fn)):
        if isinstance(sharding, NamedSharding):
            yield sharding.mesh


def _shape_of(x: Any, mesh: Mesh) -> Any:
    """Return an array's `jax.ShapeDtypeStruct` with its sharding, or another leaf."""
    if not is_array(x):
        return x
    shape, dtype, is_weak, _ = array_type(x)
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    else:
        sharding = None
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=is_weak, sharding=sharding)


def _jitted(parameters: Parameters) -> Any:
    """Return a `jax.jit` object with the parameters' static and donated arguments."""
    static_nums, static_names = _numbers_and_names(parameters, parameters.static)
    donate_nums, donate_names = _numbers_and_names(parameters, parameters.donated)
    return jax.jit(
        parameters.fn,
        static_argnums=static_nums,
        static_argnames=static_names,
        donate_argnums=donate_nums,
        donate_argnames=donate_names,
    )


def _numbers_and_names(
    parameters: Parameters, keys: frozenset[str | int]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return argnums and argnames for `jax.jit`; an argument with a name is in both."""
    place = {name: i for i, name in enumerate(parameters.positional)}
    names = sorted(key for key in keys if isinstance(key, str))
    numbers = {key for key in keys if isinstance(key, int)}
    numbers |= {place[name] for name in names if name in place}
    return tuple(sorted(numbers)), tuple(names)


def _check_same(other: Mesh | AbstractMesh, mesh: Mesh, name: str, what: str) -> None:
    if axes_of_mesh(other) == axes_of_mesh(mesh):
        return
    raise MeshError(
        f"{what}: `{name}` is sharded over more than one mesh.",
        numbers=f"{dict(other.shape)} and {dict(mesh.shape)}",
        fix="shard all arguments over one mesh, and pass no other as mesh=.",
    )


def _no_mesh(name: str, what: str, abstract: Any) -> MeshError:
    if abstract is None:
        return MeshError(
            f"{what}: there is no mesh to audit `{name}` on.",
            where="no argument has a NamedSharding, jax.jit has no in_shardings, and"
            " there is no mesh= and none in context",
            fix="pass arrays or jax.ShapeDtypeStructs with a NamedSharding; for"
            " hardware that is not here, over rhino.compile_target('v5e:4x4').",
        )
    axes = axes_text(axes_of_mesh(abstract))
    sizes = dict(axes_of_mesh(abstract))
    return MeshError(
        f"{what}: the mesh of `{name}` has no devices to compile for.",
        numbers=f"an AbstractMesh with {axes}",
        fix=f"pass mesh=rhino.compile_target('v5e', {sizes}), or a mesh of devices.",
    )


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
