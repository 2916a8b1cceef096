"""The engine's parameters: stopping criteria, and division of work between methods.

Shares have no unit, `_s` are seconds of wall-clock time, `deterministic_s` CP-SAT's own
count of work (about a second each on one core), cells entries of the tables of edges.
None changes the cost of a solution or the meaning of a bound, only how soon both are
found. The work per level is in `incumbents.EFFORTS`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Presolve:
    """Parameters of presolve.

    Attributes:
      most_cells: a node whose elimination would touch more cells stays in the core: at
        about 1 ns a cell that is 0.04 s.
      few_cells: sums up to which computing all is faster than looking for equal
        columns: a tenth to a half of the time (seven programs on meshes of two to four
        axes).
      most_compared: nodes with more options are not searched for dominated options,
        which takes quadratic time.
      most_at_once: cells up to which a node is eliminated from all restrictions at
        once: as many as NumPy adds in the time that it takes to start an operation for
        each. From 20,000 to a million it makes little difference (six programs on
        meshes of two to four axes).
    """

    most_cells: int = 40_000_000
    few_cells: int = 250_000
    most_compared: int = 256
    most_at_once: int = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageParameters:
    """Parameters of message passing.

    Attributes:
      first_stride: factor of the extrapolation by the last step, at first.
      longer: factor on it after a round that it improved.
      shorter: factor on it after a round that it worsened, which is undone.
    """

    first_stride: float = 0.5
    longer: float = 1.2
    shorter: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightParameters:
    """Parameters of the weights of hidable time, from 0 to 1: see `solve.Weights`.

    Attributes:
      hidden: weight tried if all hidable time is hidden: the best of several such
        assignments is then one with less hidden time.
      least: weight at which such assignments are bounded. Hidden time is then almost
        free.
      narrow: a crossing within this share of the interval from either end is not tried.
      preferred: share of T that an assignment found at the smallest weight must save,
        since it hides more.
      briefly_near: relative gap at which the search stops at a weight whose bound does
        not matter.
    """

    hidden: float = 0.1
    least: float = 1e-3
    narrow: float = 0.02
    preferred: float = 1e-3
    briefly_near: float = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveParameters:
    """Parameters of moves.

    Attributes:
      units: cost of a known assignment in CP-SAT's integer units, if costs are not
        integers: rounding is then one part in 1e9 per term.
      most_units: largest cost of any assignment in these units: CP-SAT has 64-bit
        integers, and sums of two need one more bit.
      most_forests: number of forests that moves use in turn. Building one takes longer
        than a move.
      few_nodes: levels of a forest with fewer nodes are computed node by node: a NumPy
        operation takes about a microsecond whatever its size.
      large_table: tables with more cells are computed one by one, too: a copied table
        takes memory.
      distinct_cells: tables with fewer cells are computed with repeated rows and
        columns: starting the NumPy operations that skip these takes longer.
      distinct_ratio: larger tables skip them where they leave at most one cell in so
        many.
      most_copied: cells that a forest copies: 32 MB including their positions. The
        largest tables are not copied.
      least_gain: smallest share of T that moving a single node must gain: above the
        rounding of sums of 1e5 terms.
      most_passes: passes over all nodes, moved one by one, from the best assignment of
        a weight to one that is optimal at no weight.
      most_switches: single-node switches to repair an assignment beyond the limit.
      most_rounds: rounds of switches to improve an assignment within the limit.
    """

    units: float = 1e9
    most_units: float = 2.0**61
    most_forests: int = 12
    few_nodes: int = 2
    large_table: int = 1000
    distinct_cells: int = 8000
    distinct_ratio: int = 2
    most_copied: int = 2_000_000
    least_gain: float = 1e-9
    most_passes: int = 4
    most_switches: int = 400
    most_rounds: int = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairwise:
    """The search without memory: see `pairwise`.

    Attributes:
      optimal_gap: relative gap below which an assignment is called optimal: predictions
        are far less accurate.
      stale_moves: consecutive moves that each gain less than a tenth of that, after
        which improvement stops.
      first_climb: first round of messages whose assignment is improved by moves.
      rounds_per_climb: rounds of messages between such improvements.
      stalled_rounds: rounds of messages in which the bound must rise by
        `stalled_share`; else they stop.
      stalled_share: smallest such rise, as a share of the gap.
    """

    optimal_gap: float = 1e-4
    stale_moves: int = 3
    first_climb: int = 4
    rounds_per_climb: int = 5
    stalled_rounds: int = 6
    stalled_share: float = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class CpSat:
    """Parameters of CP-SAT.

    Attributes:
      longest_s: time limit of any model without another limit.
      deterministic_s: limit of any model without memory: a proof, or a combination of
        assignments. Of 91 such fusions (20 models, up to 5,600 variables) all were
        solved, in at most 0.22. With twice as many for proofs, 3 of 26 `best` plans
        differ (steps 0.99997 in the geometric mean, gaps of 0.2 % are 0.05 %) and
        planning takes 1.8 times as long (mostly on one axis).
      cell_deterministic_s: largest expected cost of a proof per edge variable: a
        problem that needs more than the limit is left open. Of 34 proofs (16 models,
        900 to 31,000 cells) it was 1.4e-5 to 7.6e-5, more for larger ones; of 24
        problems of 60,000 to 1.4 million CP-SAT found no assignment at all in two
        deterministic seconds.
      most_limited_cells: largest number of edge variables of a model with memory: at
        about 20 µs and 5 KB each to build, 0.8 s and 200 MB (OR-tools 9.15).
      most_amounts: number of coefficients in all memory rows up to which a model has
        all rows from the start.
      rows_at_once: number of memory rows that a larger model begins with, and that are
        added at a time when its solution violates some.
    """

    longest_s: float = 60.0
    deterministic_s: float = 1.0
    cell_deterministic_s: float = 7.5e-5
    most_limited_cells: int = 40_000
    most_amounts: int = 1_000_000
    rows_at_once: int = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """Parameters of combining assignments: see `moves.fusion`.

    Attributes:
      near: largest cost of combined assignments, as a multiple of the best one's.
      most_met: largest number of assignments, the cheapest first.
      at_once: number of assignments combined with the best at once if memory is
        limited.
      most_cells: cells of all tables up to which nodes are minimised out, without a
        memory limit: at a few ns each as long as CP-SAT takes for the same.
      most: their total number, some at a time: with eight at once CP-SAT finds less in
        the same time.
      most_tries: number of models, each with one more time at which the previous
        solution overflowed.
      limited_deterministic_s: CP-SAT's limit for some options under a memory limit.
      limited_near: relative gap at which CP-SAT stops there.
    """

    near: float = 1.3
    most_met: int = 12
    at_once: int = 3
    most_cells: int = 5_000_000
    most: int = 6
    most_tries: int = 12
    limited_deterministic_s: float = 0.5
    limited_near: float = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbourhoods:
    """Parameters of large-neighbourhood search: see `moves.neighbourhoods`.

    Attributes:
      first_cells: edge variables of the first neighbourhood.
      most_cells: edge variables of any, at most.
      larger: factor on their number after one was solved in time.
      smaller: factor after one was not; not below a quarter of the first.
      settle_s: CP-SAT's time limit for one.
      nearly_full: a time counts as full if its free memory is at most this share of the
        limit.
      traders: number of nodes with memory at such a time that a neighbourhood starts
        from.
    """

    first_cells: int = 3_000
    most_cells: int = 40_000
    larger: float = 1.15
    smaller: float = 0.7
    settle_s: float = 3.0
    nearly_full: float = 0.01
    traders: int = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalPrices:
    """Parameters of multipliers per interval of a node: see `bounds.time_prices`.

    Attributes:
      first_sweeps: rounds of messages before there are multipliers.
      sweeps: sweeps over all messages per multiplier, in both orders.
      forest_moves: moves per multiplier.
      rise: factor by which all multipliers rise until memory nearly fits.
      nearly: largest excess memory, as a share of the limit, at which multipliers are
        first updated individually.
      rate: power of memory fullness by which multipliers are then scaled, at first.
      slowing: number of updates after which the power is halved.
      least_fill: lower bound on the fullness, as a share of the limit, used in updates.
      most_fill: upper bound on it.
      rounding: relative error of floating-point sums allowed for in bounds.
    """

    first_sweeps: int = 10
    sweeps: int = 2
    forest_moves: int = 4
    rise: float = 4.0
    nearly: float = 0.02
    rate: float = 2.0
    slowing: int = 10
    least_fill: float = 0.7
    most_fill: float = 1.5
    rounding: float = 1e-9


PRESOLVE = Presolve()
MESSAGES = MessageParameters()
WEIGHTS = WeightParameters()
MOVES = MoveParameters()
PAIRWISE = Pairwise()
CPSAT = CpSat()
FUSION = Fusion()
NEIGHBOURHOODS = Neighbourhoods()
INTERVAL_PRICES = IntervalPrices()
