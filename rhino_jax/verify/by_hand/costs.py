"""Communication cost of each source line, and the shardings that cause it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rhino_jax.ir.program import USERS_CONSTRAINT
from rhino_jax.plan.diff import Traffic, traffic_of
from rhino_jax.plan.records import Collective
from rhino_jax.verify.by_hand.culprits import Culprits
from rhino_jax.verify.matching.causes import (
    Evidence,
    primitive_of,
    rematerialisation_of,
)
from rhino_jax.verify.matching.ledger import Key, Ledger, total


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCost:
    """Communication cost of one line of the user's program.

    Attributes:
      source: source line, as `gpt.py:70 (mlp)`; empty where the compiler names none.
      traffic: runs, bytes on the wire and seconds per device and step.
      moves: traffic by (kind, axes), most seconds first.
      why: a sentence for each entry of `moves` on the sharding that causes it.
    """

    source: str
    traffic: Traffic
    moves: tuple[tuple[Key, Traffic], ...]
    why: tuple[str, ...]


def costs_of(
    collectives: Sequence[Collective],
    rematerialised: Iterable[str] = (),
    culprits: Culprits | None = None,
) -> tuple[SourceCost, ...]:
    """Group collectives by source line, most seconds first.

    Args:
      collectives: collectives of a compiled program, with their seconds.
      rematerialised: the compiler's messages on values that it replicated in full.
      culprits: index of the user's own shardings; None: they are not searched.
    """
    by_line: dict[str, list[Collective]] = {}
    for c in collectives:
        by_line.setdefault(c.source, []).append(c)
    evidence = Evidence(tuple(rematerialised))
    costs = []
    for source, members in by_line.items():
        moves = tuple(traffic_of(members).items())
        largest = {
            key: max(
                (c for c in members if (c.kind, c.axes) == key), key=lambda c: c.bytes
            )
            for key, _ in moves
        }
        costs.append(
            SourceCost(
                source=source,
                traffic=total(t for _, t in moves),
                moves=moves,
                why=tuple(why(c, evidence, culprits) for c in largest.values()),
            )
        )
    costs.sort(key=lambda c: (-c.traffic.seconds, -c.traffic.bytes, c.source))
    return tuple(costs)


def why(
    collective: Collective, evidence: Evidence, culprits: Culprits | None = None
) -> str:
    """Explain a collective by the sharding that causes it, as its op name tells."""
    (entry,) = Ledger.of([collective]).entries
    found = rematerialisation_of(entry, evidence)
    if found:
        return found
    axes = " × ".join(collective.axes)
    primitive = primitive_of(collective.op)
    where = " in the backward pass" if "transpose(" in collective.op else ""
    if collective.count > 1:
        where += f", {collective.count} times a step"
    by = f"{primitive}" if primitive else "an operation"
    sentence = _SENTENCES[collective.kind](axes, by, where)
    if culprits is None or collective.kind not in _ASKED_FOR:
        return sentence
    asked = culprits.of(
        collective.source, collective.axes, is_gather=collective.kind == "all-gather"
    )
    return "; ".join((sentence, *asked))


def _all_gather(axes: str, by: str, where: str) -> str:
    if by == USERS_CONSTRAINT:
        return f"a sharding constraint asks for a value whole that {axes} cuts{where}"
    return (
        f"{by} reads whole a value that is cut over {axes}: gathered for each"
        f" read{where}"
    )


def _all_reduce(axes: str, by: str, where: str) -> str:
    return (
        f"{by} sums over a dim that is cut over {axes}, and its result is wanted whole:"
        f" partial sums of all devices are added{where}"
    )


def _reduce_scatter(axes: str, by: str, where: str) -> str:
    return (
        f"{by} sums over a dim that is cut over {axes}; each device keeps its part of"
        f" the sum{where}"
    )


def _all_to_all(axes: str, by: str, where: str) -> str:
    return f"{by} wants {axes} to cut another dim than it does{where}"


def _permute(axes: str, by: str, where: str) -> str:
    return (
        f"{by} reads pieces that lie on other devices along {axes}: a shift, a window,"
        f" or the same cut in another order{where}"
    )


def _broadcast(axes: str, by: str, where: str) -> str:
    return f"{by} reads on all of {axes} what one device holds{where}"


_ASKED_FOR = ("all-gather", "all-to-all", "collective-permute")
"""Kinds that a sharding requests; a reduction follows from the contracted dims."""

_SENTENCES = {
    "all-gather": _all_gather,
    "all-reduce": _all_reduce,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "collective-permute": _permute,
    "collective-broadcast": _broadcast,
}
