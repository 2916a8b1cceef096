"""Every workload of the zoo: it trains, and says its shapes truly."""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rhino_jax import models
from rhino_jax.models import gpt, llama, registry


TINY = [name for name in models.names() if "tiny" in name]
TRAINED = [name for name in TINY if not name.startswith("decode")]
STACKED = ["gpt-tiny", "llama-tiny", "t5-tiny", "moe-tiny", "two-tower-tiny"]


def _shapes(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)


def _state_is_kept(workload):
    """The step returns state of the shapes that it takes."""
    args = workload.abstract_args()
    *state, loss = jax.eval_shape(workload.step, *args)
    assert _shapes(tuple(state)) == _shapes(args[:-1])
    assert (loss.shape, loss.dtype) == ((), jnp.float32)


# The unrolled ones are compared with the scanned ones below.
@pytest.mark.parametrize("name", [n for n in TRAINED if "unrolled" not in n])
def test_loss_falls_and_repeats(name):
    workload = models.get(name)
    args = workload.make_args(jax.random.key(0))
    assert _shapes(args) == _shapes(workload.abstract_args())
    step = jax.jit(workload.step)
    runs = []
    for _ in range(2):
        *state, batch = args
        losses = []
        for _ in range(5):
            *state, loss = step(*state, batch)
            losses.append(float(loss))
        runs.append(losses)
    assert np.isfinite(runs[0]).all()
    assert all(later < earlier for earlier, later in itertools.pairwise(runs[0]))
    assert runs[0] == runs[1]


def test_the_key_decides_the_arguments():
    workload = models.get("mlp-tiny")
    one, same, other = (workload.make_args(jax.random.key(i)) for i in (0, 0, 1))
    for path in (lambda args: args[0]["layer_0"]["weight"], lambda args: args[2]["x"]):
        assert (path(one) == path(same)).all()
        assert (path(one) != path(other)).all()


@pytest.mark.parametrize("name", models.names())
def test_state_keeps_its_shapes(name):
    workload = models.get(name)
    if name.startswith("decode"):
        config = workload.config
        out = jax.eval_shape(workload.step, *workload.abstract_args())
        assert (out.shape, out.dtype) == ((config.batch, config.seq_len), jnp.int32)
        return
    _state_is_kept(workload)
    num_args = len(workload.abstract_args())
    assert workload.donate_argnums == tuple(range(num_args - 1))


@pytest.mark.parametrize("name", TRAINED)
def test_bfloat16_keeps_float32_parameters(name):
    workload = models.get(name, dtype="bfloat16")
    _state_is_kept(workload)
    jaxpr = str(jax.make_jaxpr(workload.step)(*workload.abstract_args()))
    products = re.findall(r":(\w+)\[[^]]*\] = (?:dot_general|conv_general)", jaxpr)
    assert products.count("bf16") > len(products) / 2


@pytest.mark.parametrize("name", STACKED)
@pytest.mark.parametrize("remat", [True, False])
def test_layers_scan_or_unroll(name, remat):
    for layers in ("scan", "unroll"):
        workload = models.get(name, layers=layers, remat=remat)
        _state_is_kept(workload)
        jaxpr = str(jax.make_jaxpr(workload.step)(*workload.abstract_args()))
        assert ("scan[" in jaxpr) == (layers == "scan")
        # The primitive is `checkpoint`; its older name is `remat2`.
        assert bool(re.search(r"\b(checkpoint|remat2)\[", jaxpr)) == remat


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("gpt-tiny", {"tied_embedding": False}),
        ("llama-tiny", {"tied_embedding": True, "num_kv_heads": 1}),
        ("t5-tiny", {"position_bias": False}),
        ("moe-tiny", {"moe_every": 1, "top_k": 1}),
        ("rnn-tiny", {"cell": "lstm"}),
        ("unet-tiny", {"upsample": "repeat", "attention_size": 8}),
        ("two-tower-tiny", {"pool": "class"}),
        ("wide-resnet-tiny", {"stem": "cifar", "width": 1}),
        ("mlp-tiny", {"bias": False, "relu": False}),
    ],
)
def test_variants(name, overrides):
    workload = models.get(name, **overrides)
    _state_is_kept(workload)
    default = str(
        jax.make_jaxpr(models.get(name).step)(*models.get(name).abstract_args())
    )
    assert str(jax.make_jaxpr(workload.step)(*workload.abstract_args())) != default


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "sgd"])
@pytest.mark.parametrize("extra", [{}, {"clip_norm": 1.0}, {"accumulate_steps": 2}])
def test_optimizers(optimizer, extra):
    _state_is_kept(models.get("mlp-tiny", optimizer=optimizer, **extra))


