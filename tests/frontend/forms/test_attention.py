"""`rhino.attention` and the zoo's `attention=`: equal numbers in every form."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernels,
)

import rhino_jax as rhino
from rhino_jax import models
from rhino_jax.ir.transform import FORMS
from tests.runtime.stand_in import normal


MESH = {"data": 4, "model": 2}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the splash kernel on CPU."""
    make = partial(kernels.make_splash_mha, interpret=True)
    monkeypatch.setattr(kernels, "make_splash_mha", make)


def forms_of(plan: rhino.Plan) -> list[str]:
    return [f for t in plan.transforms if t.name == FORMS for f in t.chosen.values()]


@pytest.mark.parametrize(
    ("form", "causal", "keys"),
    [
        ("xla", True, 2),
        ("cudnn", True, 2),
        ("splash", True, 2),
        pytest.param("cudnn", False, 4, marks=pytest.mark.slow),
        pytest.param("splash", False, 4, marks=pytest.mark.slow),
    ],
)
def test_sharded_forms_give_the_values_and_gradients_of_plain_attention(
    form: str, causal: bool, keys: int
) -> None:
    """With as many heads of keys and values as of queries, and with half of them."""

    def step(q: Any, k: Any, v: Any) -> Any:
        def loss(q: Any, k: Any, v: Any) -> Any:
            mixed = rhino.attention(q, k, v, causal=causal, scale=0.5)
            return jnp.mean(jnp.square(mixed.astype(jnp.float32)))

        return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)

    heads = {"q": 4, "k": keys, "v": keys}
    args = [
        normal(i, 8, 256, n, 16).astype(jnp.bfloat16)
        for i, n in enumerate(heads.values())
    ]
    plan = rhino.plan(step, *args, mesh=MESH, pins={"*": form})
    assert forms_of(plan) == ([] if form == "xla" else [form])
    got, want = plan.jit(step)(*args), jax.jit(step)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = float(jnp.abs(b).max())
        np.testing.assert_allclose(
            np.asarray(a, np.float32) / scale,
            np.asarray(b, np.float32) / scale,
            atol=2e-2,
        )


def test_the_planner_takes_what_the_hardware_has() -> None:
    q = jax.ShapeDtypeStruct((16, 2048, 8, 128), jnp.bfloat16)

    def mix(q: Any) -> Any:
        return rhino.attention(q, q, q, causal=True)

    plan = rhino.plan(mix, q, mesh=MESH, hardware="h100:8")
    assert forms_of(plan) == ["cudnn"]
    (note,) = (n for n in plan.notes if " runs as " in n)
    assert "test_attention.py" in note


@pytest.mark.parametrize(
    ("query", "options"),
    [
        ((8, 100, 4, 16), {}),
        ((8, 256, 4, 16), {"mask": jnp.ones((1, 1, 256, 256), bool)}),
    ],
)
def test_splash_is_left_where_it_has_no_such_attention(
    query: Any, options: Any
) -> None:
    q = jax.ShapeDtypeStruct(query, jnp.float32)
    mesh = {"data": 8}
    plan = rhino.plan(lambda q: rhino.attention(q, q, q, **options), q, mesh=mesh)
    (note,) = (n for n in plan.notes if " runs as " in n)
    assert "runs as 'xla'" in note
    # cuDNN's kernels are of 16 bits.
    assert "splash: " in note and "cudnn: " in note


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "form"),
    [
        ("gpt-tiny", "cudnn"),
        ("gpt-tiny", "splash"),
        ("gpt-tiny-unrolled", "choose"),
        ("llama-tiny", "cudnn"),
        ("llama-tiny", "splash"),
        ("moe-tiny", "choose"),
    ],
)
def test_models_take_a_form(model: str, form: str) -> None:
    def loss_of(form: str) -> float:
        options = {"seq_len": 128, "dtype": "bfloat16", "batch": 8}
        work = models.get(model, attention=form, **options)
        args = work.make_args(jax.random.key(0))
        plan = rhino.plan(work.step, *args, mesh=MESH)
        assert forms_of(plan) in ([], ["cudnn"], ["splash"])
        return float(plan.jit(work.step)(*args)[-1])

    assert loss_of(form) == pytest.approx(loss_of("xla"), rel=2e-3)


def test_models_know_no_other_form() -> None:
    with pytest.raises(models.ModelConfigError, match="attention"):
        models.get("gpt-tiny", attention="flash")
