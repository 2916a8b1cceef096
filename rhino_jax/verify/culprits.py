"""Find the user's own shardings that cause a collective.

The compiler names the operation around a collective, not the sharding that causes it.
That sharding is near in the program: a constraint that leaves an axis out, or an
argument sharded over the axis. Both are searched from the operation's line, backwards
and forwards through operations that preserve the sharding (elementwise ones, loops and
calls). `SourceCost` is the communication cost of a source line, with the shardings that
cause it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rhino_jax._compat import user_frames
from rhino_jax.frontend.provenance import cell_of
from rhino_jax.frontend.regions import all_equations
from rhino_jax.ir.axes import crossings
from rhino_jax.ir.collectives import KINDS
from rhino_jax.ir.program import USERS_CONSTRAINT, Op, Program, Source
from rhino_jax.plan.records import Collective, Traffic, traffic_of
from rhino_jax.verify.matching.ledger import (
    Evidence,
    Key,
    Ledger,
    primitive_of,
    rematerialisation_of,
    total,
)


_QUOTED = re.compile(r"'([^']+)'")
_MAX_NAMED = 4
"""Shardings that are named per collective."""

_MAX_STEPS = 64
"""Values visited in each direction; a sharding further away is not near any more."""


@dataclass(frozen=True, slots=True)
class Culprits:
    """An index of a program that finds the shardings near a source line.

    Attributes:
      ops_on: source line → ops on it.
      makers, readers: value id → the op that defines it, and those that read it.
      came_from, goes_to: value → values that are the same data across the border of
        a loop, a branch or a call.
      args: value id → (tree path, mesh axes) of each sharded argument.
      lines: op id of each constraint → its source line, and the line that calls a
        helper there.
    """

    ops_on: Mapping[str, tuple[Op, ...]]
    makers: Mapping[int, tuple[Op, ...]]
    readers: Mapping[int, tuple[Op, ...]]
    came_from: Mapping[int, tuple[int, ...]]
    goes_to: Mapping[int, tuple[int, ...]]
    args: Mapping[int, tuple[str, frozenset[str]]]
    lines: Mapping[int, str]

    def of(self, source: str, axes: Iterable[str], *, is_gather: bool) -> list[str]:
        """Describe the shardings that request a collective on a source line.

        Args:
          source: the source line of the collective.
          axes: mesh axes that the collective runs over.
          is_gather: whether it is an all-gather over those axes; a constraint that
            shards over all of them then requests nothing.
        """
        over = frozenset(axes)

        def asked(op: Op) -> Iterator[str]:
            """Yield the description of a constraint if it can cause the movement."""
            is_cause = not is_gather or not over <= set(_QUOTED.findall(op.label))
            if op.name == USERS_CONSTRAINT and is_cause:
                yield f"the constraint {op.label} at {self.lines[op.id]} asks for it"

        def near(value: int, *, is_ahead: bool) -> Iterator[str]:
            """Yield the constraints that a value flows into; or those that it derives
            from, and sharded arguments."""
            queue, seen = [value], {value}
            while queue and len(seen) < _MAX_STEPS:
                at = queue.pop(0)
                path, cut = self.args.get(at, ("", frozenset()))
                if not is_ahead and cut & over:
                    yield f"`{path}` is sharded over {' × '.join(sorted(cut & over))}"
                new = [*(self.goes_to if is_ahead else self.came_from).get(at, ())]
                for op in (self.readers if is_ahead else self.makers).get(at, ()):
                    yield from asked(op)
                    if op.is_fusible and op.name != USERS_CONSTRAINT:
                        new += op.results if is_ahead else op.operands
                queue += [v for v in new if v not in seen]
                seen |= set(new)

        found: dict[str, None] = {}
        for op in self.ops_on.get(source, ()):
            found |= dict.fromkeys(asked(op))
            for value in op.operands:
                found |= dict.fromkeys(near(value, is_ahead=False))
            for value in op.results:
                found |= dict.fromkeys(near(value, is_ahead=True))
        words = list(found)
        rest = len(words) - _MAX_NAMED
        return [*words[:_MAX_NAMED], f"and {rest} more"] if rest > 0 else words


def culprits_of(
    program: Program, closed_jaxpr: Any, cut_by: Mapping[str, frozenset[str]]
) -> Culprits:
    """Build the index of a program as its user wrote it.

    Args:
      program: the program, with the user's constraints.
      closed_jaxpr: the jaxpr that the program was imported from.
      cut_by: tree path of an argument → mesh axes that it is sharded over.
    """
    ops_on: dict[str, list[Op]] = defaultdict(list)
    readers: dict[int, list[Op]] = defaultdict(list)
    makers: dict[int, tuple[Op, ...]] = {}
    came_from: dict[int, list[int]] = defaultdict(list)
    goes_to: dict[int, list[int]] = defaultdict(list)
    for op in program.ops:
        # XLA slices a loop's operands on the loop's own line.
        ops_on[str(op.source)].append(op)
        if op.call is not None:
            for at in crossings(op):
                pairs = [(op.operands[i], v) for i in at.operands for v in at.entering]
                pairs += [(v, op.results[i]) for i in at.results for v in at.leaving]
                for before, after in pairs:
                    came_from[after].append(before)
                    goes_to[before].append(after)
            continue
        makers |= dict.fromkeys(op.results, (op,))
        for value in op.operands:
            readers[value].append(op)
    args = {
        i.value: (i.path, cut_by[i.path]) for i in program.inputs if i.path in cut_by
    }
    return Culprits(
        {k: tuple(v) for k, v in ops_on.items()},
        makers,
        {k: tuple(v) for k, v in readers.items()},
        {k: tuple(v) for k, v in came_from.items()},
        {k: tuple(v) for k, v in goes_to.items()},
        args,
        {
            op.id: _line(op, eqn)
            for op, eqn in all_equations(program, closed_jaxpr)
            if op.name == USERS_CONSTRAINT
        },
    )


def _line(op: Op, eqn: Any) -> str:
    """Return the source line of a constraint, and its caller's line.

    As `layers.py:12 (pin), from gpt.py:70 (mlp)`: users write constraints in helpers.
    """
    frames = [
        str(Source(cell_of(file), line, function.rsplit("<locals>.", 1)[-1]))
        for file, line, function in user_frames(eqn.source_info)
    ]
    own = str(op.source)
    if own not in frames[:-1]:
        return own
    return f"{own}, from {frames[frames.index(own) + 1]}"


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
    kind = KINDS[collective.kind]
    cause = _CONSTRAINED if kind.gathers and by == USERS_CONSTRAINT else kind.cause
    sentence = cause.format(by=by, axes=axes, where=where)
    if culprits is None or not kind.reshards:  # a sum follows from the contracted dims
        return sentence
    asked = culprits.of(collective.source, collective.axes, is_gather=kind.gathers)
    return "; ".join((sentence, *asked))


_CONSTRAINED = (
    "a constraint needs a value replicated over {axes}, which shards it{where}"
)
