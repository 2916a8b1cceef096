"""The harness itself: wrong rules are caught and named, right ones are let through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive  # noqa: TID251  as users make theirs
from jax.interpreters import mlir

from rhino_jax.errors import RuleError
from rhino_jax.frontend import registry
from rhino_jax.frontend.check.rule import check_rule
from rhino_jax.frontend.registry import OpContext, OpRule, register_rule
from rhino_jax.ir.factor import Factor, FactorKind, Rule, parse_rule


FEW: dict[str, Any] = {"num_shards": (2,), "max_pairs": 0}
X = np.random.default_rng(1).standard_normal((8, 4)).astype(np.float32)
RULE_OF_SLICES = registry._RULES["slice"]
RAMP = np.arange(32, dtype=np.float32).reshape(8, 4)


def as_rule(text: str, **options: Any) -> Callable[[OpContext], OpRule]:
    return lambda ctx: OpRule(
        parse_rule(text, ctx.in_shapes, ctx.out_shapes, **options)
    )


def without_reducer(ctx: OpContext) -> OpRule:
    factors = (Factor("a", 8, FactorKind.REDUCE), Factor("b", 4))
    return OpRule(Rule(factors, (((0,), (1,)),), (((1,),),)))


def moved_too_far(ctx: OpContext) -> OpRule:
    found = RULE_OF_SLICES(ctx)
    first, *others = found.rule.factors
    factors = (replace(first, shift=(first.shift or 0) + 1), *others)
    return replace(found, rule=replace(found.rule, factors=factors))


def pool(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (3, 1), (1, 1), "SAME")


WRONG: dict[str, tuple[str, Any, Callable[..., Any], tuple[Any, ...], str]] = {
    "parallel that is not": ("cumsum", as_rule("a b -> a b"), lax.cumsum, (X,), "`a`"),
    "sorted dim": ("sort", as_rule("a b -> a b"), jnp.sort, (X,), "`b`"),
    "missing reducer": (
        "reduce_sum", without_reducer, lambda x: x.sum(0), (X,), "shards differ",
    ),
    "wrong reducer": (
        "reduce_sum", as_rule("a b -> b", reducers={"a": "max"}),
        lambda x: x.sum(0), (X,), "'max'",
    ),
    "no halo": ("reduce_window_max", as_rule("a~ b -> a~ b"), pool, (RAMP,), "(0, 0)"),
    "half a halo": (
        "reduce_window_max", as_rule("a~ b -> a~ b", halos={"a": (1, 0)}),
        pool, (RAMP,), "(1, 0)",
    ),
    "shift": ("slice", moved_too_far, lambda x: x[2:], (X.repeat(2, 0),), "`a`"),
    "look-up that is not masked": (
        "gather", as_rule("v b, n _ -> n b"), lambda x, i: x[i],
        (X, np.array([1, 5, 7, 7])), "`v`",
    ),
    "updates that overwrite": (
        "scatter", as_rule("v@ b, n _, n b -> v@ b"),
        lambda x, i: x.at[i].set(jnp.arange(16.0).reshape(4, 4)),
        (X, np.array([1, 5, 7, 7])), "`n`",
    ),
    "swapped dims": (
        "transpose", as_rule("a b -> a b"), lambda x: x.T, (X[:4],), "`a`",
    ),
    "dims in the wrong order": (
        "reshape", as_rule("a b -> (b a)"), lambda x: x.reshape(-1), (X,), "`",
    ),
    "iota of every shard": (
        "argmax", as_rule("a b -> b", reducers={"a": "max"}),
        lambda x: x.argmax(0), (X,), "`a`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    primitive, rule, fn, args, clue = WRONG[name]
    check_rule(fn, *args, **FEW)
    monkeypatch.setitem(registry._RULES, primitive, rule)
    with pytest.raises(RuleError) as caught:
        check_rule(fn, *args, **FEW)
    text = str(caught.value)
    assert f"`{primitive}`" in text and clue in text
    assert caught.value.where and caught.value.numbers and caught.value.fix


def test_the_largest_difference_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = as_rule("a b -> b", reducers={"a": "max"})
    monkeypatch.setitem(registry._RULES, "reduce_sum", rule)
    ones = np.ones((8, 4), np.float32)
    with pytest.raises(RuleError, match="largest difference 4;"):
        check_rule(lambda x: x.sum(0), ones)


@pytest.fixture
def user_op() -> Any:
    """A primitive that a user might have: rows are scaled by their own sum."""
    op = Primitive("test_rescale")

    def impl(x: Any) -> Any:
        return x * x.sum(1, keepdims=True)

    op.def_impl(impl)
    op.def_abstract_eval(lambda x: x)
    mlir.register_lowering(op, mlir.lower_fun(impl, multiple_results=False))
    yield op
    registry._RULES.pop("test_rescale", None)
    registry._USER_RULES.discard("test_rescale")


def test_a_user_rule_is_checked(user_op: Any) -> None:
    register_rule(user_op, "a b! -> a b!")
    report = check_rule(user_op.bind, X)
    assert report.strategies == (("test_rescale", "a b! -> a b!", 2),)
    assert "2 strategies true" in str(report)
    register_rule(user_op, "a b -> a b")
    with pytest.raises(RuleError, match=r"factor `b` into 2"):
        check_rule(user_op.bind, X)


def test_an_op_without_rule_is_reported(user_op: Any) -> None:
    report = check_rule(lambda x: user_op.bind(x) + 1, X)
    assert report.unknown == ("test_rescale",)
    assert [name for name, *_ in report.strategies] == ["add"]


def test_a_kernel_is_run_on_its_shards() -> None:
    """A Pallas kernel's equation holds its grid, so the function itself is rerun."""
    from jax.experimental import pallas as pl

    def body(x: Any, y: Any) -> None:
        y[...] = x[...] * 2

    def double(x: Any) -> Any:
        return pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            interpret=True,
            name="test_double",
        )(x)

    try:
        register_rule("test_double", "a b -> a b")
        report = check_rule(double, X)
        assert [(n, r) for n, r, _ in report.strategies] == [
            ("test_double", "a b -> a b")
        ]
        assert report.num_strategies > 4
    finally:
        registry._RULES.pop("test_double", None)
        registry._USER_RULES.discard("test_double")


