"""The kinds of collectives: all that the package knows of one, but its seconds.

To add a kind: a record here, and where it has a pattern of its own, its seconds in
`rhino_jax.cost.collectives`. Programs, costs, compiled HLO and reports read the rest
from the record.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


ALL_REDUCE = "all-reduce"
ALL_GATHER = "all-gather"
REDUCE_SCATTER = "reduce-scatter"
ALL_TO_ALL = "all-to-all"
PERMUTE = "collective-permute"
BROADCAST = "collective-broadcast"


class Pattern(enum.Enum):
    """State which devices of a group send to which.

    RING: each to its neighbour, in rounds, (n-1)/n of the local bytes in each.
    EXCHANGE: each to every other one, (n-1)/n of the local bytes together.
    HOP: each to one other, the local bytes whole.
    """

    RING = enum.auto()
    EXCHANGE = enum.auto()
    HOP = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveKind:
    """One kind of collective.

    Attributes:
      name: its HLO opcode, by which plans and messages name it, too.
      pattern: which devices send to which.
      rounds: number of rounds of a ring.
      sums: whether it adds partial sums.
      replicates: whether all devices of a group have the same result.
      parts: kinds that do the same one after the other.
      has_pairs: whether HLO lists (source, target) pairs, not groups of devices.
      primitives: JAX's primitives that are of this kind.
      opcodes: further HLO opcodes that count as this kind.
      slice_type: name of a transfer of this kind between TPU slices.
      reshards: verb for a value whose sharding it changes; empty where no reshard has
        it.
      cause: why XLA inserts it, of `by` (a primitive), `axes` and `where`.
    """

    name: str
    pattern: Pattern
    rounds: int = 1
    sums: bool = False
    replicates: bool = False
    parts: tuple[str, ...] = ()
    has_pairs: bool = False
    primitives: tuple[str, ...] = ()
    opcodes: tuple[str, ...] = ()
    slice_type: str = ""
    reshards: str = ""
    cause: str

    @property
    def gathers(self) -> bool:
        """Whether the result is larger than the operand: it gives the local bytes."""
        return self.replicates and not self.sums and self.pattern is Pattern.RING


KINDS = {
    kind.name: kind
    for kind in (
        CollectiveKind(
            name=ALL_REDUCE,
            pattern=Pattern.RING,
            rounds=2,
            sums=True,
            replicates=True,
            parts=(REDUCE_SCATTER, ALL_GATHER),
            primitives=("psum", "psum2", "psum_invariant", "pmax", "pmin"),
            slice_type="ALL_REDUCE",
            cause="{by} sums over a dim that is sharded over {axes}, and its result is"
            " needed replicated: the partial sums of all devices are reduced{where}",
        ),
        CollectiveKind(
            name=ALL_GATHER,
            pattern=Pattern.RING,
            replicates=True,
            primitives=("all_gather", "all_gather_invariant"),
            slice_type="ALL_GATHER",
            reshards="gathers",
            cause="{by} reads whole a value that is sharded over {axes}: gathered for"
            " each read{where}",
        ),
        CollectiveKind(
            name=REDUCE_SCATTER,
            pattern=Pattern.RING,
            sums=True,
            primitives=("reduce_scatter",),
            slice_type="REDUCE_SCATTER",
            cause="{by} sums over a dim that is sharded over {axes}; each device keeps"
            " its part of the sum{where}",
        ),
        CollectiveKind(
            name=ALL_TO_ALL,
            pattern=Pattern.EXCHANGE,
            primitives=("all_to_all",),
            opcodes=("ragged-all-to-all",),
            slice_type="ALL_TO_ALL",
            reshards="reshards",
            cause="{by} needs {axes} on another dim than it does{where}",
        ),
        CollectiveKind(
            name=PERMUTE,
            pattern=Pattern.HOP,
            has_pairs=True,
            primitives=("ppermute",),
            slice_type="ONE_TO_ONE",
            reshards="reorders",
            cause="{by} reads shards of other devices along {axes}: a shift, a window,"
            " or the same dims in another order{where}",
        ),
        CollectiveKind(
            name=BROADCAST,
            pattern=Pattern.HOP,
            replicates=True,
            cause="{by} reads on all of {axes} the data of one device{where}",
        ),
    )
}
"""Name → kind, in the order in which reports colour them."""

OF_PRIMITIVE = {p: kind for kind in KINDS.values() for p in kind.primitives}
"""JAX primitive → kind."""

OF_OPCODE = {o: kind for kind in KINDS.values() for o in (kind.name, *kind.opcodes)}
"""HLO opcode, without `-start` and `-done` → kind."""
