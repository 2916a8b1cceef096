"""The arithmetic of cuDNN's attention kernels, from the calls that XLA makes."""

from __future__ import annotations

import re

from rhino_jax.frontend.rules.attention import attention_flops
from rhino_jax.verify.hlo.module import HloArray, Instruction, arrays_of


FUSED_ATTENTION = "__cudnn$fmha"
"""The start of the targets of these calls."""

_SCORES = re.compile(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([\d", ]*)\]')
_MASK = re.compile(r'"mask_type":\s*"(\w*)"')
_WINDOW = re.compile(r'"sliding_window_length":\s*"?(\d+)')


def fused_attention_flops(instruction: Instruction, query: HloArray) -> int:
    """Return the FLOPs of a call.

    Args:
      instruction: the call; its results are attention, or the gradients of queries,
        keys and values.
      query: type of its first operand.
    """
    is_forward = "Backward" not in instruction.attributes
    made = arrays_of(instruction.type)[0 if is_forward else 2]
    scores = instruction.find(_SCORES).replace('"', "")
    return int(
        attention_flops(
            [int(size) for size in scores.split(",")],
            (query.dims[-1], made.dims[-1]),
            mask=instruction.find(_MASK),
            window=int(instruction.find(_WINDOW) or 0),
            is_forward=is_forward,
        )
    )
