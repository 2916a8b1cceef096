"""The zoo and the frameworks' models in micro-batches: equal, or refused with reason.

With SGD where AdamW would make noise of gradients that are exactly zero.
"""

from __future__ import annotations

import jax
import pytest
from helpers_microbatch import check, cut_of
from helpers_models import CASES

from rhino_jax.errors import MicrobatchError
from rhino_jax.models import registry


ONE_LOOP = (
    "gpt-tiny", "gpt-tiny-unrolled", "llama-tiny", "llama-tiny-unrolled", "rnn-tiny",
    "t5-tiny", "unet-tiny",
)  # fmt: skip
TWO_LOOPS = ("moe-tiny", "two-tower-tiny")


def of_zoo(name, **overrides):
    workload = registry.get(name, **{"optimizer": "sgd", **overrides})
    return workload.step, workload.make_args(jax.random.key(0)), workload.donate_argnums


@pytest.mark.parametrize("name", ["mlp-tiny", "gpt-tiny"])
def test_numbers_are_those_of_the_undivided_step(name):
    check(*of_zoo(name), (2,))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ONE_LOOP, *TWO_LOOPS])
def test_numbers_of_the_zoo_are_those_of_the_undivided_step(name):
    for cut in check(*of_zoo(name), (2, 3, 4)):
        assert len(cut.loops) == 1 + (name in TWO_LOOPS)
        assert cut.again_flops < 0.4 * cut.flops


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [{"clip_norm": 0.5}, {"accumulate_steps": 2}, {"remat": True, "layers": "unroll"}],
    ids=str,
)
def test_gpt_with_clipping_accumulation_and_recomputed_layers(overrides):
    for cut in check(*of_zoo("gpt-tiny", **overrides), (2, 3)):
        assert len(cut.loops) == 1


@pytest.mark.parametrize(
    ("name", "line", "why"),
    [
        ("wide-resnet-tiny", "wide_resnet.py", "needs a sum over the batch"),
        ("decode-tiny", "decode.py", "the batch"),
    ],
)
def test_what_couples_a_batch_is_said(name, line, why):
    overrides = {} if name == "decode-tiny" else {"optimizer": "sgd"}
    workload = registry.get(name, **overrides)
    args, donate = workload.abstract_args(), workload.donate_argnums
    found = cut_of(workload.step, args, donate=donate)
    assert isinstance(found, MicrobatchError)
    assert line in found.where and why in found.numbers


def test_the_analysis_needs_no_arrays_and_is_quick():
    workload = registry.get("gpt-tiny-unrolled")
    cut = cut_of(workload.step, workload.abstract_args(), 4, workload.donate_argnums)
    assert cut.count == 4 and cut.rows == 8
    assert len(cut.pre) and len(cut.post) and not cut.why
    assert cut.in_loops_flops == cut.flops


@pytest.mark.slow
def test_experts_in_a_scan_over_recomputed_layers():
    for cut in check(*of_zoo("moe-tiny", layers="scan", remat=True), (2, 3)):
        assert len(cut.loops) == 2 and not cut.meeting_flops


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "clip", "adafactor", "multi_steps"])
@pytest.mark.parametrize(
    "name",
    ["linen_transformer", "nnx_split", "nnx_state", "equinox_mlp", "equinox_attention"],
)
def test_models_of_frameworks(name, optimizer):
    for cut in check(*CASES[name](optimizer), (2, 3)):
        assert len(cut.loops) == 1


def test_batch_norm_of_linen_is_refused():
    step, args, donate = CASES["linen_cnn"]("sgd")
    found = cut_of(step, args, donate=donate)
    assert isinstance(found, MicrobatchError)
    assert "helpers_models.py" in found.where and "loops" in found.what
