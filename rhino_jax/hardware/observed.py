"""What compilers were seen to do, as numbers: no document says them, compiled HLO does.

What differs between targets stands in hardware files (`Device`); what is here held for
all that were looked at, or for the one kind that has the habit at all.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Thresholds and shares, each with what it was seen in.

    Attributes:
      most_scattered: devices of the largest slice on which XLA:TPU keeps a
        reduce-scatter over one axis that is the whole slice; on larger ones it is an
        all-reduce. All-reduces seen for 16, 64 and 256 chips (v5e, v5p, v6e), and for 8
        on tori of three dims (v4:2x2x2, v5p:2x2x2), not on others (v5e:2x4, v6e:2x4).
      combined_latency: share of the latency that is left of collectives that are
        combined: of 139 that the plan of a GPT has, and 150 of a BERT, 10 and 8 come
        out (dp, ZeRO-1 and FSDP: 5 to 15; jax 0.10.2, 8 H100).
      longest_row: elements of a row that a matmul's fusion holds: of attention in
        float32, XLA:TPU stores rows of 8,192 exponentials; of 12,288 and 16,384, and of
        8,192 where there is one head, only the matmul's result (v5e:2x2, v6e:2x2,
        libtpu 0.0.51).
      recompute_share: a value is computed again in each reader only from at most this
        many times its own elements.
      least_state: number of arrays that are fed back, from which on their updates run
        beside each other.
      least_rows: rows that take a systolic array as long as loading one square of
        weights, over the square's side: 8x4096 by 4096x4096 takes 51 cycles per square
        of 128 on v5e, and 107 per square of 256 on v6e.
      longest_column: rows that one kernel of XLA:GPU sums: 32 rows of threads, 128
        elements each (`ReductionIsRaceFree` in reduction_utils.cc). Of norms over
        16,384 rows 128 sums are left, and added by a second kernel (jax 0.12.0.1).
    """

    most_scattered: int = 8
    combined_latency: float = 0.06
    longest_row: int = 8192
    recompute_share: float = 1.1
    least_state: int = 4
    least_rows: float = 0.4
    longest_column: int = 4096


OBSERVED = Observed()
