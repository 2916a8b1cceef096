"""Arithmetic: the time of one op on one device, and the utilisation of a step.

An op takes the larger of arithmetic time and memory time. Source: the roofline model
(Williams, Waterman, Patterson, CACM 2009).

Model FLOPs utilisation (MFU) is the arithmetic that the model itself needs, without
recomputation, over the peak arithmetic of the devices in the time of a step. Source:
Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways" (2022), appendix B.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Program
from rhino_jax.ir.traits import OpKind


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


PRODUCTS = (OpKind.CONTRACTION, OpKind.CONVOLUTION)


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """The arithmetic of a program as its user wrote it, over all devices.

    Attributes:
      flops: floating-point operations of matrix products and convolutions in a step,
        without those that `jax.checkpoint` recomputes.
      at_peak_s: seconds of one device for them at the peak rate of their element types.
    """

    flops: float = 0.0
    at_peak_s: float = 0.0


def model_flops(program: Program, target: Target) -> ModelFlops:
    """Return the model FLOPs of a program as its user wrote it."""
    flops = at_peak_s = 0.0
    for op, runs in program.walk():
        if op.traits.kind not in PRODUCTS or op.call is not None:
            continue
        if op.source.is_recomputed:
            continue
        dtype = program.values[op.operands[0]].dtype
        flops += runs * op.flops
        at_peak_s += runs * op.flops / target.peak_flops_per_s(dtype)
    return ModelFlops(flops, at_peak_s)
