"""The trace of a flat function, within a mesh, under the user's function's name."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from rhino_jax._compat import (
    fused_attention_traced,
    last_as_consts,
    name_as,
    open_jaxpr,
    type_on,
    without_dead_code,
)
from rhino_jax.errors import MeshError, RhinoWarning
from rhino_jax.frontend.forms.calls import CallTrace
from rhino_jax.frontend.provenance import raised_at
from rhino_jax.frontend.tracing.captured import CapturedReferences, as_values
from rhino_jax.frontend.tracing.transforms import transformed
from rhino_jax.ir.transform import Transform


_OF_A_MESH = ("mesh", "axis", "sharding")
"""JAX's messages on an annotation that does not fit the mesh contain one of these
words."""


def trace_flat(
    flat: Callable[..., Any],
    types: Sequence[jax.ShapeDtypeStruct],
    *,
    fn: Callable[..., Any],
    name: str,
    paths: Sequence[str],
    mesh: Any,
    calls: CallTrace,
    what: str,
) -> tuple[Any, list[Any], CapturedReferences, tuple[Transform, ...]]:
    """Trace `flat` on these types, and run the passes that make its jaxpr plan better.

    Annotations in the function may name axes of the mesh, so the mesh is in context.
    They may also be written for another mesh and have no effect where there is none
    (`flax.linen.logical_axis_rules`): then the function is traced without one.

    Args:
      flat: the function of arrays.
      types: types of its arguments.
      fn, name, paths: the user's function, its name, and its arguments' tree paths, for
        errors.
      mesh: mesh with Auto axes, or None.
      calls: chooses and records the forms of calls (`rhino.choose`).
      what: the caller, for messages.

    Returns:
      The closed jaxpr, whose last constants are the references that the function
      captured, and whose last results are written back to them; the types of its
      results, weak or not; these references; and the passes that changed it.
    """
    name_as(flat, fn, name, paths)
    jaxpr = calls.jaxpr = _trace_within(mesh, flat, types, calls, name, what)
    jaxpr, captured = as_values(jaxpr, fn)
    outs = [type_on(v.aval) for v in open_jaxpr(jaxpr).outvars]
    found, transforms = transformed(jaxpr, name)
    return last_as_consts(found, captured.references), outs, captured, transforms


def _trace_within(
    mesh: Any,
    flat: Callable[..., Any],
    types: Sequence[jax.ShapeDtypeStruct],
    calls: CallTrace,
    name: str,
    what: str,
) -> Any:
    try:
        return _trace(flat, types, mesh, calls)
    except Exception as error:
        text = str(error)
        if mesh is None or not any(word in text.lower() for word in _OF_A_MESH):
            _refuse_annotation(error, mesh, name, what)
            raise
        try:
            jaxpr = _trace(flat, types, None, calls)
        except Exception:
            _refuse_annotation(error, mesh, name, what)
            raise error from None
    warnings.warn(
        f"{what}: `{name}` was traced without the mesh, since its annotations do not"
        f" fit it: {text.splitlines()[0]} They are without effect.",
        RhinoWarning,
        stacklevel=2,
    )
    return jaxpr


def _refuse_annotation(error: Exception, mesh: Any, name: str, what: str) -> None:
    """Refuse a `with_sharding_constraint` or `shard_map` whose mesh is wrong, naming
    the fault.

    Raises:
      MeshError: there is no mesh, or it has no such axis, or other types of axes.
    """
    text = str(error).partition(". ")[0]
    axes = {} if mesh is None else dict(mesh.shape)
    if "passed to shard_map" in text and isinstance(error, ValueError):
        raise MeshError(
            f"{what}: `{name}` has a `shard_map` over a mesh that is not the plan's, or"
            " whose axes are Explicit.",
            where=raised_at(error) or f"`{name}`",
            numbers=f"mesh of the plan {axes or 'not given'}; {text}",
            fix="leave out mesh= of the `shard_map`, which then takes the plan's, or"
            " make its mesh with the plan's axes and `jax.make_mesh(sizes, names,"
            " axis_types=(jax.sharding.AxisType.Auto,) * len(names))`.",
        ) from error
    if "requires a non-empty mesh" in text:
        wrong = "and there is no mesh"
    elif "is not found in mesh" in text:
        wrong = "that the mesh does not have"
    else:
        return
    raise MeshError(
        f"{what}: `{name}` constrains a value to axes of a mesh, {wrong}.",
        where=raised_at(error) or f"`{name}`",
        numbers=f"mesh {axes}; {text}" if axes else text,
        fix="give mesh= with these axes, as mesh={'data': 4, 'model': 2}; or leave the"
        " constraint out, and say it by rhino.pin.",
    ) from error


def _trace(
    flat: Any, types: Sequence[jax.ShapeDtypeStruct], mesh: Any, calls: CallTrace
) -> Any:
    given = [_within(x, mesh) for x in types]
    with _only_mesh(mesh), fused_attention_traced(), calls.recording():
        if calls.replacing is None:
            return jax.make_jaxpr(flat)(*given)
        with calls.replacing(calls) as replaced:
            return without_dead_code(jax.make_jaxpr(replaced(flat))(*given))


@contextlib.contextmanager
def _only_mesh(mesh: Any) -> Iterator[None]:
    """Set the mesh in context for a trace; None: no mesh."""
    inner = AbstractMesh((), ()) if mesh is None else _abstract_mesh(mesh)
    with jax.sharding.use_abstract_mesh(inner):
        yield


def _within(x: jax.ShapeDtypeStruct, mesh: Any) -> jax.ShapeDtypeStruct:
    """Return the type of an argument on the mesh in context, with a replicated
    sharding.

    Where a value comes from outside the mesh and its cotangent from inside, JAX's
    differentiation rules reshard, convert and add up differently: the function would be
    another program with a mesh than without, and a plan for one would be refused for
    the other.
    """
    return x if mesh is None else type_on(x, _abstract_mesh(mesh))


def _abstract_mesh(mesh: Any) -> Any:
    return getattr(mesh, "abstract_mesh", mesh)
