"""Retrace jaxprs: bind equations again with their names and source lines; compute JAX's
random words by position."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import (
    api,
    api_util,
    array,
    core as jax_core,
    linear_util,
    mesh as mesh_lib,
    source_info_util,
)
from jax._src.interpreters import partial_eval
from jax._src.lax import lax as lax_internal
from jax.extend import core as jex_core, random as jex_random
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from rhino_jax._compat.jaxprs import is_jaxpr, open_jaxpr, with_eqns


NO_AXES: Mapping[str, int] = {}

current_source = source_info_util.current
"""Returns the source of an equation that is bound now. Same on both versions."""


def new_primitive(name: str) -> Any:
    """Return a new primitive; same on both versions."""
    return jex_core.Primitive(name)


def hide_frames(file: str) -> None:
    """Attribute equations to the callers of a file's functions. Same on both."""
    source_info_util.register_exclusion(file)


def user_frames(source_info: Any) -> Iterator[tuple[str, int, str]]:
    """Yield (file, line, function) of the frames outside JAX, innermost first.

    Same on both versions.
    """
    for frame in source_info_util.user_frames(source_info.traceback):
        yield frame.file_name, frame.start_line, frame.function_name


def user_spans(source_info: Any) -> Iterator[tuple[str, tuple[int, int, int, int]]]:
    """Yield (file, span) of the frames outside JAX, innermost first.

    A span is the expression's first line and column, and its last line and the column
    after; columns count bytes of UTF-8 from 0, as in `ast`. Same on both versions.
    """
    for frame in source_info_util.user_frames(source_info.traceback):
        span = frame.start_line, frame.start_column, frame.end_line, frame.end_column
        yield frame.file_name, span


@dataclass(frozen=True)
class TypedInputs:
    """Inputs of a function, in the form of a jaxpr for `retrace`.

    Attributes:
      invars: variables or literals with their types.
      debug_info: debug info of the jaxpr that they come from.
    """

    invars: Sequence[Any]
    debug_info: Any


def retrace(
    fn: Callable[..., Any],
    jaxpr: Any,
    shapes: Sequence[tuple[int, ...]] | None = None,
    axes: Mapping[str, int] = NO_AXES,
) -> tuple[Any, list[Any]]:
    """Trace `fn` with the exact types of `jaxpr`'s inputs, references included.

    `jax.make_jaxpr` takes arrays only and would lose the debug names. Same on both
    versions.

    Args:
      fn: the function.
      jaxpr: the jaxpr, or `TypedInputs`, whose inputs it takes.
      shapes: shapes of the inputs, where they differ from `jaxpr`'s; None: they do not.
      axes: name → size of the axes over which `fn` has collectives.
    Returns:
      The jaxpr without its constants, and the constants.
    """
    wrapped = linear_util.wrap_init(fn, debug_info=jaxpr.debug_info)
    avals = [v.aval for v in jaxpr.invars]
    if shapes is not None:
        avals = [
            aval
            if getattr(aval, "shape", ()) == shape
            else jax.core.ShapedArray(
                shape,
                aval.dtype,
                weak_type=aval.weak_type,
                memory_space=aval.memory_space,
            )
            for aval, shape in zip(avals, shapes, strict=True)
        ]
    with without_mesh(), jax_core.extend_axis_env_nd([*axes.items()]):
        new, _, consts = partial_eval.trace_to_jaxpr_dynamic(wrapped, avals)
    return new, list(consts)


_ON_HOST = "pinned_host"
"""The kind of memory of arrays of `jax.memory.Space.Host`."""


