"""Propagation of constants: scalars that a jaxpr computes from constants alone, and the
trip counts of `while` loops that follow.

The bounds and steps of loops are followed through arithmetic and changes of shape. A
loop that counts (`lax.fori_loop`, `while i < n`) compares a carry with a limit and adds
a literal to it. Both are found through nested calls and converts; any other count is a
guess, and is marked as one. Positions of windows are `tracing.integers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from rhino_jax._compat import is_literal
from rhino_jax.frontend.regions import region_jaxprs, region_kind
from rhino_jax.frontend.registry import traits_of
from rhino_jax.ir.program import RegionKind


IDENTITIES = frozenset({"convert_element_type", "copy", "copy_p", "stop_gradient"})
"""Primitives whose result is the same number as their operand."""

Fold = Callable[[Any, Sequence[Any]], Any]
"""A function of an equation and the values of its operands."""


def _reshaped(eqn: Any, values: Sequence[Any]) -> Any:
    return values[0].reshape(eqn.outvars[0].aval.shape)


ARITHMETIC: Mapping[str, Fold] = {
    "add": lambda eqn, values: values[0] + values[1],
    "sub": lambda eqn, values: values[0] - values[1],
    "mul": lambda eqn, values: values[0] * values[1],
    "max": lambda eqn, values: np.maximum(*values),
    "min": lambda eqn, values: np.minimum(*values),
}
"""Arithmetic primitive → what it computes."""

FOLDS: Mapping[str, Fold] = {
    **ARITHMETIC,
    **dict.fromkeys(IDENTITIES, _reshaped),
    **dict.fromkeys(("broadcast_in_dim", "reshape", "squeeze"), _reshaped),
}


def can_be_known(aval: Any) -> bool:
    """Whether values of a type are followed: real scalars, in any number of dims."""
    dtype, shape = getattr(aval, "dtype", None), getattr(aval, "shape", None)
    if not isinstance(dtype, np.dtype) or shape is None or math.prod(shape) != 1:
        return False
    return any(jnp.issubdtype(dtype, k) for k in (np.integer, np.floating, np.bool_))


def known_value(atom: Any, known: Mapping[Any, np.ndarray]) -> np.ndarray | None:
    """Return the value of a literal or a known variable; None where it is unknown."""
    if not is_literal(atom):
        return known.get(atom)
    return np.asarray(atom.val) if can_be_known(atom.aval) else None


def fold(eqn: Any, values: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Return the value that an equation computes from known ones.

    Args:
      eqn: the equation.
      values: values of its operands; None where they are unknown.

    Returns:
      The value, in the type of the result; None where it is unknown.
    """
    compute = FOLDS.get(eqn.primitive.name)
    if compute is None or any(v is None for v in values):
        return None
    made = eqn.outvars[0].aval
    if not can_be_known(made):
        return None
    with np.errstate(over="ignore"):  # integers wrap around, as on devices
        return np.asarray(compute(eqn, values)).astype(made.dtype)


ASSUMED_TRIP_COUNT = 10
"""Assumed trips of a loop whose bound is unknown: enough for its body to weigh more
than straight-line code, few enough not to dominate the rest."""

MAX_BOUND = 100_000
"""A bound above this (a guard against endless loops) is no estimate of the trips."""

_COMPARISONS = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
"""Comparison → the equivalent one with swapped operands."""


@dataclass(frozen=True, slots=True)
class ScalarTerm:
    """A scalar of a jaxpr: a number, or one that is added to a carry of a loop.

    Attributes:
      value: the number.
      index: position of the carry; None: it is the number alone.
    """

    value: float = 0
    index: int | None = None


Term = ScalarTerm | tuple[str, tuple[Any, ...]] | None
"""A scalar; a comparison, as "<", or "and", of terms; None where it is unknown."""


def scalar_terms(jaxpr: Any, inputs: Sequence[Term]) -> list[Term]:
    """Return the scalar results of an open jaxpr as terms.

    One pass over the scalar equations, so its cost is linear.

    Args:
      jaxpr: an open jaxpr.
      inputs: terms of its invars.
    """
    env: dict[Any, Term] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Term:
        if not is_literal(atom):
            return env.get(atom)
        value = known_value(atom, {})
        return None if value is None or value.shape else ScalarTerm(value.item())

    for eqn in jaxpr.eqns:
        if any(getattr(v.aval, "shape", None) == () for v in eqn.outvars):
            terms = _results(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, terms, strict=False))
    return [read(v) for v in jaxpr.outvars]


