"""Read the options of a `jax.jit` object, and the context of a call."""

from __future__ import annotations

from typing import Any

import jax
from jax._src import (
    core as jax_core,
    mesh as mesh_lib,
    sharding_impls,
)


JITTED = type(jax.jit(lambda: None))
"""The class of `jax.jit` objects."""


def jit_options(fn: Any) -> dict[str, tuple[Any, ...]]:
    """Return the static and donated arguments of a `jax.jit` object.

    Empty where `fn` is no such object. It is recognised by its type, since
    `functools.wraps` copies its attributes to any wrapper. Same on both versions.
    """
    if not isinstance(fn, JITTED):
        return {}
    info: Any = fn._jit_info  # type: ignore[attr-defined]
    keys = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
    return {key: tuple(getattr(info, key)) for key in keys}


def jit_shardings(fn: Any) -> tuple[Any, ...]:
    """Return the `in_shardings` and `out_shardings` of a `jax.jit` object, flat.

    Without unspecified ones; empty where `fn` is no such object. Same on both versions.
    """
    if not isinstance(fn, JITTED):
        return ()
    info: Any = fn._jit_info  # type: ignore[attr-defined]
    leaves = (getattr(info, f"{x}_shardings_leaves", ()) for x in ("in", "out"))
    unsaid = type(sharding_impls.UNSPECIFIED)  # type: ignore[attr-defined]
    return tuple(
        s
        for side in leaves
        for s in side
        if not isinstance(s, unsaid) and s is not None
    )


def is_outermost() -> bool:
    """Whether nothing is being traced. Same on both versions."""
    return bool(jax_core.trace_state_clean())


def context_mesh() -> Any | None:
    """Return the mesh of `jax.set_mesh` or `with mesh:`, or None.

    Concrete where it is. `jax.sharding.get_mesh` raises inside of `jit`. Same on both
    versions.
    """
    concrete = mesh_lib.get_concrete_mesh()
    if concrete is not None and not concrete.empty:
        return concrete
    abstract = mesh_lib.get_abstract_mesh()
    if not abstract.empty:
        return abstract
    physical = mesh_lib.thread_resources.env.physical_mesh
    return None if physical.empty else physical