def is_on_host(x: Any) -> bool:
    """Whether an array, its type or its abstract value, is in the host's memory."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return getattr(x.sharding, "memory_kind", None) == _ON_HOST
    aval = getattr(x, "aval", x)
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def type_on(x: Any, mesh: AbstractMesh | None = None) -> jax.ShapeDtypeStruct:
    """Return shape, dtype, weakness and memory of an array or abstract value.

    Args:
      x: it, or an object with a shape and a dtype.
      mesh: a mesh on which it is replicated; None: it has no sharding, but in the
        host's memory, where JAX takes the memory from a sharding alone.
    """
    on_host, sharding = is_on_host(x), None
    if mesh is not None or on_host:
        sharding = NamedSharding(
            AbstractMesh((), ()) if mesh is None else mesh,
            PartitionSpec(*[None] * len(x.shape)),
            memory_kind=_ON_HOST if on_host else None,
        )
    weak = bool(getattr(x, "weak_type", False))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak, sharding=sharding)


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """Clear the mesh in context, whatever the user has set.

    Equations have meshes of their own. Same on both versions.
    """
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        yield


def context_without_mesh(context: Any) -> Any:
    """Return the context of an equation without the mesh in it. Same on both."""
    with context.manager, without_mesh():
        return type(context)()


def with_weak_types(arrays: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    """Return arrays whose types are weak where those of `types` are, and only there.

    Arrays of devices share their buffers with the result. Same on both versions.

    Args:
      arrays: arrays, tracers or literals.
      types: have a dtype and `weak_type`, one of each array.
    """
    return [
        x if jax.typeof(x).weak_type == t.weak_type else _of_weak_type(x, t.weak_type)
        for x, t in zip(arrays, types, strict=True)
    ]


def _of_weak_type(x: Any, is_weak: bool) -> Any:
    if not isinstance(x, array.ArrayImpl):
        return lax_internal._convert_element_type(x, x.dtype, weak_type=is_weak)
    aval = x.aval.update(weak_type=is_weak)
    return array.ArrayImpl(
        aval, x.sharding, x._arrays, committed=x.committed, _skip_checks=True
    )


@contextlib.contextmanager
def eqn_context(eqn: Any) -> Iterator[None]:
    """Bind within the name stack, source line and settings of an equation.

    As `jax.core.eval_jaxpr` does. Same on both versions.
    """
    info = eqn.source_info
    names = source_info_util.current_name_stack() + info.name_stack
    with (
        source_info_util.user_context(info.traceback, name_stack=names),
        eqn.ctx.manager,
    ):
        yield


@contextlib.contextmanager
def at_line_of(eqn: Any) -> Iterator[None]:
    """Bind on the source line of an equation, with the current name stack.

    Same on both versions.
    """
    with source_info_util.user_context(eqn.source_info.traceback):
        yield


def in_current_mesh(jaxpr: Any) -> Any:
    """Return a jaxpr, with its sub-jaxprs, as if traced in the current mesh context.

    Equations store the mesh in whose context they were traced, and are refused on
    values of `shard_map`, whose mesh has Manual axes. Same on both versions.
    """
    mesh = mesh_lib.get_abstract_mesh()

    def renewed(value: Any) -> Any:
        if is_jaxpr(value):
            opened = open_jaxpr(value)
            return with_eqns(value, [*map(moved, opened.eqns)], opened.outvars)
        if isinstance(value, tuple | list) and any(map(is_jaxpr, value)):
            parts = map(renewed, value)
            # The constructor of a named tuple, as in a linear solve, takes fields.
            is_named = hasattr(value, "_fields")
            return type(value)(*parts) if is_named else type(value)(parts)
        if isinstance(value, jax.sharding.NamedSharding) and not any(value.spec):
            return NamedSharding(mesh, value.spec)
        return value

    def moved(eqn: Any) -> Any:
        with eqn.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
            context = type(eqn.ctx)()
            read = [*map(literal, eqn.invars)]
        params = {key: renewed(value) for key, value in eqn.params.items()}
        return eqn.replace(ctx=context, params=params, invars=read)

    def literal(atom: Any) -> Any:
        """Return a literal array whose type names the current mesh."""
        value = getattr(atom, "val", None)
        if not isinstance(value, np.ndarray) or not hasattr(value, "aval"):
            return atom
        value = value.copy()  # its type is cached with the mesh of the first access
        return type(atom)(value, value.aval)

    return renewed(jaxpr)


def bind_eqn(eqn: Any, args: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """Bind an equation's primitive with these parameters; returns a list of results.

    `get_bind_params` returns a dict from 0.10.2 on, a pair (subfuns, params) before.
    """
    bound = eqn.primitive.get_bind_params(dict(params))
    if isinstance(bound, tuple):
        subfuns, bound = bound
        out = eqn.primitive.bind(*subfuns, *args, **bound)
    else:
        out = eqn.primitive.bind(*args, **bound)
    return list(out) if eqn.primitive.multiple_results else [out]


def name_as(
    flat: Callable[..., Any], fn: Callable[..., Any], name: str, paths: Sequence[str]
) -> None:
    """Make errors that are raised while `flat` is traced name the user's function.

    They then read as for `jax.jit(fn)`: with its name, file and line, and the argument
    on which a value depends. Same on both versions.

    Args:
      flat: a function of flat arrays.
      fn: the user's function.
      name: its name.
      paths: tree paths of the arrays.
    """
    flat.__name__ = flat.__qualname__ = name
    info = jax_core.DebugInfo(
        "jit",
        api_util.fun_sourceinfo(fn),
        tuple(paths),
        jax_core.initial_result_paths,
    )
    api_util.save_wrapped_fun_debug_info(flat, info)


TAG = "rhino-tag:"


@contextlib.contextmanager
def tagged(tag: str) -> Iterator[None]:
    """Tag equations that are bound within this context. Same on both versions."""
    with jax.named_scope(TAG + tag):
        yield


def untagged(jaxpr: Any) -> tuple[Any, list[str | None]]:
    """Return a jaxpr without the tags of `tagged`, and each equation's innermost tag.

    Same on both versions.
    """
    eqns, tags = [], []
    for eqn in open_jaxpr(jaxpr).eqns:
        stack, tag = eqn.source_info.name_stack.stack, None
        for scope in stack:
            if scope.name.startswith(TAG):
                tag = scope.name[len(TAG) :]
        kept = tuple(s for s in stack if not s.name.startswith(TAG))
        names = source_info_util.NameStack(kept)
        info = eqn.source_info.replace(name_stack=names)
        eqns.append(eqn.replace(source_info=info))
        tags.append(tag)
    return with_eqns(jaxpr, eqns, open_jaxpr(jaxpr).outvars), tags


def key_words(key: Any) -> Any:
    """Return the two words of a threefry key, uint32 [2]."""
    return jax.random.key_data(key)


def threefry_words(words: Any, at: Any, dtype: Any) -> Any:
    """Return the words that `random_bits` draws at some positions of the whole array.

    As `_threefry_random_bits_partitionable` does (jax/_src/random/threefry2x32.py,
    before 0.10 in jax/_src/prng.py), for fewer than 2³² words. Same on both versions.

    Args:
      words: words of the key, uint32 [2].
      at: flat positions, uint32, any shape.
      dtype: unsigned dtype to draw.
    """
    high = lax.full_like(at, 0)
    first, second = jex_random.threefry2x32_p.bind(
        *(jnp.broadcast_to(words[i], at.shape) for i in (0, 1)), high, at
    )
    bits = jnp.dtype(dtype).itemsize * 8
    if bits == 64:
        first, second = (lax.convert_element_type(x, dtype) for x in (first, second))
        return lax.shift_left(first, lax.full_like(first, 32)) | second
    return lax.convert_element_type(first ^ second, dtype)


@contextlib.contextmanager
def instead_of_vjp(new: Any) -> Iterator[None]:
    """Replace `jax.vjp`, by which `jax.grad` and `jax.value_and_grad` differentiate.

    Same on both versions.
    """
    with mock.patch.object(api, "vjp", new), mock.patch.object(jax, "vjp", new):
        yield
