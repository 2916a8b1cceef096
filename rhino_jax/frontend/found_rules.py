"""The rules of a program's equations: those of equal ones are found once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from rhino_jax import _compat
from rhino_jax.frontend.array_types import type_of
from rhino_jax.frontend.registry import OpRule
from rhino_jax.ir.factor import Rule


class FoundRules:
    """Rules, as far as equations have been met: unrolled layers repeat theirs."""

    def __init__(self, find: Callable[[Any], tuple[OpRule, bool]]) -> None:
        """
        Args:
          find: equation → its rule, and whether that is known.
        """
        self._find = find
        self._found: dict[Hashable, tuple[OpRule, bool]] = {}
        self._rules: dict[Rule, Rule] = {}
        self._same: dict[int, tuple[Rule, Rule]] = {}  # id → it, the one like it

    def of(self, eqn: Any) -> tuple[OpRule, bool]:
        """That of an equation, and whether it is known."""
        seen = _seen_of(eqn)
        if seen is None:
            return self._find(eqn)
        found = self._found.get(seen)
        if found is None:
            found = self._found[seen] = self._find(eqn)
        return found

    def one(self, rule: Rule) -> Rule:
        """The one object for all rules that are equal to it."""
        met = self._same.get(id(rule))
        if met is None:
            met = self._same[id(rule)] = rule, self._rules.setdefault(rule, rule)
        return met[1]


def _seen_of(eqn: Any) -> Hashable | None:
    """All that rules see of an equation; None where nothing else looks like it."""
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
