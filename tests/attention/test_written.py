"""Attention that is written out runs in other forms, with equal numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernels,
)

import rhino_jax as rhino
from rhino_jax.ir.transform import FORMS
from tests.runtime.stand_in import normal


MESH = {"data": 4, "model": 2}
LENGTH = 256


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the splash kernel on CPU."""
    make = partial(kernels.make_splash_mha, interpret=True)
    monkeypatch.setattr(kernels, "make_splash_mha", make)


def causal(n: int) -> jax.Array:
    return jnp.tril(jnp.ones((n, n), bool))


def as_einsums(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(causal(q.shape[1]), scores * 0.25, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(v.dtype), v)


def heads_first(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.swapaxes(1, 2) for x in (q / jnp.sqrt(16).astype(q.dtype), k, v))
    scores = (q @ k.swapaxes(2, 3)).astype(jnp.float32)
    rows = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
    columns = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 3)
    scores = scores + jnp.where(columns > rows, -jnp.inf, 0.0)
    e = jnp.exp(scores - scores.max(-1, keepdims=True))
    return ((e / e.sum(-1, keepdims=True)).astype(v.dtype) @ v).swapaxes(1, 2)


def grouped(q: Any, k: Any, v: Any) -> Any:
    """Two heads of queries for each head of keys."""
    q = q.reshape(*q.shape[:2], 2, 2, -1)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k[:, :, :2]) * 0.25
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(v.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v[:, :, :2])
    return out.reshape(*out.shape[:2], 4, -1)


def of_jax(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def of_jax_grouped(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k[:, :, :2], v[:, :, :2])


def of_flax(q: Any, k: Any, v: Any) -> Any:
    mask = nn.make_causal_mask(q[:, :, 0, 0])
    return nn.dot_product_attention(q, k, v, mask=mask)


def padded(q: Any, k: Any, v: Any) -> Any:
    """Keys that are padding, which only the data say, have no weight."""
    is_there = jnp.cumsum(k[:, :, 0, 0] > -9, axis=1) < LENGTH - 40
    bias = jnp.where(is_there, 0.0, -1e9)[:, None, None, :]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * 0.25 + bias
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(v.dtype), v)


def in_windows(q: Any, k: Any, v: Any) -> Any:
    near = jnp.abs(jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)) < 32
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * 0.25
    weights = jax.nn.softmax(jnp.where(near, scores, -jnp.inf)).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def dropped(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, scores.shape)
    weights = (jax.nn.softmax(scores) * kept).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def squared(q: Any, k: Any, v: Any) -> Any:
    """No softmax: sums of squares divide."""
    scores = jnp.square(jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32))
    weights = (scores / scores.sum(-1, keepdims=True)).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def over_queries(q: Any, k: Any, v: Any) -> Any:
    """Each key's weights sum to one, not each query's."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
    weights = jax.nn.softmax(scores, axis=2).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def other_maxima(q: Any, k: Any, v: Any) -> Any:
    """The sums are those of other exponentials."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
    e, f = jnp.exp(scores - scores.max(-1, keepdims=True)), 0.5 * scores
    sums = jnp.exp(f - f.max(-1, keepdims=True)).sum(-1, keepdims=True)
    return jnp.einsum("bhqk,bkhd->bqhd", (e / sums).astype(v.dtype), v)


