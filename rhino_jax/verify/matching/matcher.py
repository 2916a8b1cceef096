"""Match two ledgers of collectives against each other, one kind of match at a time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rhino_jax.plan.records import Traffic
from rhino_jax.verify.matching import ledger as causes
from rhino_jax.verify.matching.identities import Identity
from rhino_jax.verify.matching.ledger import Entry, Evidence, Key, Ledger, total


COMBINED = "combined"
HOISTED = "hoisted out of a loop"
SPLIT = "split"
OTHER_RUNS = "in other runs"
ELIMINATED = "eliminated"
RETYPED = "another type"
WINDOWED = "windowed"

_WINDOWED = re.compile(r"windowed loop of (\d+) permutes")
"""The remark that `verify.hlo.collectives.windowed` gives."""

_TYPE_RATIOS = (0.25, 0.5, 2.0, 4.0)
"""Possible ratios of element sizes, as of float32 to bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One difference between the compiled program and the plan.

    Attributes:
      kind, axes: kind and mesh axes of the plan's collectives; of the compiled ones
        where the plan has none.
      became: (kind, axes) of the compiled collectives, where they differ from the
        plan's.
      predicted: runs, bytes and seconds in the plan, per device and step.
      compiled: the same in the compiled program.
      sources: source lines, those that move most first.
      label: the kind of change in a word or two, as "combined" or "hoisted out of
        a loop".
      cause: explanation of the change, as a sentence.
      is_harmless: whether the compiled program moves no more bytes than the plan; or
        more only because XLA:CPU has no reduce-scatter, or in a windowed einsum that
        overlaps with its matmul, or in code that the user wrote by hand.
    """

    kind: str
    axes: tuple[str, ...]
    became: tuple[Key, ...] = ()
    predicted: Traffic
    compiled: Traffic
    sources: tuple[str, ...] = ()
    label: str
    cause: str
    is_harmless: bool

    @property
    def seconds(self) -> float:
        """Change of all collectives' time; negative where the compiler saves time."""
        return self.compiled.seconds - self.predicted.seconds

    @property
    def bytes(self) -> int:
        """Change of the bytes on the wire; negative where the compiler saves bytes."""
        return self.compiled.bytes - self.predicted.bytes


