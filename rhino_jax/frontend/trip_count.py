"""How often a `while` loop runs, where the program says so.

A loop that counts (`lax.fori_loop`, `while i < n`) compares a carry with a
limit and adds a literal to it. Both are found through nested calls and
converts; everything else is a guess, and is marked as one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rhino_jax._compat import is_literal
from rhino_jax.frontend.regions import region_jaxprs, region_kind
from rhino_jax.ir.program import RegionKind


ASSUMED_TRIP_COUNT = 10
"""Trips of a loop whose bound the program does not say: enough for its body to
weigh more than straight-line code, few enough not to drown the rest."""

MAX_BOUND = 100_000
"""A bound above this (a guard against endless loops) says nothing of the trips."""

_COMPARISONS = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
"""Each comparison, and the one with its operands swapped."""

PASSES = frozenset({"convert_element_type", "copy", "copy_p", "stop_gradient"})
"""Primitives whose result is the number that their operand is."""

_FOLDS: dict[str, Callable[[float, float], float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "max": max,
    "min": min,
}


@dataclass(frozen=True, slots=True)
class ScalarTerm:
    """A scalar of a jaxpr, traced back to where it comes from.

    Attributes:
      op: "input" (see `index`), "number" (see `value`), the name of a
        comparison, of `and`, or of an arithmetic op; "?" where not understood.
    """

    op: str
    index: int = -1
    value: float = 0
    args: tuple[ScalarTerm, ...] = ()


_UNKNOWN = ScalarTerm("?")


def scalar_terms(jaxpr: Any, inputs: Sequence[ScalarTerm]) -> list[ScalarTerm]:
    """Where the results of an open jaxpr come from, as far as they are scalars.

    One pass over the scalar equations, so its cost is linear.

    Args:
      jaxpr: an open jaxpr.
      inputs: terms of its invars.
    """
    env: dict[Any, ScalarTerm] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> ScalarTerm:
        if not is_literal(atom):
            return env.get(atom, _UNKNOWN)
        number = scalar_number(atom.val)
        return _UNKNOWN if number is None else ScalarTerm("number", value=number)

    for eqn in jaxpr.eqns:
        if any(getattr(v.aval, "shape", None) == () for v in eqn.outvars):
            terms = _results(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, terms, strict=False))
    return [read(v) for v in jaxpr.outvars]


def _results(eqn: Any, terms: list[ScalarTerm]) -> list[ScalarTerm]:
    """Terms of an equation's results; none where they are not understood."""
    name = eqn.primitive.name
    if region_kind(eqn) is RegionKind.CALL:
        return scalar_terms(region_jaxprs(eqn)[0], terms)
    if name in PASSES:
        return terms
    if name in _FOLDS and all(t.op == "number" for t in terms):
        return [
            ScalarTerm("number", value=_FOLDS[name](terms[0].value, terms[1].value))
        ]
    if name in _FOLDS or name in _COMPARISONS or name == "and":
        return [ScalarTerm(name, args=tuple(terms))]
    return []


def _inputs(jaxpr: Any) -> list[ScalarTerm]:
    return [ScalarTerm("input", i) for i in range(len(jaxpr.invars))]


def scalar_number(value: Any) -> float | None:
    """A literal as a number; None where it is not a real scalar."""
    if getattr(value, "shape", ()) != ():
        return None
    number = value.item() if hasattr(value, "item") else value
    return number if isinstance(number, (int, float)) else None


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
      num_cond_consts, num_body_consts: how many of their inputs are constants.
      known: values of those operands of the `while` that are known numbers, by
        position among all operands.
    Returns:
      The count, and whether it follows from the program. A loop that may also
      end early (`i < n and not done`) gets its bound, marked as not known. None where
      the program has no bound, or one above `MAX_BOUND` that data may not reach.
    """
    steps = tuple(scalar_terms(body, _inputs(body)))
    (test,) = scalar_terms(cond, _inputs(cond))
    found = _WhileLoop(steps, num_cond_consts, num_body_consts, known).trips(test)
    is_guard = found is not None and found[0] > MAX_BOUND and not found[1]
    return None if is_guard else found


@dataclass(frozen=True, slots=True)
class _WhileLoop:
    """What is known of a loop.

    Attributes:
      steps: what the body makes of every carry, in terms of the body's inputs.
      num_cond_consts, num_body_consts, known: as in `while_trip_count`.
    """

    steps: tuple[ScalarTerm, ...]
    num_cond_consts: int
    num_body_consts: int
    known: Mapping[int, float]

    def trips(self, test: ScalarTerm) -> tuple[int, bool] | None:
        """How often a condition holds; None where that cannot be told."""
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
        """Position of the carry that a term of the condition is; -1 for constants."""
        if term.op == "number":
            return -1
        if term.op != "input":
            return None
        return max(term.index - self.num_cond_consts, -1)

    def _first(self, term: ScalarTerm) -> float | None:
        """Value of a term of the condition before the first trip."""
        if term.op == "number":
            return term.value
        if term.op != "input":
            return None
        is_const = term.index < self.num_cond_consts
        return self.known.get(term.index + (0 if is_const else self.num_body_consts))

    def _step(self, carry: int | None) -> float | None:
        """What one trip adds to a carry; None where that is not a known number."""
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
        """A term of the body that is the same number on every trip."""
        if term.op == "number":
            return term.value
        if term.op == "input" and term.index < self.num_body_consts:
            return self.known.get(self.num_cond_consts + term.index)
        return None


def _trips(op: str, init: float, limit: float, step: float) -> tuple[int, bool] | None:
    if op in ("gt", "ge"):
        init, limit, step = -init, -limit, -step
    distance = limit - init
    if not math.isfinite(distance) or not math.isfinite(step):
        return None
    holds_at_limit = op in ("le", "ge")
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
