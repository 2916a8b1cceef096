"""Large ops without a rule are warned of, rules without an op noted."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive  # noqa: TID251  as users make theirs

import rhino_jax as rhino
from rhino_jax.frontend import registry
from rhino_jax.planner import notes


strange = Primitive("strange_op")
strange.def_abstract_eval(lambda x: x)
strange.def_impl(lambda x: x)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(notes, "_TOLD", set())
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    monkeypatch.setattr(registry, "_USER_RULES", set())
    monkeypatch.setattr(registry, "_MET", set())
    yield


def large(x: Any) -> Any:
    return strange.bind(x) + 1


def small(x: Any) -> Any:
    y = strange.bind(x[:1, :1])
    return (x @ x).at[0, 0].add(y[0, 0])


def planned(fn: Any) -> tuple[rhino.Plan, list[Any]]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plan = rhino.plan(
            fn, jnp.ones((64, 64)), mesh={"d": 8}, progress=False, level="fast"
        )
    return plan, [w for w in told if w.category is rhino.RhinoWarning]


def test_a_large_op_without_a_rule_is_warned_of_once() -> None:
    _, (told,) = planned(large)
    text = str(told.message)
    assert "`strange_op` has no rule" in text and "50 % of the bytes" in text
    assert "register_rule('strange_op'" in text
    assert told.filename == __file__
    assert "strange.bind(x) + 1" in open(__file__).read().splitlines()[told.lineno - 1]
    assert planned(large)[1] == []
    _, again = planned(jax.jit(lambda x: strange.bind(x)))
    assert len(again) == 1  # another function


def test_a_small_one_is_noted_only() -> None:
    plan, told = planned(small)
    assert told == []
    assert any("replicated for want of a rule: strange_op" in n for n in plan.notes)


def test_a_rule_of_another_name_is_hinted_at_and_noted() -> None:
    rhino.register_rule("strangee_op", "a b -> a b")
    plan, (told,) = planned(large)
    assert "Did you mean 'strangee_op'?" in str(told.message)
    (note,) = [n for n in plan.notes if "no op has had" in n]
    assert "'strangee_op'. Did you mean 'strange_op'?" in note


def test_a_kernel_without_a_name_is_to_be_named() -> None:
    import jax.experimental.pallas as pl

    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * 2

    def fn(x: Any, **named: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=shape, interpret=True, **named)(x)

    _, (told,) = planned(fn)
    assert "Give the kernel a name" in str(told.message)
    _, (told,) = planned(lambda x: fn(x, name="twice"))
    assert "register_rule('twice'" in str(told.message)


def test_a_primitive_or_its_name_registers() -> None:
    for key in (strange, "strange_op"):
        rhino.register_rule(key, "a b -> a b")
        plan, told = planned(large)
        assert told == [] and plan.coverage.ops == 1
        assert not any("no op has had" in n for n in plan.notes)
        registry._USER_RULES.clear()
        del registry._RULES["strange_op"]


def test_a_function_that_gives_no_rule() -> None:
    rhino.register_rule("strange_op", lambda ctx: "a b -> a b")
    with pytest.raises(rhino.RuleError, match=r"gives no rhino\.OpRule") as caught:
        planned(large)
    assert "test_notes.py" in caught.value.where


def printing(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        h = jnp.tanh(x @ w)
        jax.debug.print("mean {m}", m=h.mean())
        return jnp.mean(h**2)

    return w - 0.1 * jax.grad(loss)(w)


@pytest.mark.parametrize("count", [1, 2])
def test_what_micro_batches_leave_out_is_warned_of_once(count: int) -> None:
    arrays = jnp.ones((8, 8)), jnp.ones((16, 8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            rhino.plan(printing, *arrays, mesh={"x": 2}, microbatches=count)
    found = [str(w.message) for w in caught if "does not run" in str(w.message)]
    assert len(found) == (count > 1)
    if found:
        assert "test_notes.py" in found[0] and "2 micro-batches" in found[0]
