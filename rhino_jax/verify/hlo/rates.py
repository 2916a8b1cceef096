"""Measure how near a compiled program comes to the hardware's peak rates.

Where the compiler estimates cycles (XLA:TPU), compute-bound and memory-bound work are
summed separately, at peak rates and as estimated without kernel launch time; their
ratios are the efficiencies of the roofline (Williams, Waterman, Patterson, CACM 2009).
For any compiler: the share of the collectives' time that overlaps with compute.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rhino_jax.hardware.target import Target
from rhino_jax.verify.hlo.work.program import InstructionWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Seconds per device and step, at peak rates and as the compiler estimates.

    Attributes:
      matmul_peak_s, matmul_s: time of compute-bound work, at peak FLOP/s and as the
        compiler estimates; zero where it estimates nothing.
      memory_peak_s, memory_s: time of memory-bound work, at peak bandwidth and as
        estimated; likewise.
      hidden_s: time of collectives that overlaps with compute.
    """

    matmul_peak_s: float = 0.0
    matmul_s: float = 0.0
    memory_peak_s: float = 0.0
    memory_s: float = 0.0
    hidden_s: float = 0.0


def rates_of(
    items: Iterable[InstructionWork],
    target: Target,
    *,
    collectives_s: float,
    exposed_s: float,
) -> Rates:
    """Compute the rates of one program.

    Args:
      items: work of the program's instructions.
      target: the hardware.
      collectives_s: seconds of all its collectives.
      exposed_s: seconds of collectives that add to the step time.
    """
    sums = {"matmul": [0.0, 0.0], "memory": [0.0, 0.0]}
    for work in items:
        if work.cycles is None or target.clock_hz is None:
            continue
        arithmetic_s = work.flops / target.peak_flops_per_s(work.dtype)
        traffic_s = work.bytes / target.hbm_bytes_per_s
        bound = sums["matmul" if arithmetic_s > traffic_s else "memory"]
        bound[0] += work.count * max(arithmetic_s, traffic_s)
        taken_s = work.cycles / target.clock_hz - target.launch_s
        bound[1] += work.count * max(0.0, taken_s)
    return Rates(
        matmul_peak_s=sums["matmul"][0],
        matmul_s=sums["matmul"][1],
        memory_peak_s=sums["memory"][0],
        memory_s=sums["memory"][1],
        hidden_s=max(0.0, collectives_s - exposed_s),
    )
