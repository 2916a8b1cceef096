"""Equivalence of traces of one function that differ in weak types alone.

A Python number, or an array that was created from one, has a weak type; the state that
a step returns in its place may have a strong one. `jax.jit` traces and compiles the
step for both. In canonical form (`tracing.canonical`) both traces may be the same; one
compiled program then serves both.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import count, zip_longest
from typing import Any

from rhino_jax._compat import is_literal, jaxpr_consts, open_jaxpr
from rhino_jax.frontend.call import Signature
from rhino_jax.frontend.regions import closed_region_jaxprs
from rhino_jax.frontend.trace import Traced


_UNSAID = frozenset({
    "weak_type", "name", "debug", "debug_info", "name_and_src_info", "metadata",
})  # fmt: skip
"""Parameters of equations that do not affect values."""


def differ_in_weakness(one: Signature, other: Signature) -> bool:
    """Whether two signatures are equal except for weak types, and not equal."""
    return one != other and _strong(one) == _strong(other)


def _strong(signature: Signature) -> Signature:
    arrays = tuple((s, dtype, False, host) for s, dtype, _, host in signature.arrays)
    return replace(signature, arrays=arrays)


def compute_the_same(one: Traced, other: Traced) -> bool:
    """Whether two traces compute the same results, of the same types, weak or not.

    Args:
      one, other: traces whose signatures differ in weak types alone.
    """
    if one.captured or other.captured or one.donated != other.donated:
        return False
    consts = one.consts, other.consts
    if one.out_types != other.out_types or [*map(id, consts[0])] != [
        *map(id, consts[1])
    ]:
        return False
    ours, theirs = (_lines(traced.closed_jaxpr) for traced in (one, other))
    return all(a == b for a, b in zip_longest(ours, theirs))


def _lines(jaxpr: Any) -> Iterator[Hashable]:
    """Yield everything that a jaxpr computes, with values as numbers."""
    opened = open_jaxpr(jaxpr)
    known: dict[Any, Hashable] = {}
    numbers = count()

    def atom(x: Any) -> Hashable:
        if is_literal(x):
            return _type(x), repr(x.val)
        if x not in known:
            known[x] = next(numbers)
        return known[x]

    yield tuple(map(_type, opened.invars)), len(opened.constvars)
    for x in (*opened.constvars, *opened.invars):
        atom(x)
    for eqn in opened.eqns:
        read = tuple(map(atom, eqn.invars))
        bodies = closed_region_jaxprs(eqn)
        made = tuple((atom(x), _type(x)) for x in eqn.outvars)
        said = {k: _text(v, bodies) for k, v in eqn.params.items() if k not in _UNSAID}
        yield eqn.primitive.name, read, made, tuple(sorted(said.items()))
        for body in bodies:
            yield tuple(map(id, jaxpr_consts(body)))
            yield from _lines(body)
    yield tuple(map(atom, opened.outvars))


def _type(x: Any) -> tuple[Any, str]:
    return getattr(x.aval, "shape", None), str(getattr(x.aval, "dtype", x.aval))


def _text(param: Any, bodies: Sequence[Any]) -> str:
    """Return a parameter as text; empty for sub-jaxprs, which are compared separately,
    and for functions."""
    if isinstance(param, tuple | list):
        return f"({','.join(_text(x, bodies) for x in param)})"
    is_function = callable(param) and hasattr(param, "__name__")
    if is_function or any(param is body for body in bodies):
        return ""
    return repr(param)