def _results(eqn: Any, terms: list[Term]) -> list[Term]:
    """Return the terms of an equation's results; empty where they are unknown."""
    name = eqn.primitive.name
    if region_kind(eqn) is RegionKind.CALL:
        return scalar_terms(region_jaxprs(eqn)[0], terms)
    if name in IDENTITIES:
        return terms
    op = traits_of(name).compares or name
    if op in _COMPARISONS or op == "and":
        return [(op, tuple(terms))]
    known = [term for term in terms if isinstance(term, ScalarTerm)]
    if len(known) != len(terms):
        return []
    pairs = zip(known, eqn.invars, strict=True)
    number = fold(
        eqn,
        [
            np.asarray(t.value, v.aval.dtype) if t.index is None else None
            for t, v in pairs
        ],
    )
    if number is not None:
        return [ScalarTerm(number.item())]
    if name not in ("add", "sub"):
        return []
    one, other = known
    if one.index is None and name == "add":
        one, other = other, one
    amount = other.value if name == "add" else -other.value
    return [replace(one, value=one.value + amount)] if other.index is None else []


def while_trip_count(
    cond: Any,
    body: Any,
    num_cond_consts: int,
    num_body_consts: int,
    known: Mapping[int, float],
) -> tuple[int, bool] | None:
    """Return the trips of a `while` loop.

    Args:
      cond, body: its open jaxprs.
      num_cond_consts, num_body_consts: number of their inputs that are constants.
      known: position among the operands of the `while` → value, for operands that are
        known numbers.

    Returns:
      The count, and whether it follows from the program. A loop that may also
      end early (`i < n and not done`) gets its bound, marked as not known. None where
      the program has no bound, or one above `MAX_BOUND` that the loop need not reach.
    """
    num_consts = num_cond_consts + num_body_consts
    consts = [ScalarTerm(known[i]) if i in known else None for i in range(num_consts)]
    carries = [ScalarTerm(0, k) for k in range(len(body.invars) - num_body_consts)]
    after = scalar_terms(body, [*consts[num_cond_consts:], *carries])
    (test,) = scalar_terms(cond, [*consts[:num_cond_consts], *carries])

    def step(term: Term) -> float | None:
        """Return the amount that one trip adds; None where it is no known number."""
        if not isinstance(term, ScalarTerm) or term.index is None:
            return None if term is None else 0
        new = after[term.index]
        is_own = isinstance(new, ScalarTerm) and new.index == term.index
        return new.value if is_own else None  # type: ignore[union-attr]

    def trips(test: Term) -> tuple[int, bool] | None:
        """Return how often a condition holds; None where that is unknown."""
        if not isinstance(test, tuple):
            return None
        op, args = test
        if op == "and":
            bounds = [b[0] for b in map(trips, args) if b is not None]
            return (min(bounds), False) if bounds else None
        if not all(isinstance(term, ScalarTerm) for term in args):
            return None
        left, right = args if step(args[0]) != 0 else reversed(args)
        op = op if left is args[0] else _COMPARISONS[op]
        init, limit = (
            x.value
            + (0 if x.index is None else known.get(num_consts + x.index, math.nan))
            for x in (left, right)
        )
        by = step(left)
        return _trips(op, init, limit, by) if by and step(right) == 0 else None

    found = trips(test)
    is_guard = found is not None and found[0] > MAX_BOUND and not found[1]
    return None if is_guard else found


def _trips(op: str, init: float, limit: float, step: float) -> tuple[int, bool] | None:
    if op in (">", ">="):
        init, limit, step = -init, -limit, -step
    distance = limit - init
    if not math.isfinite(distance) or not math.isfinite(step):
        return None
    holds_at_limit = op in ("<=", ">=")
    if distance < 0 or (distance == 0 and not holds_at_limit):
        return 0, True
    if step <= 0:
        return None
    trips = (
        math.floor(distance / step) + 1
        if holds_at_limit
        else math.ceil(distance / step)
    )
    return trips, True
