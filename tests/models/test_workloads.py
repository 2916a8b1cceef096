"""Every workload of the zoo: it trains, and says its shapes truly."""

from __future__ import annotations

import itertools
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rhino_jax import models
from rhino_jax.models import gpt, llama, registry
from tests.cases import covering


TINY = [name for name in models.names() if "tiny" in name]
TRAINED = [name for name in TINY if not name.startswith("decode")]
STACKED = ["gpt-tiny", "llama-tiny", "t5-tiny", "moe-tiny", "two-tower-tiny"]


def _shapes(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)


@cache
def _workload(name):
    return models.get(name)


def _few_layers(name, count):
    """Return overrides that leave so many of a model's unrolled layers."""
    config = _workload(name).config
    if getattr(config, "layers", "scan") != "unroll":
        return {}
    keys = ("num_layers", "image_layers", "text_layers")
    least = {key: max(count, getattr(config, "moe_every", 1)) for key in keys}
    return {k: n for k, n in least.items() if getattr(config, k, 0) > n}


@cache
def _num_params(name):
    return _workload(name).num_params()


def _traced(name, **overrides):
    """Return abstract arguments of a step, its jaxpr as text, and its results."""
    config = _workload(name).config
    changed = {k: v for k, v in overrides.items() if getattr(config, k) != v}
    return _traced_once(name, **changed)


@cache
def _traced_once(name, **overrides):
    workload = models.get(name, **overrides)
    args = workload.abstract_args()
    jaxpr, results = jax.make_jaxpr(workload.step, return_shape=True)(*args)
    structure = jax.tree.structure(results)
    return args, str(jaxpr), jax.tree.unflatten(structure, jaxpr.out_avals)


def _state_is_kept(name, **overrides):
    """The step returns state of the shapes that it takes; gives its jaxpr."""
    args, jaxpr, (*state, loss) = _traced(name, **overrides)
    assert _shapes(tuple(state)) == _shapes(args[:-1])
    assert (loss.shape, loss.dtype) == ((), jnp.float32)
    return jaxpr


# The unrolled ones are compared with the scanned ones below.
@pytest.mark.parametrize(
    "name", covering([n for n in TRAINED if "unrolled" not in n], ["mlp-tiny"])
)
def test_loss_falls_and_repeats(name):
    workload = models.get(name, **_few_layers(name, 1))
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
    make = jax.jit(models.get("mlp-tiny").make_args)
    one, same, other = (make(jax.random.key(i)) for i in (0, 0, 1))
    for path in (lambda args: args[0]["layer_0"]["weight"], lambda args: args[2]["x"]):
        assert (path(one) == path(same)).all()
        assert (path(one) != path(other)).all()


LONG = {"unet-tiny", "t5-tiny", "two-tower-tiny"}
QUICK = {*TINY} - LONG


@pytest.mark.parametrize("name", covering(models.names(), lambda name: name in QUICK))
def test_state_keeps_its_shapes(name):
    workload = _workload(name)
    if name.startswith("decode"):
        config = workload.config
        out = jax.eval_shape(workload.step, *workload.abstract_args())
        assert (out.shape, out.dtype) == ((config.batch, config.seq_len), jnp.int32)
        return
    _state_is_kept(name, **_few_layers(name, 2))
    num_args = len(_traced(name, **_few_layers(name, 2))[0])
    assert workload.donate_argnums == tuple(range(num_args - 1))


# Their layers are parts of the other models.
SIMPLE = ["gpt-tiny", "wide-resnet-tiny", "rnn-tiny", "mlp-tiny"]


@pytest.mark.parametrize("name", covering(TRAINED, SIMPLE))
def test_bfloat16_keeps_float32_parameters(name):
    jaxpr = _state_is_kept(name, dtype="bfloat16")
    products = re.findall(r":(\w+)\[[^]]*\] = (?:dot_general|conv_general)", jaxpr)
    assert products.count("bf16") > len(products) / 2


@pytest.mark.parametrize("name", covering(STACKED, ["gpt-tiny"]))
@pytest.mark.parametrize("remat", [True, False])
def test_layers_scan_or_unroll(name, remat):
    for layers in ("scan", "unroll"):
        jaxpr = _state_is_kept(name, layers=layers, remat=remat)
        assert ("scan[" in jaxpr) == (layers == "scan")
        # The primitive is `checkpoint`; its older name is `remat2`.
        assert bool(re.search(r"\b(checkpoint|remat2)\[", jaxpr)) == remat


@pytest.mark.parametrize(
    ("name", "overrides"),
    covering(
        [
            ("gpt-tiny", {"tied_embedding": False}),
            ("llama-tiny", {"tied_embedding": True, "num_kv_heads": 1}),
            ("t5-tiny", {"position_bias": False}),
            ("moe-tiny", {"moe_every": 1, "top_k": 1}),
            (
                "mixture-tiny",
                {"latent_size": 16, "query_latent_size": 24, "rope_size": 4},
            ),
            ("rnn-tiny", {"cell": "lstm"}),
            ("unet-tiny", {"upsample": "repeat", "attention_size": 8}),
            ("two-tower-tiny", {"pool": "class"}),
            ("wide-resnet-tiny", {"stem": "cifar", "width": 1}),
            ("mlp-tiny", {"bias": False, "relu": False}),
        ],
        lambda case: case[0] in QUICK,
    ),
)
def test_variants(name, overrides):
    assert _state_is_kept(name, **overrides) != _traced(name)[1]


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "sgd"])
@pytest.mark.parametrize("extra", [{}, {"clip_norm": 1.0}, {"accumulate_steps": 2}])
def test_optimizers(optimizer, extra):
    _state_is_kept("mlp-tiny", optimizer=optimizer, **extra)


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

    @jax.jit
    def run(key):
        args = workload.make_args(key)
        return args[0], workload.step(*args)[0]

    params, new = run(jax.random.key(0))
    change = jax.tree.map(lambda a, b: jnp.sum(jnp.square(a - b)), new, params)
    total = float(sum(jax.tree.leaves(change))) ** 0.5
    assert total == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.slow
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
COUNTS = [
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
    ("mixtral-8x7b", 46702.8, 1e-4),
    ("mixtral-8x22b", 140630, 1e-4),
    ("qwen3-30b-a3b", 30532, 1e-4),
    ("gpt-oss-20b", 20910, 0.001),
    ("deepseek-v3", 671000, 0.003),
    ("resnet-50", 25.557, 1e-4),
    ("wide-resnet-50-2", 68.883, 1e-4),
    ("wide-resnet-1b", 1005.7, 1e-3),
    ("wide-resnet-2b", 1965, 1e-3),
    ("wide-resnet-4b", 4000.9, 1e-3),
    ("unet-base", 35.7, 0.003),
    ("two-tower-base", 151.277, 1e-4),
]
ONE_OF_EACH = {"gpt-small", "llama-8b", "t5-large", "moe-1.3b", "resnet-50"}


@pytest.mark.parametrize(
    ("name", "millions", "within"), covering(COUNTS, lambda c: c[0] in ONE_OF_EACH)
)
def test_parameter_counts(name, millions, within):
    assert _num_params(name) / 1e6 == pytest.approx(millions, rel=within)


@pytest.mark.slow
def test_every_large_model_has_its_count_checked():
    checked = {name for name, *_ in COUNTS}
    large = {n for n in models.names() if _num_params(n) > 1e7}
    assert large == checked


def test_every_family_has_a_tiny_workload():
    families = {type(models.get(name).config) for name in TINY}
    assert families == {config for _, config in registry.FAMILIES.values()}
