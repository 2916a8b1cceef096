"""Which strategies an op has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rhino_jax.frontend.trace import trace
from rhino_jax.ir.factor import parse_rule
from rhino_jax.ir.spec import axes_of
from rhino_jax.model.strategies import enumerate_strategies, strategies
from rhino_jax.recipes.recipes import NOWHERE, AxisPlaces


def test_a_partial_sum_is_not_scattered_onto_a_batch_dim_that_is_cut() -> None:
    """XLA gathers whole operands for that: compiled, a mixture of experts moved three
    times the planned bytes."""
    x = jnp.ones((8, 4, 16))
    program = trace(lambda a, b: jnp.einsum("ebf,ebd->efd", a, b), (x, x), {}).program
    (dot,) = [op for op in program.ops if op.name == "dot_general"]
    assert dot.rule is not None
    found = strategies(dot.rule, ((8, 16, 16),), (2, 4))
    assert not [s for s in found if s.made[0][0] == (1,) and s.results[0][0] == (1, 0)]
    # Onto the same dim uncut, and onto others, it is.
    assert [s for s in found if s.made[0][0] == () and s.results[0][0] == (0,)]
    assert [s for s in found if s.made[0][1] == (1,) and s.results[0][1] == (1, 0)]


def test_what_lookups_leave_is_scattered_onto_no_batch_dim() -> None:
    """Of the logit of every label, which the operand has a row for too; not of the rows
    of an embedding, which has none."""

    def logits_of(logits: Any, labels: Any) -> Any:
        return jnp.take_along_axis(logits, labels[..., None], axis=-1)

    def scattered(fn: Callable[..., Any], *args: Any) -> set[tuple]:
        program = trace(fn, args, {}).program
        (op,) = (op for op in program.ops if op.name == "gather")
        assert op.rule is not None
        shapes = tuple(program.values[r].shape for r in op.results)
        found = strategies(op.rule, shapes, (2, 4))
        return {s.results[0] for s in found if s.partial and s.results != s.made}

    labels = jnp.zeros((16, 512), int)
    assert not scattered(logits_of, jnp.zeros((16, 512, 1024)), labels)
    lookup = scattered(lambda table, x: table[x], jnp.zeros((1024, 64)), labels)
    assert ((), (0,), ()) in lookup and ((), (), (0,)) in lookup


def test_where_axes_lie_is_what_specs_say() -> None:
    rule = parse_rule("b s d, d f -> b s f", [(4, 8, 8), (8, 8)], [(4, 8, 8)])
    every = strategies(rule, ((4, 8, 8),), (2, 4))
    places = AxisPlaces.of(every, 2, is_op=True)
    scattered = 0
    for k, strategy in enumerate(every):
        for axis in places.all:
            factor, dim = places.cut[k, axis], places.scattered[0][k, axis]
            sharded = [f for f, axes in enumerate(strategy.cut) if axis in axes]
            assert [factor] == (sharded or [NOWHERE])
            is_added = dim != NOWHERE and axis in strategy.results[0][dim]
            assert is_added == (
                axes_of(strategy.results[0]) - axes_of(strategy.made[0]) >= {axis}
            )
            scattered += is_added
    assert scattered > 10
    for row, strategy in zip(
        AxisPlaces.of(every, 2, is_op=False).cut, every, strict=True
    ):
        dims = {a: d for d, axes in enumerate(strategy.results[0]) for a in axes}
        assert row.tolist() == [dims.get(a, NOWHERE) for a in (0, 1)]


SIZES = (0, 1, 2, 3, 4, 6, 7, 8, 12, 16, 30)


@pytest.mark.parametrize("mesh", [(2,), (2, 4), (4, 4), (8, 3), (2, 2, 4)])
def test_ops_share_strategies_only_where_they_are_the_same(
    mesh: tuple[int, ...],
) -> None:
    rng = np.random.default_rng(0)
    shared: dict[object, int] = {}
    for _ in range(400):
        a, b, c, w = (int(rng.choice(SIZES)) for _ in range(4))
        text, ins, outs, halos = [
            ("a b, b c -> a c", [(a, b), (b, c)], [(a, c)], {}),
            ("(a b) c -> a b c", [(a * b, c)], [(a, b, c)], {}),
            ("a b c -> (a b) c", [(a, b, c)], [(a * b, c)], {}),
            ("a w~ -> a w~", [(a, w)], [(a, w)], {"w": (1, 2)}),
            ("a b! -> a", [(a, b)], [(a,)], {}),
            ("c a b -> (a b)", [(4 * c, a, b)], [(a * b,)], {}),
        ][rng.integers(6)]
        rule = parse_rule(text, ins, outs, halos=halos)
        padded = frozenset(np.flatnonzero(rng.random(len(rule.factors)) < 0.3).tolist())
        args = rule, tuple(outs), mesh, padded
        found = strategies(*args)
        assert found == tuple(enumerate_strategies(*args)), args
        shared[args] = id(found)
    assert len(set(shared.values())) < len(shared), "none are shared"