@dataclass(frozen=True, slots=True)
class Matcher:
    """Empties two ledgers against each other, one kind of match after the other."""

    planned: Ledger
    made: Ledger
    platform: str
    evidence: Evidence

    def pairs(self) -> Iterator[tuple[Entry, Entry]]:
        """Yield entries equal in kind, axes and line until the planned one is empty."""
        for plan_entry in self.planned.left():
            for entry in self.made.left(plan_entry.key):
                if entry.source == plan_entry.source:
                    yield plan_entry, entry
                if not plan_entry.traffic.bytes:
                    break

    def same_runs(self) -> list[Difference]:
        """Match runs equal in kind, axes, line and size; fewer runs were hoisted."""
        hoisted = []
        for plan_entry, entry in self.pairs():
            planned = plan_entry.per_run_bytes
            if abs(planned - entry.per_run_bytes) > 1 + 1e-6 * planned:
                continue
            have, runs = plan_entry.traffic.count, entry.traffic.count
            if runs < have and have % runs == 0 and runs % plan_entry.trips:
                cause = f"hoisted out of a loop: it runs {runs}x, planned {have}x"
                hoisted.append(self.matched(plan_entry, entry, HOISTED, cause))
            else:
                common = min(have, runs)
                _cut_runs(plan_entry, common)
                _cut_runs(entry, common)
        return hoisted

    def windowed(self) -> list[Difference]:
        """Match collectives with windowed einsums of the same number of runs.

        Chunks that travel the ring in both directions take more permutes than one
        direction.
        """
        found = []
        for plan_entry, entry in self.pairs():
            said = _WINDOWED.search(entry.reason)
            if said is None or entry.traffic.count != plan_entry.traffic.count:
                continue
            number = int(said[1])
            pieces = plan_entry.per_run_bytes / (entry.per_run_bytes / number)
            if abs(pieces - round(pieces)) > 1e-3 or not pieces < number:
                continue
            cause = (
                f"XLA passes {number} pieces round, both ways, beside the product"
                f" they are of; one way takes {round(pieces)}"
            )
            hidden = entry.is_hidden
            found.append(
                self.matched(plan_entry, entry, WINDOWED, cause, is_harmless=hidden)
            )
        return found

    def retyped(self) -> list[Difference]:
        """Match the same runs with 1/4 to 4 times the bytes: another element type."""
        found = []
        for plan_entry, entry in self.pairs():
            ratio = entry.per_run_bytes / plan_entry.per_run_bytes
            if entry.traffic.count == plan_entry.traffic.count and any(
                abs(ratio - r) < 1e-3 for r in _TYPE_RATIOS
            ):
                size = "smaller" if ratio < 1 else "larger"
                cause = (
                    f"the same runs of {ratio:g}x the bytes: XLA converts to a"
                    f" {size} type before it moves them, not after"
                )
                found.append(self.matched(plan_entry, entry, RETYPED, cause))
        return found

    def same_key(self) -> list[Difference]:
        """Match equal bytes of a kind over the same axes in another number of runs."""
        found = []
        for key in self.planned.keys():
            before, after = self.both(key, key)
            if not before:
                continue
            n, m = (total(e.traffic for e in side).count for side in (before, after))
            if n == m:
                continue
            left = self.planned.bytes_of(key), self.made.bytes_of(key)
            label = OTHER_RUNS if any(left) else COMBINED if m < n else SPLIT
            cause = f"{label}: {n} planned run as {m}, the same bytes"
            found.append(self.difference(before, after, label, cause))
        return found

    def both(self, planned: Key, made: Key) -> tuple[list[Entry], list[Entry]]:
        """Take the bytes common to both sides from both, line by line first."""
        before: list[Entry] = []
        after: list[Entry] = []
        lines = sorted({e.source for e in self.planned.left(planned)})
        for wanted in (*({x} for x in lines), None):
            common = min(
                self.planned.bytes_of(planned, wanted), self.made.bytes_of(made, wanted)
            )

            def is_wanted(entry: Entry, wanted: set[str] | None = wanted) -> bool:
                return wanted is None or entry.source in wanted

            before += self.planned.take(planned, common, is_wanted)
            after += self.made.take(made, common, is_wanted)
        return before, after

    def by_identity(self, known: Sequence[Identity]) -> list[Difference]:
        """Match by identities; on the same source line first, then across lines."""
        found = []
        lines = sorted({e.source for e in self.planned.left()})
        for wanted in (*({x} for x in lines), None):
            planned, made = (
                {e.key for e in x.left() if wanted is None or e.source in wanted}
                for x in (self.planned, self.made)
            )
            for one in known:
                if not one.fits(planned, made):
                    continue
                if wanted is None and one.needs_all and not self.is_all(one):
                    continue
                found += self.replace(one, wanted)
        return found

    def is_all(self, one: Identity) -> bool:
        """Whether an identity explains all remaining bytes of its two collectives."""
        (before,), (after,) = one.planned, one.compiled
        left = self.planned.bytes_of(before.key), self.made.bytes_of(after.key)
        return abs(left[0] - left[1]) <= 0.01 * max(left)

    def replace(self, one: Identity, lines: set[str] | None) -> list[Difference]:
        """Take as much of both sides of an identity as both ledgers have."""
        sides = (self.planned, one.planned), (self.made, one.compiled)
        size = min(
            ledger.bytes_of(term.key, lines) / term.share
            for ledger, terms in sides
            for term in terms
        )
        if size < 1:
            return []
        before, after = (
            [
                entry
                for term in terms
                for entry in ledger.take(
                    term.key,
                    round(size * term.share),
                    lambda e: lines is None or e.source in lines,
                )
            ]
            for ledger, terms in sides
        )
        if not before or not after:
            return []
        harmless = not one.grows or (self.platform == "cpu" and one.drops_scatter)
        return [
            self.difference(before, after, one.label, one.cause, is_harmless=harmless)
        ]

    def instead(self) -> list[Difference]:
        """Match, on one source line, another kind of collective over shared axes."""
        found = []
        for entry in self.made.left():
            for plan_entry in self.planned.left():
                if (
                    not entry.source
                    or plan_entry.source != entry.source
                    or not set(plan_entry.key[1]) & set(entry.key[1])
                    or plan_entry.key == entry.key
                ):
                    continue
                cause = causes.rematerialisation_of(entry, self.evidence)
                label = causes.REMATERIALISED if cause else causes.INSTEAD
                cause = cause or (
                    f"XLA chose {entry.key[0]} over {' × '.join(entry.key[1])} where"
                    f" the plan has {plan_entry.key[0]} over"
                    f" {' × '.join(plan_entry.key[1])}"
                )
                found.append(self.matched(plan_entry, entry, label, cause))
                break
        return found

    def extra(self) -> list[Difference]:
        """Return differences for compiled collectives that the plan does not have."""
        found = []
        for entry in self.made.left():
            runs = [
                (e.source, e.per_run_bytes)
                for e in self.planned.entries
                if e.key == entry.key
            ]
            label, cause = causes.cause_of_extra(entry, self.evidence, runs)
            taken = entry.cut_all()
            by_hand = label == causes.BY_HAND
            found.append(
                self.difference([], [taken], label, cause, is_harmless=by_hand)
            )
        return found

    def missing(self) -> list[Difference]:
        """Return differences for planned collectives that the compiler eliminated."""
        found = []
        for entry in self.planned.left():
            taken = entry.cut_all()
            label, cause = (
                ELIMINATED,
                ("eliminated: XLA finds it equal to another, unused, or not needed"),
            )
            if not taken.traffic.count:
                label, cause = causes.OTHER_SIZE, "the same runs move less than planned"
            found.append(self.difference([taken], [], label, cause, is_harmless=False))
        return found

    def matched(
        self,
        plan_entry: Entry,
        entry: Entry,
        label: str,
        cause: str,
        *,
        is_harmless: bool | None = None,
    ) -> Difference:
        """Take all of two entries that are matched, and return their difference."""
        before, after = plan_entry.cut_all(), entry.cut_all()
        return self.difference([before], [after], label, cause, is_harmless=is_harmless)

    def difference(
        self,
        before: list[Entry],
        after: list[Entry],
        label: str,
        cause: str,
        *,
        is_harmless: bool | None = None,
    ) -> Difference:
        predicted, compiled = (
            total(e.traffic for e in side) for side in (before, after)
        )
        key = (before or after)[0].key
        made = tuple(sorted({e.key for e in after}))
        if is_harmless is None:
            is_harmless = bool(before) and compiled.bytes <= predicted.bytes
        return Difference(
            kind=key[0],
            axes=key[1],
            became=() if made in ((), (key,)) else made,
            predicted=predicted,
            compiled=compiled,
            sources=_lines((*before, *after)),
            label=label,
            cause=cause,
            is_harmless=is_harmless,
        )


def _cut_runs(entry: Entry, runs: int) -> None:
    """Take a number of runs out of an entry."""
    share = runs / entry.traffic.count
    entry.cut(round(share * entry.traffic.bytes))


def _lines(entries: Iterable[Entry]) -> tuple[str, ...]:
    """Return the source lines of entries, those that move most first."""
    moved: dict[str, int] = defaultdict(int)
    for entry in entries:
        if entry.source:
            moved[entry.source] += entry.traffic.bytes
    return tuple(sorted(moved, key=lambda s: (-moved[s], s)))