def test_accumulation_updates_every_second_step():
    workload = models.get("mlp-tiny", accumulate_steps=2)
    params, opt_state, batch = workload.make_args(jax.random.key(0))
    step = jax.jit(workload.step)
    first, opt_state, _ = step(params, opt_state, batch)
    second, opt_state, _ = step(first, opt_state, batch)
    before, between, after = (p["layer_0"]["weight"] for p in (params, first, second))
    assert (before == between).all()
    assert (between != after).any()


def test_clipping_bounds_the_update():
    workload = models.get("mlp-tiny", clip_norm=1e-3, learning_rate=1.0)
    params, *rest = workload.make_args(jax.random.key(0))
    new = workload.step(params, *rest)[0]
    change = jax.tree.map(lambda a, b: jnp.sum(jnp.square(a - b)), new, params)
    total = float(sum(jax.tree.leaves(change))) ** 0.5
    assert total == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("family", [gpt, llama])
def test_scanned_and_unrolled_agree(family):
    name = f"{family.__name__.rsplit('.', 1)[-1]}-tiny"
    scanned, unrolled = models.get(name), models.get(f"{name}-unrolled")
    params, _, batch = scanned.make_args(jax.random.key(0))
    num_layers = scanned.config.num_layers
    blocks = tuple(
        jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"])
        for i in range(num_layers)
    )
    same = {**params, "blocks": blocks}

    def gradient(workload, params):
        fn = jax.value_and_grad(lambda p: family.loss(workload.config, p, batch))
        loss, grads = jax.jit(fn)(params)
        return loss, grads["embed"]

    one, other = gradient(scanned, params), gradient(unrolled, same)
    np.testing.assert_allclose(one[0], other[0], rtol=1e-6)
    np.testing.assert_allclose(one[1], other[1], rtol=1e-4, atol=1e-6)


# Published numbers, in millions; the relative difference that a padded vocabulary or
# a figure of few digits leaves.
@pytest.mark.parametrize(
    ("name", "millions", "within"),
    [
        ("gpt-small", 124.44, 0.001),
        ("gpt-medium", 354.82, 0.001),
        ("gpt-1.3b", 1313, 0.003),
        ("gpt-2.6b", 2649, 0.003),
        ("gpt-6.7b", 6654, 0.001),
        ("gpt-7b", 6700, 0.04),
        ("gpt-15b", 15364, 0.001),
        ("gpt-39b", 39079, 0.001),
        ("llama-7b", 6738.4, 1e-4),
        ("llama-8b", 8030.3, 1e-4),
        ("llama-70b", 70553.7, 1e-4),
        ("t5-large", 737.7, 1e-4),
        ("moe-1.3b", 1347, 0.001),
        ("moe-2.4b", 2383, 0.001),
        ("moe-10b", 10170, 0.001),
        ("moe-27b", 26648, 0.001),
        ("moe-8x1b", 4134, 0.001),
        ("resnet-50", 25.557, 1e-4),
        ("wide-resnet-50-2", 68.883, 1e-4),
        ("wide-resnet-1b", 1005.7, 1e-3),
        ("wide-resnet-2b", 1965, 1e-3),
        ("wide-resnet-4b", 4000.9, 1e-3),
        ("unet-base", 35.7, 0.003),
        ("two-tower-base", 151.277, 1e-4),
    ],
)
def test_parameter_counts(name, millions, within):
    assert models.get(name).num_params() / 1e6 == pytest.approx(millions, rel=within)


def test_every_large_model_has_its_count_checked():
    mark = test_parameter_counts.pytestmark[0]
    checked = {case[0] for case in mark.args[1]}
    large = {n for n in models.names() if models.get(n).num_params() > 1e7}
    assert large == checked


def test_every_family_has_a_tiny_workload():
    families = {type(models.get(name).config) for name in TINY}
    assert families == {module.Config for module in registry.FAMILIES.values()}
