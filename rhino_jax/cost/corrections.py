"""Corrections of estimated costs by programs that were compiled.

A compiled program shows what the ops of a plan really take. Ops of one source line,
direction, primitive and kind of sharding share a factor, compiled over estimated
seconds, which multiplies their estimates: it holds for other meshes, micro-batches and
numbers of shards as far as the error is one of the op and not of its size. A kind of
sharding that was not compiled has the factor of all that were, an op of a pass that was
not compiled that of its line and primitive.

Source: the plan is made by the corrected estimate and compiled in turn, as in
"Maximize to Explore" (Liu et al., arXiv 2305.18258).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rhino_jax.ir.program import Source
from rhino_jax.ir.spec import Spec


OpKey = tuple[str, str, str]
"""(source line, direction, primitive) of ops."""


def op_key(source: Source, primitive: str) -> OpKey:
    """Return the key of the ops of a primitive on a source line."""
    direction = "backward" if source.is_backward else "forward"
    if source.is_recomputed:
        direction = "recomputed"
    return str(source) if source.file else "", direction, primitive


def kind_of_sharding(cut: Spec) -> str:
    """Return the sharded factors of an op, or dims of a value, as text: `0,2`."""
    return ",".join(str(k) for k, axes in enumerate(cut) if axes)


@dataclass(frozen=True, slots=True)
class OpTimes:
    """Estimated and compiled seconds of the ops that share a correction, over all
    compiled programs.

    Attributes:
      source: source line, as `model.py:61 (mlp)`.
      direction: "forward", "backward" or "recomputed".
      primitive: name of the primitive, as `dot_general`.
      sharding: kind of sharding, see `kind_of_sharding`.
      estimated_s: seconds as estimated without corrections.
      compiled_s: seconds of the compiled programs.
    """

    source: str
    direction: str
    primitive: str
    sharding: str
    estimated_s: float
    compiled_s: float


@dataclass(frozen=True, slots=True)
class CostCorrections:
    """Corrections of the estimates of one program on one target.

    Attributes:
      programs: number of compiled programs that they come from; 0: nothing is
        corrected.
      ops: times of all groups of ops.
      communication: factor on the seconds of collectives.
    """

    programs: int = 0
    ops: tuple[OpTimes, ...] = ()
    communication: float = 1.0

    def __str__(self) -> str:
        return f"{self.programs} compiled program" + "s" * (self.programs != 1)

    def and_of(self, other: CostCorrections) -> CostCorrections:
        """Return the corrections by the programs of both; for collectives the geometric
        mean of the factors."""
        programs = self.programs + other.programs
        if not self.programs or not other.programs:
            return self if self.programs else other
        both = self.communication**self.programs * other.communication**other.programs
        return CostCorrections(
            programs, _summed((*self.ops, *other.ops)), both ** (1 / programs)
        )

    def preferred_to(self, other: CostCorrections) -> CostCorrections:
        """Return these corrections, with those of another for all other ops and as its
        programs, of which these are a part."""
        if not self.programs:
            return other
        mine = {(t.source, t.direction, t.primitive, t.sharding) for t in self.ops}
        rest = (
            t
            for t in other.ops
            if (t.source, t.direction, t.primitive, t.sharding) not in mine
        )
        return CostCorrections(other.programs, (*self.ops, *rest), self.communication)


NO_CORRECTIONS = CostCorrections()


def _summed(times: Iterable[OpTimes]) -> tuple[OpTimes, ...]:
    sums: dict[tuple[str, str, str, str], tuple[float, float]] = {}
    for t in times:
        key = t.source, t.direction, t.primitive, t.sharding
        estimated_s, compiled_s = sums.get(key, (0.0, 0.0))
        sums[key] = estimated_s + t.estimated_s, compiled_s + t.compiled_s
    return tuple(OpTimes(*key, *both) for key, both in sums.items())


@dataclass(frozen=True, slots=True)
class CostFactors:
    """The factors of corrections, by op.

    Attributes:
      communication: as in `CostCorrections`.
      by_key: key of ops, with their kind of sharding or without, or (source line,
        primitive) alone → factor.
    """

    communication: float
    by_key: Mapping[tuple[str, ...], float] = field(default_factory=dict)

    @classmethod
    def of(cls, corrections: CostCorrections) -> CostFactors:
        """Return the factors of corrections."""
        sums: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for t in corrections.ops:
            op = t.source, t.direction, t.primitive
            for key in ((*op, t.sharding), op, (t.source, t.primitive)):
                sums[key][0] += t.estimated_s
                sums[key][1] += t.compiled_s
        factors = {k: made / asked for k, (asked, made) in sums.items() if asked}
        return cls(corrections.communication, factors)

    def of_op(self, key: OpKey, sharding: str) -> float:
        """Return the factor on the compute of an op under a kind of sharding."""
        for known in ((*key, sharding), key, (key[0], key[2])):
            if known in self.by_key:
                return self.by_key[known]
        return 1.0
