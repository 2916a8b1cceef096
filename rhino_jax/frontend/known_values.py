"""Propagation of constants: values that a jaxpr computes from constants alone, and the
trip counts of `while` loops that follow.

Scalars and short integer arrays are followed, through arithmetic and changes of shape:
the bounds and steps of loops, and the positions of windows. A loop that counts
(`lax.fori_loop`, `while i < n`) compares a carry with a limit and adds a literal to it.
Both are found through nested calls and converts; any other count is a guess, and is
marked as one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from rhino_jax._compat import is_literal
from rhino_jax.frontend.regions import region_jaxprs, region_kind
from rhino_jax.frontend.registry import traits_of
from rhino_jax.ir.program import RegionKind


MAX_KNOWN = 16
"""Maximal number of elements of an array that is followed: window positions, one per
dim."""

IDENTITIES = frozenset({"convert_element_type", "copy", "copy_p", "stop_gradient"})
"""Primitives whose result is the same number as their operand."""

Fold = Callable[[Any, Sequence[Any]], Any]
"""A function of an equation and the values of its operands."""


def _broadcast(eqn: Any, values: Sequence[Any]) -> np.ndarray:
    shape, dims = eqn.outvars[0].aval.shape, eqn.params["broadcast_dimensions"]
    apart = [1] * len(shape)
    for d, size in zip(dims, values[0].shape, strict=True):
        apart[d] = size
    return np.broadcast_to(values[0].reshape(apart), shape)


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
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda eqn, values: np.concatenate(values, eqn.params["dimension"]),
    "reshape": _reshaped,
    "squeeze": _reshaped,
}


def can_be_known(aval: Any) -> bool:
    """Whether values of a type are followed: real scalars and short integer arrays."""
    dtype, shape = getattr(aval, "dtype", None), getattr(aval, "shape", None)
    if not isinstance(dtype, np.dtype) or shape is None:
        return False
    if jnp.issubdtype(dtype, np.integer):
        return math.prod(shape) <= MAX_KNOWN
    is_real = jnp.issubdtype(dtype, np.floating) or jnp.issubdtype(dtype, np.bool_)
    return is_real and shape == ()


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
    """A scalar of a jaxpr, as a term over the jaxpr's inputs.

    Attributes:
      op: "input" (see `index`), "number" (see `value`), a comparison, as "<", the name
        of `and`, or of an arithmetic op; "?" where unknown.
    """

    op: str
    index: int = -1
    value: float = 0
    args: tuple[ScalarTerm, ...] = ()

    def known(self, aval: Any) -> np.ndarray | None:
        """Return a number as an array of a type; None for other terms."""
        return np.asarray(self.value, aval.dtype) if self.op == "number" else None


_UNKNOWN = ScalarTerm("?")


def scalar_terms(jaxpr: Any, inputs: Sequence[ScalarTerm]) -> list[ScalarTerm]:
    """Return the scalar results of an open jaxpr as terms over its inputs.

    One pass over the scalar equations, so its cost is linear.

    Args:
      jaxpr: an open jaxpr.
      inputs: terms of its invars.
    """
    env: dict[Any, ScalarTerm] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> ScalarTerm:
        if not is_literal(atom):
            return env.get(atom, _UNKNOWN)
        value = known_value(atom, {})
        if value is None or value.shape:
            return _UNKNOWN
        return ScalarTerm("number", value=value.item())

    for eqn in jaxpr.eqns:
        if any(getattr(v.aval, "shape", None) == () for v in eqn.outvars):
            terms = _results(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, terms, strict=False))
    return [read(v) for v in jaxpr.outvars]


def _results(eqn: Any, terms: list[ScalarTerm]) -> list[ScalarTerm]:
    """Return the terms of an equation's results; empty where they are unknown."""
    name = eqn.primitive.name
    if region_kind(eqn) is RegionKind.CALL:
        return scalar_terms(region_jaxprs(eqn)[0], terms)
    if name in IDENTITIES:
        return terms
    pairs = zip(terms, eqn.invars, strict=True)
    number = fold(eqn, [term.known(v.aval) for term, v in pairs])
    if number is not None:
        return [ScalarTerm("number", value=number.item())]
    op = traits_of(name).compares or name
    if op in ARITHMETIC or op in _COMPARISONS or op == "and":
        return [ScalarTerm(op, args=tuple(terms))]
    return []


def _inputs(jaxpr: Any) -> list[ScalarTerm]:
    return [ScalarTerm("input", i) for i in range(len(jaxpr.invars))]


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
    steps = tuple(scalar_terms(body, _inputs(body)))
    (test,) = scalar_terms(cond, _inputs(cond))
    found = _WhileLoop(steps, num_cond_consts, num_body_consts, known).trips(test)
    is_guard = found is not None and found[0] > MAX_BOUND and not found[1]
    return None if is_guard else found


@dataclass(frozen=True, slots=True)
class _WhileLoop:
    """The known facts of a loop.

    Attributes:
      steps: the next value of every carry, as terms over the body's inputs.
      num_cond_consts, num_body_consts, known: as in `while_trip_count`.
    """

    steps: tuple[ScalarTerm, ...]
    num_cond_consts: int
    num_body_consts: int
    known: Mapping[int, float]

    def trips(self, test: ScalarTerm) -> tuple[int, bool] | None:
        """Return how often a condition holds; None where that is unknown."""
        if test.op == "and":
            bounds = [b[0] for b in map(self.trips, test.args) if b is not None]
            return (min(bounds), False) if bounds else None
        if test.op not in _COMPARISONS:
            return None
        op, (left, right) = test.op, test.args
        if self._step(self._carry(left)) == 0:
            left, right, op = right, left, _COMPARISONS[op]
        init, limit = self._first(left), self._first(right)
        step, limit_step = self._step(self._carry(left)), self._step(self._carry(right))
        if init is None or limit is None or not step or limit_step != 0:
            return None
        return _trips(op, init, limit, step)

    def _carry(self, term: ScalarTerm) -> int | None:
        """Return the position of the carry that a term of the condition is; -1 for
        constants."""
        if term.op == "number":
            return -1
        if term.op != "input":
            return None
        return max(term.index - self.num_cond_consts, -1)

    def _first(self, term: ScalarTerm) -> float | None:
        """Return the value of a term of the condition before the first trip, or
        None."""
        if term.op == "number":
            return term.value
        if term.op != "input":
            return None
        is_const = term.index < self.num_cond_consts
        return self.known.get(term.index + (0 if is_const else self.num_body_consts))

    def _step(self, carry: int | None) -> float | None:
        """Return the amount that one trip adds to a carry; None where that is no known
        number."""
        if carry is None:
            return None
        if carry < 0:
            return 0
        term, own = self.steps[carry], ScalarTerm("input", self.num_body_consts + carry)
        if term == own:
            return 0
        if term.op == "add" and term.args[1] == own:
            return self._amount(term.args[0])
        if term.op in ("add", "sub") and term.args[0] == own:
            amount = self._amount(term.args[1])
            return amount if amount is None or term.op == "add" else -amount
        return None

    def _amount(self, term: ScalarTerm) -> float | None:
        """Return a term of the body as the number that it is on every trip; None where
        it is not."""
        if term.op == "number":
            return term.value
        if term.op == "input" and term.index < self.num_body_consts:
            return self.known.get(self.num_cond_consts + term.index)
        return None


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
