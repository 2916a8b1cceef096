"""Behaviour of compilers: lowering of shardings, and observed thresholds.

XLA lowers shardings through one of two passes with behaviour of their own: TPU's
handles one mesh axis at a time, GPU's and CPU's one dim at a time. A hardware file
states which (`Device`); the cost model estimates by it (`rhino_jax.cost.reshard`,
`rhino_jax.cost.combine`), and plans annotate by it (`rhino_jax.runtime.constraints`).

`OBSERVED` has numbers read from compiled HLO, not documented. Behaviour that differs
between targets is in hardware files (`Device`); these numbers held for all compilers
examined, or for the only one that has the behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweringPolicy:
    """The rules by which a compiler turns a change of sharding into collectives.

    Attributes:
      gathers_by_axis: whether all-gathers run over one mesh axis at a time only; a
        gather over several axes at once becomes an all-reduce, for twice the bytes.
      scatters_by_axis: whether reduce-scatters run over one mesh axis at a time only,
        with the same fallback.
      combines: whether independent collectives are combined into fewer, larger ones,
        with kernels that pack and unpack them (`rhino_jax.model.packing`).
      reassociates: whether partial results that are only added to one another are
        added first, and reduced once (`rhino_jax.analysis.reduction_sums`).
      rounds_products: whether float32 operands of products at JAX's default precision
        are rounded to bfloat16 before they are sent: gathered, permuted or exchanged
        (`rhino_jax.model.op_collectives`).
      splits_complex: whether complex arrays are arrays of their parts, and a product of
        them three products with partial sums each (`rhino_jax.model.tpu_kernels`).
      tiles_groups: whether grouped matmuls run in `rhino_jax.runtime.grouped`.
      annotates_waypoints: whether the program is annotated with every spec on the way
        from one to another, or only with the last.
    """

    gathers_by_axis: bool = False
    scatters_by_axis: bool = False
    combines: bool = False
    reassociates: bool = False
    rounds_products: bool = False
    splits_complex: bool = False
    tiles_groups: bool = False
    annotates_waypoints: bool = True

    @property
    def loops_matmuls(self) -> bool:
        """Whether large matmuls with a scattered result become loops of matmuls.

        Such loops scatter over all axes at once, with or without annotated waypoints:
        seen on tori of two dims (GPT 1.3B on v5e:4x4), not of three, where all-gathers
        run by axis.
        """
        return self.scatters_by_axis and not self.gathers_by_axis

    @property
    def routes(self) -> LoweringPolicy:
        """This policy reduced to what plans are run by: routes between specs, and
        kernels."""
        return replace(
            self,
            scatters_by_axis=False,
            combines=False,
            reassociates=False,
            rounds_products=False,
            splits_complex=False,
        )

    def without_waypoints(self) -> LoweringPolicy:
        """Return the same policy for programs with final specs alone annotated."""
        return replace(self, annotates_waypoints=False)

    @property
    def kernels(self) -> LoweringPolicy:
        """The policy of a compiler that uses a single collective wherever one suffices,
        with the same kernels and final specs alone annotated."""
        return LoweringPolicy(tiles_groups=self.tiles_groups, annotates_waypoints=False)


AS_WRITTEN = LoweringPolicy()
"""A compiler that uses a single collective wherever one suffices."""


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
      most_scores: queries times keys of attention in float32 whose scores and
        exponentials one kernel of XLA:TPU computes: 1,536 x 1,536 in gradients, not
        4,096 x 4,096; of 2,048 x 2,048 some, not those of a GPT 7B (v5e, libtpu
        0.0.52).
      recompute_share: a value is recomputed in each of its readers only if the operands
        have at most this many times its own elements.
      least_state: smallest number of state arrays (fed back by a step) whose updates
        run concurrently.
      least_rows: rows that take a systolic array as long as loading one square of
        weights, over the square's side: 8x4096 by 4096x4096 takes 51 cycles per square
        of 128 on v5e, and 107 per square of 256 on v6e.
      least_channels: channels of an image that XLA:TPU convolves with channels on the
        lanes, one dim of the window at a time. Of bf16[32,32,32,c] with windows of 2x2
        to 5x5, 16 to 256 channels take what whole squares do; 3 less (v5e, libtpu
        0.0.52).
      longest_column: rows that one kernel of XLA:GPU sums: 32 rows of threads, 128
        elements each (`ReductionIsRaceFree` in reduction_utils.cc). Of norms over
        16,384 rows 128 partial sums remain, which a second kernel adds (jax 0.12.0.1).
      longest_sum: elements of a row that it sums: 1,024 threads, 16 elements each (as
        above). Rows of 30,720 to 50,304 logits are read once for their maximum, and
        again for the sum of exponentials (H100, jax 0.11.2); softmaxes of up to 1,024
        are one kernel.
      shortest_sum: elements of the shortest reduction that XLA:GPU does not compute
        inside of another: sums, maxima and norms of 15 run in the kernel of a sum over
        rows, of 16 in their own (h100, jax 0.10.2).
      stencils: of a stencil of slices that another one reads, positions beyond the
        first of the one, times those of the other, up to which XLA:GPU computes the
        inner one in the kernel of the outer: a difference of differences is one kernel;
        a third difference, or two stencils of three points, are two (H100, jax 0.10.2).
      most_positions: positions of one stencil that are followed through others, to
        bound the time of the analysis: twice the 27 of a cube of three points a side.
      most_followed: nodes between a matmul's result and where all its readers meet
        again that are followed, to bound the time of the analysis: twice the 32 of a
        GELU's gradient.
      window_bytes: on-chip memory that is left to the windows of kernels' operands: a
        sort's operand and result share 94 of the 128 MiB of a v6e and 28 of the 64 of a
        tpu7x, not 128 and 32; 64 of a v5p's 64 do not stay, 32 do (libtpu 0.0.52).
      loop_benefit: weight of an access in a loop over one outside, for the order in
        which values get on-chip memory (XLA's
        `xla_tpu_memory_space_assignment_while_execution_count`).
      most_padded: sizes of a table of narrow rows that XLA:TPU copies to padded rows,
        to look up there: of 1,000,000 rows, those of 60 to 127 elements, not those of
        56 and less (v5e, libtpu 0.0.52).
      padding_bytes: bytes that padding adds to a table up to which it does so, too: of
        16 elements, 290,000 rows in float32 and 540,000 in bfloat16, not 300,000 and
        620,000 (v5e; v5p and v6e alike).
      turned_items: elements that such a copy reads and writes in a cycle: 77 on v5e, of
        64 and of 100 elements in float32 and bfloat16; 102 on v6e.
      real_products: real products of a complex one, of compilers that split complex
        arrays (XLA:TPU, libtpu 0.0.52).
    """

    most_scattered: int = 8
    combined_latency: float = 0.06
    longest_row: int = 8192
    most_scores: int = 1792 * 1792
    recompute_share: float = 1.1
    most_followed: int = 64
    least_state: int = 4
    least_rows: float = 0.4
    least_channels: int = 8
    longest_column: int = 4096
    longest_sum: int = 16_384
    shortest_sum: int = 16
    stencils: float = 1.0
    most_positions: int = 64
    window_bytes: int = 32 * 2**20
    loop_benefit: float = 5.0
    most_padded: float = 2.0
    padding_bytes: int = 2**27
    turned_items: int = 77
    real_products: int = 3


OBSERVED = Observed()