def test_an_op_that_fails_says_its_own_error_first(user_op: Any) -> None:
    def whole_only(x: Any) -> Any:
        if x.shape[0] != 8:
            raise ValueError("needs eight rows")
        return x

    user_op.def_impl(whole_only)
    mlir.register_lowering(user_op, mlir.lower_fun(whole_only, multiple_results=False))
    register_rule(user_op, "a b -> a b")
    with pytest.raises(RuleError, match="needs eight rows"):
        check_rule(user_op.bind, X)


def test_arguments_are_arrays() -> None:
    """Of NumPy's types, too, which JAX narrows."""
    cache = np.zeros((8, 4))
    report = check_rule(
        lambda x, i: lax.dynamic_update_slice(x, x[:1], (i, 0)), cache, 5
    )
    assert report.strategies[-1][2] > 4
    with pytest.raises(RuleError, match="pass small example arrays"):
        check_rule(jnp.sin, jax.ShapeDtypeStruct((8, 4), jnp.float32))


def test_loops_and_branches_are_entered() -> None:
    def fn(x: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            return jnp.sin(carry + row), carry

        carry, ys = lax.scan(step, x[0], x)
        carry = lax.cond(x[0, 0] > 0, jnp.cos, jnp.tan, carry)
        return lax.while_loop(lambda c: c[0] < 1, lambda c: c + 1, carry), ys

    names = {name for name, *_ in check_rule(fn, np.abs(X), **FEW).strategies}
    assert {"sin", "add", "cos", "lt"} <= names
    assert "tan" not in names
