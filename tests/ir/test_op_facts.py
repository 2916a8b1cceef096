"""Facts that rules state of ops are true of their numbers."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rhino_jax._compat import bind_eqn, is_literal, jaxpr_consts, open_jaxpr
from rhino_jax.frontend.importer import rule_of
from rhino_jax.frontend.registry import traits_of
from rhino_jax.frontend.rules.reduce import COMBINE, identity
from rhino_jax.ir.op import item_bytes
from rhino_jax.ir.traits import Traits, positions
from tests.cases import covering
from tests.frontend.rule_cases import CASES, primitive
from tests.frontend.rule_cases_data import DATA_CASES
from tests.frontend.rule_cases_windows import WINDOW_CASES


ALL = {**CASES, **DATA_CASES, **WINDOW_CASES}
COMPARISONS = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "==": operator.eq, "!=": operator.ne,
}  # fmt: skip


def has_facts(name: str) -> bool:
    traits = traits_of(name)
    facts = traits.moves, traits.linear, traits.zeros, traits.compares, traits.reducer
    return primitive(name) is not None and any((*facts, traits.limit is not None))


def equations(name: str) -> Iterator[tuple[Any, Traits, list[np.ndarray]]]:
    """Yield the equations of a primitive in its cases, with their operands."""
    rng = np.random.default_rng(len(name))
    for case in ALL[name]:
        fn, args = case(rng)
        closed = jax.make_jaxpr(fn)(*args)
        jaxpr, env = open_jaxpr(closed), {}
        env.update(zip(jaxpr.constvars, jaxpr_consts(closed), strict=True))
        env.update(zip(jaxpr.invars, jax.tree.leaves(args), strict=True))
        for eqn in jaxpr.eqns:
            arrays = [v.val if is_literal(v) else env[v] for v in eqn.invars]
            if eqn.primitive.name == name:
                traits = rule_of(eqn)[0].traits
                assert traits is not None
                yield eqn, traits, [jnp.asarray(x) for x in arrays]
            env.update(zip(eqn.outvars, bind_eqn(eqn, arrays, eqn.params), strict=True))


def replaced(arrays: list[Any], group: Sequence[int], make: Any) -> list[Any]:
    return [make(x) if i in group else x for i, x in enumerate(arrays)]


def check_commutes(eqn: Any, arrays: list[Any], group: Any, reducer: str) -> None:
    """Check that an op of reduced operands is the reduction of the ops."""
    other = replaced(arrays, group, lambda x: jnp.roll(x, 1) + jnp.ones((), x.dtype))
    both = [
        COMBINE[reducer](a, b) if i in group else a
        for i, (a, b) in enumerate(zip(arrays, other, strict=True))
    ]
    results = (bind_eqn(eqn, xs, eqn.params) for xs in (arrays, other, both))
    for a, b, found in zip(*results, strict=True):
        expected = COMBINE[reducer](a, b)
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-4)


FACTUAL = [name for name in sorted(ALL) if has_facts(name)]


@pytest.mark.parametrize("name", covering(FACTUAL, {"lt", "tanh"}.__contains__))
def test_facts_are_true(name: str) -> None:
    for eqn, traits, arrays in equations(name):
        if any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in arrays):
            continue  # keys
        is_number = [np.issubdtype(x.dtype, np.number) for x in arrays]
        is_float = all(jnp.issubdtype(v.aval.dtype, np.inexact) for v in eqn.outvars)
        for reducer in {"sum", "max", traits.reducer} & COMBINE.keys():
            for group in traits.commutes_in(len(arrays), reducer):
                if is_float and all(is_number[i] for i in group):
                    check_commutes(eqn, arrays, group, reducer)
        for group in positions(
            traits.moves + traits.linear + traits.zeros, len(arrays)
        ):
            zeros = replaced(arrays, group, jnp.zeros_like)
            for found in bind_eqn(eqn, zeros, eqn.params):
                np.testing.assert_array_equal(found, np.zeros_like(found))
        if traits.compares:
            (found,) = bind_eqn(eqn, arrays, eqn.params)
            expected = COMPARISONS[traits.compares](*map(np.asarray, arrays))
            np.testing.assert_array_equal(found, expected)
        if traits.limit is not None:
            low = bind_eqn(eqn, [jnp.full_like(arrays[0], -1e4)], eqn.params)
            np.testing.assert_allclose(low[0], traits.limit)
        for i in traits.accumulates if traits.is_elementwise else ():
            others = [k for k in range(len(arrays)) if k != i]
            read = replaced(arrays, others, partial(none_of, traits.reducer))
            (found,) = bind_eqn(eqn, read, eqn.params)
            np.testing.assert_allclose(found, arrays[i] + jnp.zeros_like(found))


def none_of(reducer: str, x: Any) -> Any:
    return jnp.full_like(x, identity(reducer, x.dtype))


def test_functions_applied_at_indices_are_not_linear() -> None:
    def traits(fn: Any) -> Traits:
        (eqn,) = [
            eqn
            for eqn in open_jaxpr(jax.make_jaxpr(fn)(jnp.ones((4, 3)))).eqns
            if eqn.primitive.name == "scatter"
        ]
        found = rule_of(eqn)[0].traits
        assert found is not None
        return found

    assert traits(lambda x: x.at[1].set(2.0)).commutes_in(3) == ((0, 2),)
    assert traits(lambda x: x.at[1].apply(jnp.sin)).commutes_in(3) == ()


def test_an_element_has_the_bytes_that_numpy_gives_it() -> None:
    types = {n: getattr(ml_dtypes, n) for n in ml_dtypes.__all__}
    sizes = {
        name: np.dtype(t).itemsize
        for name, t in types.items()
        if isinstance(t, type) and issubclass(t, np.generic)
    }
    assert "int2" in sizes
    assert {name: item_bytes(name) for name in sizes} == sizes