def stopped(q: Any, k: Any, v: Any) -> Any:
    """No gradient flows through the weights."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
    weights = jax.lax.stop_gradient(jax.nn.softmax(scores)).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def rounded(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.int32)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def capped(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32))
    weights = jax.nn.softmax(scores).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def wider_values(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v.astype(jnp.float32))


def of_eight_bits(q: Any, k: Any, v: Any) -> Any:
    """`jax.nn` does not compute it in these types."""
    q, k, v = (x.astype(jnp.float8_e4m3fn) for x in (q, k, v))
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(product("bqhd,bkhd->bhqk", q, k)).astype(v.dtype)
    return product("bhqk,bkhd->bqhd", weights, v)


def short(q: Any, k: Any, v: Any) -> Any:
    return as_einsums(q[:, :64], k[:, :64], v[:, :64])


def operands(batch: int = 4) -> list[jax.Array]:
    return [
        normal(i, batch, LENGTH, 4, 16).astype(jnp.bfloat16) * (1 + i) for i in range(3)
    ]


def trained(attend: Callable[..., Any]) -> Callable[..., Any]:
    def step(*args: Any) -> Any:
        def loss(*args: Any) -> Any:
            return jnp.mean(jnp.square(attend(*args).astype(jnp.float32)))

        return jax.value_and_grad(loss, (0, 1, 2))(*args)

    return step


def unrolled(q: Any, k: Any, v: Any) -> Any:
    for _ in range(2):
        q = q + as_einsums(q, k, v)
    return q


def scanned(q: Any, k: Any, v: Any, is_rerun: bool = False) -> Any:
    layer = jax.jit(lambda q: q + as_einsums(q, k, v))
    layer = jax.checkpoint(layer) if is_rerun else layer
    return jax.lax.scan(lambda q, _: (layer(q), None), q, None, length=2)[0]


def forms_of(plan: rhino.Plan) -> list[str]:
    return [f for t in plan.transforms if t.name == FORMS for f in t.chosen.values()]


def hold(step: Callable[..., Any], args: Any, form: str, atol: float = 4e-2) -> None:
    """Check that a step in a form runs sharded, as on one device."""
    plan = rhino.plan(step, *args, mesh=MESH, pins={"*": form})
    assert forms_of(plan) == [form]
    text = str(jax.make_jaxpr(plan.jit(step))(*args))
    assert ("pallas_call" if form == "splash" else "dot_product_attention_fwd") in text
    got, want = plan.jit(step)(*args), jax.jit(step)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a / abs(b).max(), b / abs(b).max(), atol=atol)


@pytest.mark.parametrize("form", ["cudnn", "splash"])
@pytest.mark.parametrize(
    "attend",
    [
        as_einsums,
        pytest.param(heads_first, marks=pytest.mark.slow),
        grouped,
        pytest.param(of_jax, marks=pytest.mark.slow),
        pytest.param(of_jax_grouped, marks=pytest.mark.slow),
        pytest.param(of_flax, marks=pytest.mark.slow),
        pytest.param(unrolled, marks=pytest.mark.slow),
        pytest.param(scanned, marks=pytest.mark.slow),
        partial(scanned, is_rerun=True),
    ],
)
def test_values_and_gradients_are_those_of_the_written_form(
    attend: Callable[..., Any], form: str
) -> None:
    # That of flax rounds its weights to bfloat16 before it sums them.
    hold(trained(attend), operands(), form, 6e-2 if attend is of_flax else 4e-2)


def of_fewer_keys(q: Any, k: Any, v: Any) -> Any:
    k, v = k[:, :128], v[:, :128]
    mask = jnp.tril(jnp.ones((LENGTH, 128), bool))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * 0.25
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9)).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


@pytest.mark.parametrize("attend", [padded, in_windows, of_fewer_keys])
def test_masks_that_splash_does_not_have_are_a_bias(attend: Callable[..., Any]) -> None:
    hold(trained(attend), operands(), "cudnn")
    with pytest.raises(rhino.PinError, match="takes neither bias nor mask"):
        rhino.plan(attend, *operands(), mesh=MESH, pins={"*": "splash"})


def test_modules_of_libraries_are_found() -> None:
    x = normal(0, 4, LENGTH, 64)
    linen = nn.MultiHeadDotProductAttention(num_heads=4)
    variables = linen.init(jax.random.key(0), x)
    hold(lambda v, x: linen.apply(v, x), (variables, x), "splash")
    made = nnx.MultiHeadAttention(4, 64, decode=False, rngs=nnx.Rngs(0))
    graph, state = nnx.split(made)
    hold(lambda s, x: nnx.merge(graph, s)(x), (state, x), "splash")
    of_equinox = eqx.nn.MultiheadAttention(4, 64, key=jax.random.key(0))
    params, static = eqx.partition(of_equinox, eqx.is_array)

    def attend(params: Any, x: Any) -> Any:
        return jax.vmap(lambda y: eqx.combine(params, static)(y, y, y))(x)

    hold(attend, (params, x), "splash")


@pytest.mark.parametrize(
    "attend",
    [
        dropped,
        squared,
        over_queries,
        other_maxima,
        stopped,
        rounded,
        capped,
        wider_values,
        of_eight_bits,
        short,
    ],
)
def test_what_a_kernel_does_not_compute_is_not_found(
    attend: Callable[..., Any],
) -> None:
    with pytest.raises(rhino.PinError):
        rhino.plan(attend, *operands(), mesh=MESH, pins={"*": "splash"})


def test_forward_derivatives_are_as_written() -> None:
    args = operands()

    def step(*args: Any) -> Any:
        return jax.jvp(as_einsums, args, args)

    plan = rhino.plan(step, *args, mesh=MESH, pins={"*": "cudnn"})
    assert forms_of(plan) == ["cudnn"]
    got, want = plan.jit(step)(*args), jax.jit(step)(*args)
    for a, b in zip(got, want, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a / abs(b).max(), b / abs(b).max(), atol=2e-2)


def test_a_pin_of_another_call_leaves_attention_as_written() -> None:
    q = jax.ShapeDtypeStruct((16, 2048, 8, 128), jnp.bfloat16)
    wave = rhino.choose(sine=jnp.sin, cosine=jnp.cos)

    def step(*args: Any) -> Any:
        with jax.named_scope("wave"):
            q = wave(args[0])
        return as_einsums(q, *args[1:])

    plan = rhino.plan(step, q, q, q, hardware="v5e:2x4", pins={"wave": "cosine"})
    assert forms_of(plan) == ["cosine"]


def test_the_planner_takes_the_kernel_and_a_saved_plan_keeps_it(tmp_path: Any) -> None:
    """On TPU and GPU; by default, and on CPU, attention is as written."""
    q = jax.ShapeDtypeStruct((16, 2048, 8, 128), jnp.bfloat16)
    for hardware, form in ("v5e:2x4", "splash"), ("h100:8", "cudnn"):
        plan = rhino.plan(
            trained(as_einsums), q, q, q, hardware=hardware, attention="auto"
        )
        assert forms_of(plan) == [form]
        assert "as written" in " ".join(plan.notes)
        plan.save(tmp_path / "plan.json")
        assert forms_of(rhino.load_plan(tmp_path / "plan.json")) == [form]
        written = rhino.plan(trained(as_einsums), q, q, q, hardware=hardware)
        assert written.predicted.step_time_s > plan.predicted.step_time_s
        assert not forms_of(written)
    plan = rhino.plan(trained(as_einsums), q, q, q, mesh=MESH, attention="auto")
    assert not forms_of(plan)
