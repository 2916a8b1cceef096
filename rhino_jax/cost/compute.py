"""Time of one op on one device: the larger of arithmetic time and memory time.

Source: the roofline model (Williams, Waterman, Patterson, CACM 2009).
"""

from __future__ import annotations

import numpy as np

from rhino_jax.hardware.target import Target


def op_s(
    target: Target, flops: np.ndarray, traffic_bytes: np.ndarray, dtype: str
) -> np.ndarray:
    """Return the seconds of one op, for each of its strategies.

    Args:
      target: the hardware.
      flops: floating-point operations on this device, [strategies].
      traffic_bytes: bytes read from and written to memory on this device, [strategies].
      dtype: element type of the arithmetic's operands.
    """
    arithmetic_s = flops / (
        target.peak_flops_per_s(dtype) * target.device.matmul_efficiency
    )
    traffic_s = traffic_bytes / (
        target.device.hbm_bytes_per_s * target.device.memory_efficiency
    )
    return np.maximum(arithmetic_s, traffic_s)
