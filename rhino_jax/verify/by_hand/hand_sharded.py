"""Find the mesh of a hand-sharded program and lower the program unchanged.

Strip a user's function of the shardings that its user wrote into it.

`with_sharding_constraint` (and `reshard` on Auto axes) are removed everywhere: in
loops, branches and nested calls. Inner `jax.jit` calls are inlined, since they may have
`in_shardings`. Bodies of `shard_map` stay: their collectives are part of the program.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from rhino_jax._compat import (
    bind_eqn,
    context_mesh,
    jaxpr_consts,
    jit_shardings,
    low_jaxpr,
    open_jaxpr,
)
from rhino_jax.errors import MeshError
from rhino_jax.frontend.call import array_type
from rhino_jax.frontend.leaves import is_array, split_result
from rhino_jax.frontend.parameters import Parameters
from rhino_jax.frontend.regions import (
    PLAIN_CALLS,
    closed_region_jaxprs,
    evaluate,
    inline_call,
    rebuild_jaxpr,
    with_jaxprs,
)
from rhino_jax.frontend.rules.elementwise import ANNOTATIONS
from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import entry_axes
from rhino_jax.plan.trees import axes_text
from rhino_jax.runtime.meshes import axes_of_mesh, read_mesh
from rhino_jax.runtime.placing import on_arrays


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
    params = eqn.params
    bodies = closed_region_jaxprs(eqn)
    if bodies:
        params = with_jaxprs(eqn, [rebuild_jaxpr(_body(b), b) for b in bodies])
    return bind_eqn(eqn, operands, params)


def _body(jaxpr: Any) -> Callable[..., list[Any]]:
    inner, consts = open_jaxpr(jaxpr), jaxpr_consts(jaxpr)
    return lambda *args: evaluate(inner, consts, args, _equation)


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
    shape, dtype, is_weak = array_type(x)
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
