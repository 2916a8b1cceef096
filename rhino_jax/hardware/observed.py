"""Observed behaviour of compilers, as numbers read from compiled HLO, not documented.

Behaviour that differs between targets is in hardware files (`Device`); the numbers here
held for all compilers examined, or for the only one that has the behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Thresholds and shares, each with the programs that showed it.

    Attributes:
      most_scattered: devices of the largest slice on which XLA:TPU keeps a
        reduce-scatter over one axis that is the whole slice; on larger ones it is an
        all-reduce. All-reduces seen on 16, 64 and 256 chips (v5e, v5p, v6e), and on 8
        on tori of three dims (v4:2x2x2, v5p:2x2x2), not on others (v5e:2x4, v6e:2x4).
      combined_latency: share of their latency that remains of collectives that are
        combined: of 139 that the plan of a GPT has, and 150 of a BERT, 10 and 8 remain
        (dp, ZeRO-1 and FSDP: 5 to 15; jax 0.10.2, 8 H100).
      longest_row: elements of the longest row that a matmul's fusion holds: of
        attention in float32, XLA:TPU stores rows of 8,192 exponentials; of 12,288 and
        16,384, and of 8,192 with a single head, only the matmul's result (v5e:2x2,
        v6e:2x2, libtpu 0.0.51).
      recompute_share: a value is recomputed in each of its readers only if the operands
        have at most this many times its own elements.
      least_state: smallest number of state arrays (fed back by a step) whose updates
        run concurrently.
      least_rows: rows that take a systolic array as long as loading one square of
        weights, over the square's side: 8x4096 by 4096x4096 takes 51 cycles per square
        of 128 on v5e, and 107 per square of 256 on v6e.
      longest_column: rows that one kernel of XLA:GPU sums: 32 rows of threads, 128
        elements each (`ReductionIsRaceFree` in reduction_utils.cc). Of norms over
        16,384 rows 128 partial sums remain, which a second kernel adds (jax 0.12.0.1).
    """

    most_scattered: int = 8
    combined_latency: float = 0.06
    longest_row: int = 8192
    recompute_share: float = 1.1
    least_state: int = 4
    least_rows: float = 0.4
    longest_column: int = 4096


OBSERVED = Observed()
