"""Pieces of models against independent formulas."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rhino_jax import models
from rhino_jax.models import (
    decode,
    gpt,
    layers,
    llama,
    mixture,
    moe,
    t5,
    unet,
    weights,
    wide_resnet,
)
from tests.cases import covering


def _normals(*shape):
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def _decoding(**overrides):
    workload = models.get("decode-tiny", **overrides)
    params, prompt = workload.make_args(jax.random.key(0))
    # Larger weights, or every step would repeat the token that it reads.
    params = {**params, "position": 20 * params["position"]}
    blocks = jax.tree.map(lambda leaf: 3 * leaf, params["blocks"])
    return workload, {**params, "blocks": blocks}, prompt


@pytest.mark.slow
def test_decoding_is_what_the_whole_model_says():
    workload, params, prompt = _decoding(
        num_layers=1, batch=2, seq_len=16, prompt_len=4
    )
    config = workload.config
    got = jax.jit(workload.step)(params, prompt)
    logits = jax.jit(lambda p, t: gpt.logits(config.model, p, t))
    tokens = np.zeros((2, 16), np.int32)
    tokens[:, :4] = prompt
    done = np.zeros(2, bool)
    for i in range(4, 16):
        if done.all():
            break
        chosen = np.argmax(logits(params, tokens)[:, i - 1], axis=-1)
        tokens[:, i] = np.where(done, config.end_token, chosen)
        done |= tokens[:, i] == config.end_token
    np.testing.assert_array_equal(got, tokens)
    assert len(np.unique(tokens[:, 4:])) > 3


@pytest.mark.slow
def test_decoding_stops_when_all_have_ended():
    workload, params, prompt = _decoding(num_layers=1, batch=1)
    answer = jax.jit(workload.step)(params, prompt)[0]
    start = workload.config.prompt_len
    # What is written second, or the first token that differs from it, ends the text.
    end = int(next(t for t in answer[start:] if t > 0))
    config = dataclasses.replace(workload.config, end_token=end)
    stopped = jax.jit(partial(decode.decode, config))(params, prompt)[0]
    first = start + int(jnp.argmax(answer[start:] == end))
    np.testing.assert_array_equal(stopped[: first + 1], answer[: first + 1])
    assert (stopped[first + 1 :] == 0).all()


@pytest.mark.slow
def test_a_sequence_that_ended_writes_only_the_end_token():
    workload, params, prompt = _decoding()
    free = np.asarray(jax.jit(workload.step)(params, prompt))
    start = workload.config.prompt_len
    firsts = free[:, start]
    end = next(int(t) for t in firsts if t > 0 and (firsts != t).any())
    config = dataclasses.replace(workload.config, end_token=end)
    tokens = np.asarray(jax.jit(partial(decode.decode, config))(params, prompt))
    for row in tokens[firsts == end]:
        answer = row[start:]
        written = answer[: len(answer) - int((answer[::-1] != 0).argmax())]
        assert (written == end).all()
        assert len(written) > 1


def test_rope_scores_depend_on_distance_only():
    x = np.ones((1, 8, 1, 16), np.float32)
    rotated = np.asarray(jax.jit(partial(llama.rope, theta=10000.0))(x))[0, :, 0]
    scores = rotated @ rotated.T
    for distance in range(8):
        np.testing.assert_allclose(np.diag(scores, distance), scores[0, distance], 1e-5)
    assert scores[0, 5] != pytest.approx(scores[0, 0])


def test_rope_takes_any_number_of_head_dims():
    x, rope = _normals(2, 8, 4, 3, 16), jax.jit(partial(llama.rope, theta=10000.0))
    grouped, flat = rope(x), rope(x.reshape(2, 8, 12, 16))
    np.testing.assert_array_equal(grouped.reshape(flat.shape), flat)


@pytest.mark.slow
def test_grouped_attention_is_repeated_heads():
    config = models.get("llama-tiny").config
    params = weights.draw(llama.block_weights(config), jax.random.key(0))["attention"]
    x = _normals(2, 8, config.d_model)
    mask = layers.causal_mask(8)
    fn = partial(llama.grouped_attention, theta=config.rope_theta)
    got = jax.jit(fn)(params, x, mask)
    want = jax.jit(partial(_repeated_heads, config))(params, x, mask)
    np.testing.assert_allclose(got, want, atol=1e-5)


def _repeated_heads(config, params, x, mask):
    heads = (config.d_model, config.num_heads, config.d_head)
    repeats = config.num_heads // config.num_kv_heads
    theta = config.rope_theta
    q = llama.rope(jnp.einsum("bsd,dhk->bshk", x, params["q"].reshape(heads)), theta)
    k = llama.rope(jnp.einsum("bsd,dhk->bshk", x, params["k"]), theta)
    k = k.repeat(repeats, axis=2)
    v = jnp.einsum("bsd,dhk->bshk", x, params["v"]).repeat(repeats, axis=2)
    mixed = layers.attention(q, k, v, scale=config.d_head**-0.5, mask=mask)
    out = params["out"].reshape(config.num_heads, config.d_head, config.d_model)
    return jnp.einsum("bshk,hkd->bsd", mixed, out)


@pytest.mark.parametrize("name", covering(["gpt-tiny", "llama-tiny"]))
def test_the_future_is_not_seen(name):
    workload = models.get(name, num_layers=1)
    params, _, batch = workload.make_args(jax.random.key(0))
    family = gpt if name.startswith("gpt") else llama
    tokens = batch["tokens"]
    changed = tokens.at[:, 20:].set((tokens[:, 20:] + 1) % workload.config.vocab)
    logits = jax.jit(lambda t: family.logits(workload.config, params, t))
    one, other = logits(tokens), logits(changed)
    np.testing.assert_allclose(one[:, :20], other[:, :20], atol=1e-5)
    assert not jnp.allclose(one[:, 20:], other[:, 20:], atol=1e-3)


@pytest.mark.parametrize("two_way", [True, False])
def test_position_buckets_grow_with_distance(two_way):
    distance = np.arange(-200, 201)
    options = {"two_way": two_way, "buckets": 32, "max_distance": 128}
    bucket = np.asarray(jax.jit(partial(t5.position_bucket, **options))(distance))
    past = bucket[distance <= 0]
    assert (np.diff(past) <= 0).all()
    assert (past[-8:] == np.arange(7, -1, -1)).all()
    assert past.max() == (15 if two_way else 31)
    assert bucket.max() == 31
    if two_way:
        np.testing.assert_array_equal(bucket[201:] - 16, past[:-1][::-1])
    else:
        assert (bucket[201:] == 0).all()


@pytest.mark.slow
def test_experts_with_room_for_all_are_the_weighted_two_best():
    config = models.get("moe-tiny", capacity_factor=8.0).config
    drawn = weights.draw(moe.group_weights(config), jax.random.key(0))
    params = drawn["sparse"]["experts"]
    x = _normals(2, config.seq_len, config.d_model)
    got, balance = jax.jit(lambda p, x: moe.experts(config, p, x))(params, x)
    np.testing.assert_allclose(got, jax.jit(_two_best)(params, x), atol=2e-5)
    assert 0.9 < float(balance) < 2


LATENT = {"latent_size": 16, "query_latent_size": 24, "rope_size": 4}


def _two_best(params, x):
    gates = jax.nn.softmax(x @ params["router"])
    hidden = jax.nn.gelu(jnp.einsum("bsd,edf->bsef", x, params["up"]))
    every = jnp.einsum("bsef,efd->bsed", hidden, params["down"])
    value, index = jax.lax.top_k(gates, 2)
    value = value / value.sum(-1, keepdims=True)
    best = jnp.take_along_axis(every, index[..., None], axis=2)
    return jnp.einsum("bsk,bskd->bsd", value, best)


def test_no_token_of_a_mixture_is_left_out():
    config = models.get("mixture-tiny", num_kv_heads=8).config
    params = weights.draw(mixture.block_weights(config), jax.random.key(0))["experts"]
    x = _normals(2, config.seq_len, config.d_model)
    got, balance = jax.jit(partial(mixture.experts, config))(params, x)
    gates = jax.nn.softmax(x @ params["router"])
    gate, up = (jnp.einsum("bsd,edf->bsef", x, params[name]) for name in ("gate", "up"))
    every = jnp.einsum("bsef,efd->bsed", jax.nn.silu(gate) * up, params["down"])
    value, index = jax.lax.top_k(gates, config.top_k)
    best = jnp.take_along_axis(every, index[..., None], axis=2)
    want = jnp.einsum("bsk,bskd->bsd", value / value.sum(-1, keepdims=True), best)
    np.testing.assert_allclose(got, want, atol=2e-5)
    assert 0.9 < float(balance) < 2


def test_latent_attention_is_attention_with_the_keys_that_latents_make():
    """The keys of all heads, written out, in the plain attention of GPT."""
    config = models.get("mixture-tiny", **LATENT).config
    params = weights.draw(mixture.attention_weights(config), jax.random.key(0))
    x = _normals(2, config.seq_len, config.d_model)
    mask = layers.causal_mask(config.seq_len)
    got = jax.jit(partial(mixture.latent_attention, config))(params, x, mask)
    q = jnp.einsum(
        "bsr,rhk->bshk",
        layers.rms_norm(jnp.ones(24), x @ params["q_latent"]),
        params["q"],
    )
    latent = layers.rms_norm(jnp.ones(16), x @ params["kv_latent"])
    k, v = (jnp.einsum("bsr,rhk->bshk", latent, params[name]) for name in ("k", "v"))
    shared = llama.rope(x @ params["k_rope"], config.rope_theta)
    shared = jnp.broadcast_to(shared[:, :, None], (*k.shape[:3], 4))
    q = jnp.concatenate([q[..., :8], llama.rope(q[..., 8:], config.rope_theta)], -1)
    k = jnp.concatenate([k, shared], -1)
    mixed = layers.attention(q, k, v, scale=12**-0.5, mask=mask)
    want = jnp.einsum("bqhk,hkd->bqd", mixed, params["out"])
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_batch_norm_uses_and_averages_the_batch():
    x = np.random.default_rng(0).normal(3, 2, (4, 5, 5, 8)).astype(np.float32)
    params = {"scale": jnp.full(8, 2.0), "bias": jnp.full(8, 1.0)}
    state = {"mean": jnp.zeros(8), "variance": jnp.ones(8)}
    out, new = wide_resnet.batch_norm(params, state, jnp.asarray(x))
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    want = (x - mean) / np.sqrt(variance + 1e-5) * 2 + 1
    np.testing.assert_allclose(out, want, atol=1e-4)
    np.testing.assert_allclose(new["mean"], 0.1 * mean, rtol=1e-4)
    np.testing.assert_allclose(new["variance"], 0.9 + 0.1 * variance, rtol=1e-4)


def test_capacity_is_not_exceeded():
    config = models.get("moe-tiny", capacity_factor=0.5).config
    x = _normals(2, config.seq_len, config.d_model)
    router = np.zeros((config.d_model, config.num_experts), np.float32)
    router[:, 0] = 0.3
    combine, dispatch, _ = jax.jit(partial(moe.route, config))(router, x)
    assert config.capacity == 4
    assert dispatch.shape == (2, config.seq_len, config.num_experts, 4)
    assert (dispatch.sum(1) <= 1).all(), "two tokens in one slot"
    assert (dispatch.sum((2, 3)) <= 2).all()
    sums = combine.sum((2, 3))
    np.testing.assert_allclose(sums[sums > 0], 1, rtol=1e-5)
    assert (sums == 0).any(), "no token passed by"


@pytest.mark.slow
def test_lstm_trains():
    workload = models.get("rnn-tiny", cell="lstm")
    *state, batch = workload.make_args(jax.random.key(0))
    step = jax.jit(workload.step)
    losses = []
    for _ in range(3):
        *state, loss = step(*state, batch)
        losses.append(float(loss))
    assert losses[2] < losses[1] < losses[0]


def test_cross_entropy_is_the_textbook_one():
    logits = _normals(3, 5, 7)
    labels = np.random.default_rng(2).integers(0, 7, (3, 5))
    log_probability = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    want = -np.take_along_axis(log_probability, labels[..., None], -1)
    assert float(jax.jit(layers.cross_entropy)(logits, labels)) == pytest.approx(
        want.mean()
    )


@pytest.mark.parametrize("upsample", ["repeat", "transpose"])
def test_unet_keeps_the_image_shape(upsample):
    config = models.get("unet-tiny", upsample=upsample, multipliers=[1, 2, 2]).config
    params = jax.eval_shape(
        lambda key: weights.draw(unet.describe(config), key), jax.random.key(0)
    )
    images = jax.ShapeDtypeStruct((2, 16, 16, 3), jnp.float32)
    timestep = jax.ShapeDtypeStruct((2,), jnp.float32)
    out = jax.eval_shape(partial(unet.forward, config), params, images, timestep)
    assert out.shape == images.shape


@pytest.mark.slow
def test_weights_have_their_spread():
    tree = {
        "alone": weights.Weight((1024, 1024), std=0.5),
        "shared": [
            weights.normal(64, 64, fan_in=16),
            weights.normal(64, 64, fan_in=16),
        ],
        "constant": (weights.ones(3), weights.zeros(2)),
    }
    drawn = weights.draw(tree, jax.random.key(0))
    assert drawn["alone"].std() == pytest.approx(0.5, rel=0.01)
    one, other = drawn["shared"]
    assert one.std() == pytest.approx(0.25, rel=0.05)
    assert abs(float(jnp.corrcoef(one.ravel(), other.ravel())[0, 1])) < 0.05
    assert drawn["constant"][0].tolist() == [1, 1, 1]
    assert drawn["constant"][1].tolist() == [0, 0]
    assert {leaf.dtype for leaf in jax.tree.leaves(drawn)} == {jnp.dtype("float32")}
