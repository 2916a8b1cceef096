"""Rewriting of windows at constant positions, and of rotations, as pads and slices.

`u.at[1:-1].add(v)` is a scatter whose indices happen to be constants, and its gradient
a gather: XLA's partitioner gathers their operands along a sharded dim. With a pad or a
slice instead, shards exchange borders.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rhino_jax._compat import (
    TypedInputs,
    is_drop_var,
    is_literal,
    jaxpr_consts,
    open_jaxpr,
    retrace,
    scan_counts,
    with_eqns,
)
from rhino_jax.frontend.regions import closed_region_jaxprs, region_kind, with_jaxprs
from rhino_jax.frontend.registry import traits_of
from rhino_jax.frontend.tracing.constant_windows import opened_window, shifted_shapes
from rhino_jax.frontend.tracing.rotations import Rotations
from rhino_jax.ir.program import RegionKind
from rhino_jax.ir.traits import OpKind


_MAX_KNOWN = 16
"""Maximal number of elements of a constant that is tracked: window positions, one per
dim."""


_POINTWISE = (OpKind.ELEMENTWISE, OpKind.EXPONENTIAL, OpKind.CONVERSION)


def with_open_moves(jaxpr: Any) -> Any:
    """Return the jaxpr with pads, slices and rotations in place of equivalent
    equations.

    Args:
      jaxpr: closed or not.

    Returns:
      The same object where there are none.
    """
    return _opened(jaxpr, {})


def _opened(jaxpr: Any, entering: Mapping[int, np.ndarray]) -> Any:
    """Rewrite a jaxpr as `with_open_moves` does.

    Args:
      jaxpr: closed or not.
      entering: position → value, of the inputs that are known.
    """
    inner, rotations = open_jaxpr(jaxpr), Rotations()
    known = {inner.invars[i]: value for i, value in entering.items()}
    for var, const in zip(inner.constvars, jaxpr_consts(jaxpr), strict=False):
        if isinstance(const, np.ndarray) and _is_small(var):
            known[var] = const
    eqns: list[Any] = []
    grids, computed = shifted_shapes(jaxpr), set[Any]()
    for eqn in inner.eqns:
        values = [_value(atom, known) for atom in eqn.invars]
        folded = _folded(eqn, values)
        if folded is not None:
            known[eqn.outvars[0]] = folded
        made = [_with_bodies(eqn, values)]
        is_narrow = _is_in(eqn, computed) or _shape(eqn) in grids
        window = opened_window(eqn, values, is_narrow=is_narrow)
        rotation = rotations.of(eqn)
        if window is not None:
            made = _spelled(eqn, eqn.invars, window, inner.debug_info)
        elif rotation is not None:
            made = _spelled(eqn, [rotation[1]], rotation[0], inner.debug_info)
        for one in made:
            rotations.see(one)
            if traits_of(one.primitive.name).kind in _POINTWISE:
                computed.update(one.outvars)
        eqns += made
    if len(eqns) == len(inner.eqns) and all(map(operator.is_, eqns, inner.eqns)):
        return jaxpr
    return with_eqns(jaxpr, eqns, list(inner.outvars))


def _shape(eqn: Any) -> tuple[int, ...] | None:
    """Return the shape of an equation's first operand; None where it has none."""
    return getattr(eqn.invars[0].aval, "shape", None) if eqn.invars else None


def _is_in(eqn: Any, some: Collection[Any]) -> bool:
    """Whether an equation's first operand is one of some variables."""
    first = eqn.invars[0] if eqn.invars else None
    return first is not None and not is_literal(first) and first in some


def _with_bodies(eqn: Any, values: Sequence[np.ndarray | None]) -> Any:
    """Return an equation with rewritten sub-jaxprs; the same object where none
    changes."""
    kind, bodies = region_kind(eqn), closed_region_jaxprs(eqn)
    if kind is None:
        return eqn
    if kind is RegionKind.CALL:
        same = [values]
    elif kind is RegionKind.COND:
        same = [values[1:]] * len(bodies)
    elif kind is RegionKind.SCAN:
        same = [values[: scan_counts(eqn.params)[0]]]
    else:
        first = eqn.params["cond_nconsts"]
        same = [values[:first], values[first : first + eqn.params["body_nconsts"]]]
    changed = [
        _opened(body, {i: v for i, v in enumerate(known) if v is not None})
        for body, known in zip(bodies, same, strict=True)
    ]
    if all(map(operator.is_, changed, bodies)):
        return eqn
    return eqn.replace(params=dict(with_jaxprs(eqn, changed)))


def _spelled(
    eqn: Any, operands: Sequence[Any], fn: Callable[..., Any], debug_info: Any
) -> list[Any]:
    """Return the equations of a function of some operands, with the results and the
    source line of an equation."""
    made, consts = retrace(
        lambda *xs: jax.tree.leaves(fn(*xs)), TypedInputs(operands, debug_info)
    )
    assert not consts, "a window has constants"
    names = dict(zip(made.invars, operands, strict=True))
    names.update(
        (inner, outer)
        for inner, outer in zip(made.outvars, eqn.outvars, strict=True)
        if not is_drop_var(outer)
    )

    def renamed(atom: Any) -> Any:
        return atom if is_literal(atom) else names.get(atom, atom)

    return [
        one.replace(
            invars=[*map(renamed, one.invars)],
            outvars=[*map(renamed, one.outvars)],
            source_info=eqn.source_info,
        )
        for one in made.eqns
    ]


def _is_small(atom: Any) -> bool:
    aval = atom.aval
    is_integer = np.issubdtype(getattr(aval, "dtype", np.float32), np.integer)
    return is_integer and int(np.prod(aval.shape)) <= _MAX_KNOWN


def _value(atom: Any, known: Mapping[Any, np.ndarray]) -> np.ndarray | None:
    if not is_literal(atom):
        return known.get(atom)
    return np.asarray(atom.val) if _is_small(atom) else None


def _folded(eqn: Any, values: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Return the integers that an equation computes from known ones; None where it does
    not."""
    fold = _FOLDS.get(eqn.primitive.name)
    if fold is None or any(v is None for v in values) or not _is_small(eqn.outvars[0]):
        return None
    return fold(eqn, values)


def _broadcast(eqn: Any, values: Sequence[Any]) -> np.ndarray:
    shape, dims = eqn.outvars[0].aval.shape, eqn.params["broadcast_dimensions"]
    apart = [1] * len(shape)
    for d, size in zip(dims, values[0].shape, strict=True):
        apart[d] = size
    return np.broadcast_to(values[0].reshape(apart), shape)


def _reshaped(eqn: Any, values: Sequence[Any]) -> np.ndarray:
    return np.asarray(values[0]).reshape(eqn.outvars[0].aval.shape)


_FOLDS: dict[str, Callable[[Any, Sequence[Any]], np.ndarray]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda eqn, values: np.concatenate(values, eqn.params["dimension"]),
    "convert_element_type": _reshaped,
    "reshape": _reshaped,
    "squeeze": _reshaped,
}
