"""The zoo and the frameworks' models in micro-batches: equal, or refused with reason.

With SGD where AdamW would make noise of gradients that are exactly zero.
"""

from __future__ import annotations

import jax
import pytest
from helpers_microbatch import check, check_traced, cut_of, doubled, of_framework
from helpers_models import CASES

from rhino_jax.errors import MicrobatchError
from rhino_jax.models import registry
from tests.cases import covering
from tests.passes.zoo import compiled, of_zoo


ONE_LOOP = (
    "gpt-tiny", "gpt-tiny-unrolled", "llama-tiny", "llama-tiny-unrolled", "rnn-tiny",
    "t5-tiny", "unet-tiny",
)  # fmt: skip
TWO_LOOPS = ("moe-tiny", "two-tower-tiny")
MODELS_OF_FRAMEWORKS = (
    "linen_transformer", "nnx_split", "nnx_state", "equinox_mlp", "equinox_attention",
)  # fmt: skip


@pytest.mark.parametrize("name", covering(["mlp-tiny", "gpt-tiny", "moe-tiny"]))
def test_compiled_numbers_are_those_of_the_undivided_step(name):
    check_traced(*of_zoo(name), (2,), run=compiled)


@pytest.mark.parametrize("name", covering([*ONE_LOOP, *TWO_LOOPS]))
def test_numbers_of_the_zoo_are_those_of_the_undivided_step(name):
    for cut in check_traced(*of_zoo(name), (2, 3, 4)):
        assert len(cut.loops) == 1 + (name in TWO_LOOPS)
        assert cut.again_flops < 0.4 * cut.flops


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [{"accumulate_steps": 2}, {"clip_norm": 0.5}, {"remat": True, "layers": "unroll"}],
    ids=str,
)
def test_gpt_with_clipping_accumulation_and_recomputed_layers(overrides):
    for cut in check_traced(*of_zoo("gpt-tiny", **overrides), (2, 3)):
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
    assert len(cut.pre) and len(cut.outside[-1]) and not cut.why
    assert not cut.meeting_flops


@pytest.mark.slow
def test_experts_in_a_scan_over_recomputed_layers():
    for cut in check_traced(*of_zoo("moe-tiny", layers="scan", remat=True), (2, 3)):
        assert len(cut.loops) == 2 and not cut.meeting_flops


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        (name, optimizer)
        for name in MODELS_OF_FRAMEWORKS
        for optimizer in ("sgd", "clip", "adafactor", "multi_steps")
    ],
)
def test_models_of_frameworks(name, optimizer):
    """Where gradients of almost zero are divided by their size, float32 is not enough:
    then in float64."""
    try:
        cuts = check_traced(*of_framework(name, optimizer), (2, 3))
    except AssertionError:
        with jax.enable_x64(True):
            step, args, donate = CASES[name](optimizer)
            cuts = check(step, doubled(args), donate, (2, 3), rtol=1e-9)
    assert [len(cut.loops) for cut in cuts] == [1, 1]


@pytest.mark.slow
def test_batch_norm_of_linen_is_of_the_whole_batch():
    for cut in check_traced(*of_framework("linen_cnn", "sgd"), (2,)):
        assert len(cut.loops) > 3 and cut.places == ("BatchNorm",)
