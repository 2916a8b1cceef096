"""The 22 configurations of TeraPipe's paper, cut into slices anew.

Source: Li et al. (arXiv 2102.07988), table 1 and the scripts of their repository. Times
are a formula: FLOPs of GPT's layers at 40 % of a V100's 125 TFLOP/s (NVIDIA data
sheet), and 5 µs for each of 30 kernels of a layer, which is assumed. What is compared
is the batch one sequence after the other, as GPipe runs it.
"""

from __future__ import annotations

import pytest

from rhino_jax.pipeline.tera import causal_times, slice_batch


UNITS = 64
FLOPS_PER_S, LAUNCHES_S = 0.4 * 125e12, 30 * 5e-6

MODELS = {"1B": (24, 2048), "13B": (40, 5120), "44B": (96, 6144), "175B": (96, 12288)}

CONFIGS = [
    (model, 2048, data, stages, tensor, batch)
    for model, data, stages, tensor, batches in [
        ("1B", 8, 24, 1, (8, 16)),
        ("1B", 2, 12, 8, (36, 48)),
        ("1B", 1, 24, 8, (48, 72)),
        ("13B", 8, 40, 1, (2, 4, 7)),
        ("13B", 2, 20, 8, (12, 16, 20)),
        ("13B", 1, 40, 8, (20, 32)),
        ("44B", 1, 48, 8, (8,)),
        ("44B", 2, 24, 8, (4,)),
        ("44B", 4, 96, 1, (2,)),
        ("175B", 1, 48, 8, (2,)),
        ("175B", 1, 96, 4, (2,)),
    ]
    for batch in batches
] + [("13B", 1024 * k, 1, 40, 8, batch) for k, batch in [(4, 8), (6, 4), (8, 2)]]


def gain(model: str, length: int, stages: int, tensor: int, batch: int) -> float:
    """How many times as fast as whole sequences."""
    layers, width = MODELS[model]
    of_a_stage = layers / stages
    unit = length // UNITS
    # Forward and twice that back: 24 d² a token, 4 d for each pair of tokens.
    rate = 3 * of_a_stage / tensor / FLOPS_PER_S
    times = {
        samples: causal_times(
            UNITS,
            fixed_s=3 * of_a_stage * LAUNCHES_S,
            unit_s=samples * unit * 24 * width**2 * rate,
            pair_s=samples * unit**2 * 4 * width * rate,
        )
        for samples in {1, 2, 4} & set(range(batch + 1))
    }
    whole_s = (batch + stages - 1) * times[1][0, UNITS]
    return float(whole_s / slice_batch(times, batch, stages).step_time_s)


def test_there_are_22() -> None:
    assert len(CONFIGS) == 22


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(map(str, c)))
def test_slices_are_never_slower(config: tuple[str, int, int, int, int, int]) -> None:
    model, length, _, stages, tensor, batch = config
    assert gain(model, length, stages, tensor, batch) >= 1.0 - 1e-9


def test_long_sequences_in_small_batches_are_several_times_as_fast() -> None:
    assert gain("175B", 2048, 96, 4, 2) > 4
    gains = [gain("13B", 1024 * k, 40, 8, n) for k, n in [(4, 8), (6, 4), (8, 2)]]
    assert gains == sorted(gains) and gains[0] > 2 and gains[-1] > 5
