"""Functions with forms: where rhino does not plan, and in traces for a plan."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax.errors import OptionError
from rhino_jax.frontend.trace import Traced, trace
from rhino_jax.ir.transform import FORMS, chosen
from rhino_jax.passes.apply import apply_passes


def sine(x: Any) -> Any:
    return jnp.sin(x)


def as_cosine(x: Any) -> Any:
    return jnp.cos(x - jnp.pi / 2)


wave = rhino.choose(sine=sine, cosine=as_cosine)
X = jnp.arange(8.0)


def scanned(x: Any) -> Any:
    return jax.lax.scan(lambda carry, _: (wave(carry), None), x, None, length=3)[0]


@pytest.mark.parametrize(
    "run",
    [
        wave,
        jax.jit(wave),
        jax.vmap(wave),
        jax.grad(lambda x: wave(x).sum()),
        jax.checkpoint(wave),
        scanned,
    ],
)
def test_without_a_planner_the_first_form_runs(run: Any) -> None:
    # The other form subtracts.
    assert "sub" not in str(jax.make_jaxpr(run)(X))
    assert np.isfinite(run(X)).all()


def traced(fn: Any, *args: Any) -> Traced:
    return trace(fn, args or (X,), {})


def with_form(found: Traced, form: str) -> Traced:
    """A traced function whose calls all take a form."""
    assert found.forms is not None
    keys = dict.fromkeys((site.key for site in found.forms.sites), form)
    return apply_passes(found, [chosen(FORMS, keys)])


def in_form(found: Traced, form: str) -> str:
    return str(with_form(found, form).closed_jaxpr)


def test_alike_calls_are_one_and_others_are_not() -> None:
    def layers(x: Any) -> Any:
        for _ in range(3):
            x = wave(x)
        return wave(x) + wave(x[:4]).sum()

    forms = traced(layers).forms
    assert forms is not None
    keys = [site.key for site in forms.sites]
    types = "float32[8]", "float32[8] #2", "float32[4]"
    assert keys == [f"layers: sine | cosine of {t}" for t in types]
    lines = [site.source.line for site in forms.sites]
    assert lines[0] < lines[1] == lines[2]


def test_functions_without_forms_have_none() -> None:
    assert traced(jnp.sin).forms.sites == ()


def test_values_and_gradients_take_the_same_form() -> None:
    found = traced(jax.value_and_grad(lambda x: wave(x).sum()))
    first, other = in_form(found, "sine"), in_form(found, "cosine")
    assert first == str(found.closed_jaxpr) and "sub" not in first
    # The derivative of a cosine is a negated sine.
    assert {"sub", "cos", "sin", "neg"} <= {*other.replace("=", " ").split()}


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, jax.vmap])
def test_layers_that_jax_has_traced_before_take_the_form(wrap: Any) -> None:
    layer = wrap(wave)
    layer(X)
    found = traced(lambda x: layer(layer(x)))
    assert "sub" not in str(found.closed_jaxpr)
    assert in_form(found, "cosine").count("sub") >= 1
    assert "sub" not in in_form(found, "sine")
    assert "sub" not in str(jax.make_jaxpr(layer)(X))


def test_forms_may_capture_values_of_the_function_and_constants() -> None:
    table = jnp.arange(8.0)

    def plus(x: Any, y: Any) -> Any:
        add = rhino.choose(one=lambda x: x + y, two=lambda x: (x + y) + 0 * table)
        return add(x)

    found = traced(plus, X, X)
    assert found.forms is not None and len(found.forms.sites) == 1
    other = with_form(found, "two")
    assert len(found.program.inputs) == len(other.program.inputs) == 2
    assert "mul" in str(other.closed_jaxpr) and other.consts == ()


def test_other_arguments_are_passed_as_they_are() -> None:
    def power(x: Any, *, n: int, name: str) -> Any:
        assert isinstance(n, int) and name == "p"
        return x**n

    def by_products(x: Any, *, n: int, name: str) -> Any:
        return jnp.prod(jnp.stack([x] * n), axis=0)

    raised = rhino.choose(power=power, products=by_products)
    found = traced(lambda x: raised(x, n=3, name="p"))
    assert "reduce_prod" in in_form(found, "products")
    assert "reduce_prod" not in str(found.closed_jaxpr)


def test_a_form_that_cannot_be_traced_is_left_with_its_reason() -> None:
    def missing(x: Any) -> Any:
        raise RuntimeError("no such library")

    found = traced(lambda x: rhino.choose(a=missing, b=sine)(x))
    assert found.forms is not None
    (site,) = found.forms.sites
    assert site.left == {"a": "RuntimeError: no such library"} and site.first == "b"
    with pytest.raises(rhino.TraceError, match="no form can be traced") as raised:
        traced(lambda x: rhino.choose(a=missing)(x))
    assert "a: RuntimeError: no such library" in raised.value.numbers


def test_forms_with_other_results_are_refused() -> None:
    other = rhino.choose(a=sine, b=lambda x: jnp.sin(x).astype(jnp.bfloat16))
    with pytest.raises(rhino.TraceError, match="'a' and 'b'") as raised:
        traced(lambda x: other(x))
    assert raised.value.numbers == "a: 'float32[8]'; b: 'bfloat16[8]'"
    assert "test_choose.py" in raised.value.where and raised.value.fix


def test_weakly_typed_results_are_refused_where_the_program_returns_them() -> None:
    def weak(x: Any) -> Any:
        return jnp.asarray(1.0)

    def strong(x: Any) -> Any:
        return jnp.ones((), jnp.float32)

    found = traced(lambda x: rhino.choose(a=weak, b=strong)(x))
    with pytest.raises(rhino.TraceError, match="other types with forms 'b'"):
        in_form(found, "b")


@pytest.mark.parametrize(
    ("forms", "what"), [({}, "no forms"), ({"a": sine, "b": 3}, "'b' is no function")]
)
def test_what_is_no_function_is_refused(forms: Any, what: str) -> None:
    with pytest.raises(OptionError, match=what) as raised:
        rhino.choose(**forms)
    assert raised.value.where and raised.value.numbers and raised.value.fix


def test_a_form_of_another_platform_says_so() -> None:
    def fused(q: Any) -> Any:
        return jax.nn.dot_product_attention(q, q, q, implementation="cudnn")

    q = jax.ShapeDtypeStruct((2, 16, 2, 8), jnp.bfloat16)
    attend = rhino.choose(fused=fused)
    found = traced(lambda q: attend(q), q)
    assert found.forms is not None
    (site,) = found.forms.sites
    assert not site.not_on("fused", "cpu")
    assert "not found for platform tpu" in site.not_on("fused", "tpu")
