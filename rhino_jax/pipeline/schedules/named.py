"""The families of schedules that have names."""

from __future__ import annotations

from collections.abc import Mapping

from rhino_jax.pipeline.schedules.family import Family
from rhino_jax.pipeline.schedules.forward_only import forward_only
from rhino_jax.pipeline.schedules.gpipe import gpipe
from rhino_jax.pipeline.schedules.interleaved import interleaved
from rhino_jax.pipeline.schedules.one_f_one_b import k_f_k_b, one_f_one_b
from rhino_jax.pipeline.schedules.sequence_slices import token_slices
from rhino_jax.pipeline.schedules.zero_bubble import zero_bubble, zero_bubble_v


NAMED: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family("gpipe", "all forward, then all backward", "arXiv 1811.06965", gpipe),
        Family("1f1b", "one forward, one backward", "arXiv 2006.09503", one_f_one_b),
        Family("kfkb", "k forward, k backward", "arXiv 2303.01675", k_f_k_b),
        Family(
            "interleaved",
            "1F1B with several chunks in every group",
            "arXiv 2104.04473",
            interleaved,
        ),
        Family(
            "zero-bubble",
            "1F1B with gradients of weights put off (ZB-H1)",
            "arXiv 2401.10241",
            zero_bubble,
        ),
        Family(
            "zero-bubble-v",
            "two chunks in every group, there and back (ZB-V)",
            "arXiv 2401.10241",
            zero_bubble_v,
        ),
        Family(
            "token-slices",
            "slices of the sequence, one after another",
            "arXiv 2102.07988",
            token_slices,
        ),
        Family("forward-only", "no backward pass", "", forward_only),
    )
}

TRAINING = tuple(name for name in NAMED if name != "forward-only")
"""Families that run a whole training step, and so are interchangeable."""
