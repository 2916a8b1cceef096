"""Mutable references (`jax.Ref`) and programs that use them."""

from __future__ import annotations

from typing import Any

import jax
from jax._src import (
    core as jax_core,
)
from jax._src.state import discharge, types as state_types

from rhino_jax._compat.jaxprs import _with_inputs, jaxpr_consts, open_jaxpr


def ref_value(ref: Any) -> Any:
    """Return a reference's array itself, not a copy. Same on both versions."""
    if isinstance(ref, jax.core.Tracer):
        return ref[...]
    return ref._refs._buf


def set_ref_value(ref: Any, value: Any) -> None:
    """Set a reference's array itself, on whatever devices.

    Assigning to the reference would copy, and requires both on the same devices. Same
    on both versions.
    """
    if isinstance(ref, jax.core.Tracer):
        ref[...] = value
        return
    held, inner = ref._refs, jax.typeof(value)
    held._buf = value
    if held._aval.inner_aval != inner:  # the type names the mesh, if Explicit
        ref._aval = held._aval = held._aval.update(inner_aval=inner)


def without_refs(jaxpr: Any) -> Any:
    """Discharge the references that a program creates itself.

    Their contents become plain values, carried through loops. Same on both versions.
    """
    effects = open_jaxpr(jaxpr).effects
    if not any(isinstance(e, jax_core.InternalMutableArrayEffect) for e in effects):
        return jaxpr
    return discharge.discharge_state(jaxpr)


def references_as_arguments(jaxpr: Any) -> tuple[Any, list[Any], list[bool]]:
    """Return a closed jaxpr with its captured references as last arguments.

    Same on both versions.

    Returns:
      The jaxpr; the references; whether it writes to each.
    """
    opened, consts = open_jaxpr(jaxpr), jaxpr_consts(jaxpr)
    is_ref = [isinstance(c, jax.Ref) for c in consts]
    moved = [v for v, found in zip(opened.constvars, is_ref, strict=True) if found]
    if not moved:
        return jaxpr, [], []
    written = {
        e.input
        for e in opened.effects
        if isinstance(e, state_types.WriteEffect | state_types.AccumEffect)
    }
    found = _with_inputs(
        jaxpr,
        [*opened.invars, *moved],
        [v for v, found in zip(opened.constvars, is_ref, strict=True) if not found],
        [c for c, found in zip(consts, is_ref, strict=True) if not found],
    )
    references = [c for c, found in zip(consts, is_ref, strict=True) if found]
    return found, references, [v in written for v in moved]


def discharged(jaxpr: Any) -> Any:
    """Return a closed jaxpr with references replaced by their arrays.

    Arguments that are references become their arrays; their final arrays follow its own
    results. Same on both versions.
    """
    return discharge.discharge_state(jaxpr)
