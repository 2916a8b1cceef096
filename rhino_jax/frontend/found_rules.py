"""A cache of the rules of a program's equations: equal equations, which have operands
and results of the same types and the same parameters, look theirs up once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

from jax.dtypes import float0

from rhino_jax import _compat
from rhino_jax.errors import TraceError
from rhino_jax.frontend.registry import OpRule
from rhino_jax.ir.factor import Rule


Type = tuple[tuple[int, ...], str]
"""Shape and element type."""


def type_of(aval: Any) -> Type:
    """Return shape and element type of an abstract value; tokens are scalars.

    Raises:
      TraceError: a dim is not a number.
    """
    shape = getattr(aval, "shape", ())
    dtype = getattr(aval, "dtype", "token")
    if all(type(d) is int for d in shape):
        return shape if type(shape) is tuple else tuple(shape), _name_of(dtype)
    if not all(isinstance(d, Integral) for d in shape):
        raise TraceError(
            "the program cannot be imported: it has a dim that is not a number.",
            numbers=f"shape {shape}",
            fix="trace the function with concrete shapes, not with symbolic ones.",
        )
    return tuple(int(d) for d in shape), _name_of(dtype)


@functools.cache
def _name_of(dtype: Any) -> str:
    return "float0" if dtype == float0 else str(dtype)


class FoundRules:
    """Rules by equation: unrolled layers repeat theirs."""

    def __init__(self, find: Callable[[Any], tuple[OpRule, bool]]) -> None:
        """Create an empty cache.

        Args:
          find: equation → its rule, and whether a rule is known.
        """
        self._find = find
        self._found: dict[Hashable, tuple[OpRule, bool]] = {}
        self._rules: dict[Rule, Rule] = {}
        self._same: dict[int, tuple[Rule, Rule]] = {}  # id → it, its equal

    def of(self, eqn: Any) -> tuple[OpRule, bool]:
        """Return the rule of an equation, and whether a rule is known."""
        seen = _seen_of(eqn)
        if seen is None:
            return self._find(eqn)
        found = self._found.get(seen)
        if found is None:
            found = self._found[seen] = self._find(eqn)
        return found

    def one(self, rule: Rule) -> Rule:
        """Return the one object that stands for all rules equal to this one."""
        met = self._same.get(id(rule))
        if met is None:
            met = self._same[id(rule)] = rule, self._rules.setdefault(rule, rule)
        return met[1]


class Borders:
    """Borders that shards have received from their neighbours for convolutions.

    The gradient of a convolution with respect to its kernel reads the image as the
    convolution does. XLA sends the borders of a value once, for all ops that read the
    same ones (CPU, v5e:2x4 and 8 H100, jax 0.10.2); twice where a plan shards its
    windows in only one of them, which is rare, and is left out.
    """

    def __init__(self) -> None:
        self._received: set[Hashable] = set()

    def of(self, operands: Sequence[int], rule: Rule) -> Rule:
        """Return the rule of a convolution, with the borders marked that earlier
        convolutions have received.

        Args:
          operands: ids of the values that it reads.
          rule: its rule.
        """
        factors, read = list(rule.factors), []
        for dim, held in enumerate(rule.operands[0] if rule.operands else ()):
            f = held[0] if held else None
            if f is None or factors[f].slides_over is None:
                continue
            # The border includes corners, so it depends on the dims before.
            read.append((dim, factors[f].halo))
            border = operands[0], tuple(read)
            if border in self._received:
                factors[f] = replace(factors[f], is_received=True)
            self._received.add(border)
        return replace(rule, factors=tuple(factors)) if read else rule


def _seen_of(eqn: Any) -> Hashable | None:
    """Return a key of everything that rules can see of an equation; None where it has
    none."""
    params = eqn.params
    if any(_compat.is_jaxpr(v) or callable(v) for v in params.values()):
        return None
    ins = tuple(type_of(v.aval) for v in eqn.invars)
    outs = tuple(type_of(v.aval) for v in eqn.outvars)
    seen = eqn.primitive, ins, outs, tuple(params.items())
    try:
        hash(seen)
    except TypeError:
        return None
    return seen
