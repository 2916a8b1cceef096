"""Read jaxprs, and make others from them; pickle them, for another process of the same
versions to plan. Mutable references (`jax.Ref`), and programs that use them."""

from __future__ import annotations

import copy
import importlib
import io
import pickle
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core as jax_core
from jax._src.interpreters import partial_eval
from jax._src.state import discharge, types as state_types
from jax.extend import core as jex_core


def open_jaxpr(jaxpr: Any) -> Any:
    """Return the jaxpr without its constants' values.

    On 0.10 a ClosedJaxpr wraps a Jaxpr; on 0.12 they are one class.
    """
    return getattr(jaxpr, "jaxpr", jaxpr)


def jaxpr_consts(jaxpr: Any) -> tuple[Any, ...]:
    """Return the values of `constvars`; on 0.10 only a ClosedJaxpr has them."""
    return tuple(getattr(jaxpr, "consts", ()))


def is_jaxpr(x: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr, closed (0.10) or not."""
    return isinstance(x, (jex_core.Jaxpr, jex_core.ClosedJaxpr))


def is_literal(atom: Any) -> bool:
    """Whether an operand is a literal; same on both versions."""
    return isinstance(atom, jex_core.Literal)


def is_drop_var(var: Any) -> bool:
    """Whether a result is never used; same on both versions."""
    return isinstance(var, jex_core.DropVar)


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of consts and carries of a `scan`.

    On 0.10 two parameters; on 0.12 a flat tree of (consts, carries, stacked inputs).
    """
    if "num_carry" in params:
        return int(params["num_consts"]), int(params["num_carry"])
    consts, carries, _ = params["ft_in"].unpack()
    return len(consts), len(carries)


def close_jaxpr(jaxpr: Any, consts: Sequence[Any]) -> Any:
    """Return a jaxpr with its constants: ClosedJaxpr on 0.10, Jaxpr on 0.12."""
    return jex_core.ClosedJaxpr(jaxpr, list(consts))


def like_jaxpr(old: Any, new: Any, consts: Sequence[Any]) -> Any:
    """Return `new` with its constants, closed where `old` is closed.

    On 0.10 `remat` holds a Jaxpr that takes no constants, other calls a ClosedJaxpr.
    """
    if hasattr(old, "consts"):
        return close_jaxpr(new, consts)
    assert not consts, "a jaxpr without constants gained some"
    return new


def with_eqns(
    jaxpr: Any, eqns: Sequence[Any], outvars: Sequence[Any], **inputs: Any
) -> Any:
    """Return a jaxpr with other equations and results, closed where it is closed.

    Args:
      jaxpr: closed or not.
      eqns, outvars: the new equations and results.
      inputs: `invars` and `constvars`, where they change.
    """
    changes = {"eqns": list(eqns), "outvars": list(outvars), **inputs}
    inner = getattr(jaxpr, "jaxpr", None)  # on 0.12 the jaxpr itself
    if inner is not None and inner is jaxpr and "constvars" in inputs:
        changes["consts"] = jaxpr_consts(
            jaxpr
        )  # which 0.12 drops with other `constvars`
    if inner is None or inner is jaxpr:
        return jaxpr.replace(**changes)
    return jaxpr.replace(jaxpr=inner.replace(**changes))


def with_type(var: Any, aval: Any) -> Any:
    """Return another variable like this one, of a type; same on both versions."""
    new = copy.copy(var)
    new.aval = aval
    return new


def low_jaxpr(jaxpr: Any) -> Any:
    """Return the jaxpr with its high-level primitives lowered.

    0.12 traces some functions (`jnp.searchsorted`, `jnp.interp`) to primitives
    that are expanded only before lowering; 0.10 has none.
    """
    if not getattr(jaxpr, "is_high", False):
        return jaxpr
    return partial_eval.lower_jaxpr2(jaxpr)


def without_dead_code(jaxpr: Any) -> Any:
    """Return the jaxpr without dead equations, also in its sub-jaxprs.

    Arguments and results stay; equations that no result and no effect needs are
    removed. Same on both versions.
    """
    opened = open_jaxpr(jaxpr)
    live, _ = partial_eval.dce_jaxpr(
        opened, [True] * len(opened.outvars), instantiate=True
    )
    return with_eqns(jaxpr, live.eqns, live.outvars)


def last_as_consts(jaxpr: Any, consts: Sequence[Any]) -> Any:
    """Return a closed jaxpr with its last arguments replaced by captured constants.

    Same on both versions.
    """
    opened = open_jaxpr(jaxpr)
    first = len(opened.invars) - len(consts)
    return _with_inputs(
        jaxpr,
        opened.invars[:first],
        [*opened.constvars, *opened.invars[first:]],
        [*jaxpr_consts(jaxpr), *consts],
    )


def consts_as_inputs(jaxpr: Any) -> Any:
    """Return an open jaxpr with its constants as last inputs; same on both versions."""
    if not jaxpr.constvars:
        return jaxpr
    changes: dict[str, Any] = {
        "invars": [*jaxpr.invars, *jaxpr.constvars],
        "constvars": [],
        "debug_info": jaxpr.debug_info.with_unknown_names(),
    }
    if hasattr(jaxpr, "consts"):  # 0.12
        changes["consts"] = []
    return jaxpr.replace(**changes)


def captured_as_inputs(jaxpr: Any, count: int) -> Any:
    """Return an open jaxpr with its captured tracers as last inputs.

    On 0.10 `retrace` returns these as constants, on 0.12 as the first inputs.

    Args:
      jaxpr: result of `retrace`.
      count: number of inputs that it was traced with.
    """
    if jaxpr.constvars:
        return consts_as_inputs(jaxpr)
    extra = len(jaxpr.invars) - count
    if not extra:
        return jaxpr
    return jaxpr.replace(
        invars=[*jaxpr.invars[extra:], *jaxpr.invars[:extra]],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


def _with_inputs(
    jaxpr: Any, invars: Sequence[Any], constvars: Sequence[Any], consts: Sequence[Any]
) -> Any:
    opened = open_jaxpr(jaxpr)
    changes: dict[str, Any] = {
        "invars": list(invars),
        "constvars": list(constvars),
        "debug_info": opened.debug_info.with_unknown_names(),
    }
    if opened is jaxpr:  # 0.12
        return jaxpr.replace(**changes, consts=list(consts))
    return close_jaxpr(opened.replace(**changes), consts)


SHARED = frozenset(
    "jax jaxlib numpy ml_dtypes rhino_jax builtins collections copyreg enum functools"
    " operator _operator".split()
)
"""Packages that another process imports in the same version; not the user's."""


def pickled(x: Any) -> bytes | None:
    """Pickle plain data and jaxprs; None where they contain the user's own objects.

    Python's tracebacks are left out: programs have their own source lines. Same on both
    versions.
    """
    file = io.BytesIO()
    try:
        _Pickler(file, protocol=5).dump(x)
    except Exception:  # a user's object may raise anything
        return None
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, x: Any) -> Any:
        if type(x).__name__ == "Traceback":
            return type(None), ()
        if type(x).__name__ == "TypedNdArray":  # NumPy's reducer loses its type
            return type(x), (np.asarray(x), x.aval)
        if isinstance(x, jex_core.Primitive):
            return _named, _name_of(x)
        if isinstance(x, jax.sharding.Mesh) and x.size > 1:
            raise pickle.PicklingError("devices of this process")
        if not isinstance(x, type) and not hasattr(x, "__qualname__"):
            return NotImplemented
        if (x.__module__ or "").partition(".")[0] not in SHARED:
            raise pickle.PicklingError(f"{x} is of the user's own code")
        # JAX's own, such as a `custom_jvp`'s rule, which is not called any more.
        is_made = "<locals>" in x.__qualname__
        return (_NotHere, (x.__qualname__,)) if is_made else NotImplemented


class _NotHere:
    """Placeholder of a function that was not pickled."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} was left in another process")


def _name_of(primitive: Any) -> tuple[str, str]:
    """Return the module and the name under which JAX has a primitive."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] not in ("jax", "rhino_jax"):
            continue
        for name, value in list(vars(module).items()):
            if value is primitive:
                return module_name, name
    raise pickle.PicklingError(f"{primitive} is of the user's own code")


def _named(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


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
