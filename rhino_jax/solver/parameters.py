"""The engine's parameters: where it stops, and what it leaves to whom.

Shares have no unit, `_s` are seconds of wall-clock time, `deterministic_s` CP-SAT's own
count of work (about a second each on one core), cells entries of the tables of edges.
None changes what a solution costs or what a bound means, only how soon both are found.
How much work each level does is `incumbents.EFFORTS`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Presolve:
    """Attributes:
    most_cells: a node whose elimination would touch more cells stays in the core: at
        about 1 ns a cell that is 0.04 s.
    few_cells: sums up to which it is quicker to compute all than to look for equal
        columns: a tenth to a half of the time (seven programs on meshes of two to four
        axes).
    most_compared: nodes of more options are not searched for options that another
        beats, which takes the square of their number.
    most_at_once: cells up to which a node is eliminated from all restrictions at once:
        what NumPy adds up in the time that it takes to begin an operation for each.
        From 20,000 to a million it makes little difference (six programs on meshes of
        two to four axes).
    """

    most_cells: int = 40_000_000
    few_cells: int = 250_000
    most_compared: int = 256
    most_at_once: int = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageParameters:
    """Attributes:
    first_stride: share of its last step by which a round moves on messages first.
    longer: factor on this share after a round that was better for it.
    shorter: factor on it after one that was worse, and was taken back.
    """

    first_stride: float = 0.5
    longer: float = 1.2
    shorter: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightParameters:
    """Weights of what can hide, from 0 to 1: see `bounds.weights`.

    Attributes:
      hidden: the weight that is tried where all that can be hidden is hidden: the best
        of several such choices then is one that hides less.
      least: the weight at which such choices are bounded. What hides is then as good as
        free.
      narrow: a crossing so near to one end, as a share of the way to the other, is not
        tried.
      preferred: share of T that a choice found at the least weight must save, since it
        hides more.
      briefly_near: how near to the bound a choice need be, as a share of its cost, at a
        weight whose bound does not count.
    """

    hidden: float = 0.1
    least: float = 1e-3
    narrow: float = 0.02
    preferred: float = 1e-3
    briefly_near: float = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveParameters:
    """Attributes:
    units: what a known choice costs in CP-SAT's whole units, where costs are not whole:
        rounding is then a part in 1e9 for every term.
    most_units: what the dearest choice costs at most, in the same: CP-SAT counts in 64
        bits, of which sums of two need one more.
    most_forests: forests that moves are made on, one after the other. Finding one takes
        longer than a move.
    few_nodes: levels of a forest of fewer nodes are worked out node by node: an
        operation of NumPy takes about a microsecond whatever it does.
    large_table: tables of more cells are, too: one that is copied takes memory.
    most_copied: cells that a forest copies: 32 MB with the places they come from. The
        largest tables are not copied.
    least_gain: share of T that moving a single node must gain: above the rounding of
        sums of 1e5 terms.
    most_passes: passes over all nodes that are moved singly, from the best choice of a
        weight to one that no weight makes best.
    most_switches: switches of single nodes that may take a choice back into its limit.
    most_rounds: rounds of such switches that may improve it within the limit.
    """

    units: float = 1e9
    most_units: float = 2.0**61
    most_forests: int = 12
    few_nodes: int = 2
    large_table: int = 1000
    most_copied: int = 2_000_000
    least_gain: float = 1e-9
    most_passes: int = 4
    most_switches: int = 400
    most_rounds: int = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairwise:
    """The search without memory: see `pairwise`.

    Attributes:
      optimal_gap: a choice whose gap is below this share of its cost is called optimal:
        predictions are coarser by far.
      stale_moves: moves in a row that gain less than a tenth of that, after which a
        climb is over.
      first_climb: the round of messages whose choice is climbed from first.
      rounds_per_climb: rounds of messages from one such climb to the next.
      stalled_rounds: rounds of messages in which their bound must rise.
      stalled_share: by at least this share of what is still open; else they stop.
    """

    optimal_gap: float = 1e-4
    stale_moves: int = 3
    first_climb: int = 4
    rounds_per_climb: int = 5
    stalled_rounds: int = 6
    stalled_share: float = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class CpSat:
    """Attributes:
    longest_s: seconds of any one model, where no other limit holds.
    deterministic_s: its limit for any model where memory is not limited: a proof, or
        choices that are put together. Of 91 such fusions (20 models, up to 5,600
        variables) all were settled, in at most 0.22. With twice as many for proofs, 3
        of 26 `best` plans differ (steps 0.99997 in the geometric mean, gaps of 0.2 %
        are 0.05 %) and planning takes 1.8 times as long (mostly on one axis).
    cell_deterministic_s: what a proof takes per edge variable at most: a problem that
        needs more than there is is left open. Of 34 proofs (16 models, 900 to 31,000
        cells) it was 1.4e-5 to 7.6e-5, more for larger ones; of 24 problems of 60,000
        to 1.4 million CP-SAT made no choice at all in two deterministic seconds.
    most_limited_cells: edge variables up to which CP-SAT chooses with memory: at about
        20 µs and 5 KB each to build, 0.8 s and 200 MB (OR-tools 9.15).
    most_amounts: amounts in all rows of memory up to which a model has them from the
        start.
    rows_at_once: rows of memory that a larger model begins with, and that it gets at a
        time where its choice breaks some.
    """

    longest_s: float = 60.0
    deterministic_s: float = 1.0
    cell_deterministic_s: float = 7.5e-5
    most_limited_cells: int = 40_000
    most_amounts: int = 1_000_000
    rows_at_once: int = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """Putting choices together: see `moves.fusion`.

    Attributes:
      near: choices up to so many times as dear as the best are put together.
      most_met: so many of them, the cheapest.
      at_once: choices that are merged with the best at once where memory is limited.
      most: and in all, some at a time: of eight at once CP-SAT finds less in the same
        time.
      most_tries: models, each with the time more at which the choice before it
        overflowed.
      limited_deterministic_s: CP-SAT's limit for some options under a memory limit.
      limited_near: share of the objective at which it stops, there.
    """

    near: float = 1.3
    most_met: int = 12
    at_once: int = 3
    most: int = 6
    most_tries: int = 12
    limited_deterministic_s: float = 0.5
    limited_near: float = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbourhoods:
    """CP-SAT on one part after the other: see `moves.neighbourhoods`.

    Attributes:
      first_cells: edge variables of the first.
      most_cells: of any, at most.
      larger: factor on their number where CP-SAT settles one in time.
      smaller: factor where it does not; they do not fall below a quarter of the first.
      settle_s: seconds that CP-SAT has for one.
      nearly_full: share of the limit by which a time may be below it to count as full.
      traders: nodes holding memory at such a time that one begins with.
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
    """Prices of memory per interval of a node: see `moves.interval_prices`.

    Attributes:
      first_sweeps: rounds of messages before there are prices.
      sweeps: sweeps over all messages for each price, there and back.
      forest_moves: moves for each price.
      rise: factor by which all prices rise until memory nearly fits.
      nearly: share of the limit by which memory may overflow once prices move one by
        one.
      rate: power of how full memory is by which prices then answer, at first.
      slowing: answers after which the power is half of that.
      least_fill: fullness, as a share of the limit, that counts where there is less.
      most_fill: and where there is more.
      rounding: share of a bound that sums of floating-point numbers may be off by.
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
