"""Ledgers of the collectives that have not been matched yet.

A ledger stores collectives as entries by kind, axes and source line, and its bytes can
be taken: what is taken is removed. The plan's ledger and the compiled program's are
emptied against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from rhino_jax.plan.diff import Traffic
from rhino_jax.plan.records import Collective


Key = tuple[str, tuple[str, ...]]
"""Kind and axes of a collective."""


@dataclass(slots=True)
class Entry:
    """Collectives that are equal in kind, axes, source line and size.

    Attributes:
      key: kind and axes.
      source: source line, or empty.
      per_run_bytes: bytes on the wire of one run.
      trips: runs of one of them per step (the trip count of its loop).
      traffic: traffic that is not matched yet.
      op, reason: op name and remark of the first of them.
      is_hidden: whether the compiler may overlap them with compute.
    """

    key: Key
    source: str
    per_run_bytes: float
    trips: int
    traffic: Traffic
    op: str
    reason: str
    is_hidden: bool = False

    def cut(self, wanted_bytes: int) -> Entry:
        """Take bytes out of the entry, with their share of the runs and the seconds."""
        have = self.traffic
        if wanted_bytes >= have.bytes:
            self.traffic = Traffic()
            return replace(self, traffic=have)
        share = wanted_bytes / have.bytes
        runs = min(have.count, max(1, round(share * have.count)))
        part = Traffic(runs, wanted_bytes, share * have.seconds)
        self.traffic = Traffic(
            have.count - runs, have.bytes - wanted_bytes, have.seconds - part.seconds
        )
        return replace(self, traffic=part)


@dataclass(slots=True)
class Ledger:
    """Entries of collectives, largest first."""

    entries: list[Entry] = field(default_factory=list)

    @classmethod
    def of(cls, collectives: Iterable[Collective]) -> Ledger:
        """Return the ledger of a plan's or a compiled program's collectives."""
        found: dict[tuple[Key, str, int, int, str, bool], Entry] = {}
        for c in collectives:
            if not c.bytes:
                continue
            runs = max(1, c.count)
            size, is_hidden = c.bytes / runs, getattr(c, "is_async", False)
            of = c.kind, c.axes
            key = of, c.source, round(size), runs, c.reason, is_hidden
            entry = found.get(key)
            if entry is None:
                entry = found[key] = Entry(
                    of, c.source, size, runs, Traffic(), c.op, c.reason, is_hidden
                )
            entry.traffic = total([entry.traffic, Traffic(runs, c.bytes, c.seconds)])
        return cls(sorted(found.values(), key=lambda e: -e.traffic.bytes))

    def keys(self) -> tuple[Key, ...]:
        """Return kinds and axes of the entries that are not empty, sorted."""
        return tuple(sorted({e.key for e in self.left()}))

    def left(self, key: Key | None = None) -> list[Entry]:
        """Return the non-empty entries, of one key or (None) of all."""
        return [e for e in self.entries if e.traffic.bytes and key in (None, e.key)]

    def bytes_of(self, key: Key, sources: Collection[str] | None = None) -> int:
        """Return the remaining bytes of a key, on some lines or (None) on all."""
        return sum(
            e.traffic.bytes
            for e in self.left(key)
            if sources is None or e.source in sources
        )

    def take(
        self,
        key: Key,
        wanted_bytes: int,
        is_wanted: Callable[[Entry], bool] = lambda entry: True,
    ) -> list[Entry]:
        """Take bytes of a key, from the largest entries first."""
        taken: list[Entry] = []
        for entry in self.left(key):
            if wanted_bytes <= 0:
                break
            if is_wanted(entry):
                taken.append(entry.cut(min(wanted_bytes, entry.traffic.bytes)))
                wanted_bytes -= taken[-1].traffic.bytes
        return taken


def total(parts: Iterable[Traffic]) -> Traffic:
    """Return the sum of several traffic records."""
    parts = tuple(parts)
    return Traffic(
        sum(p.count for p in parts),
        sum(p.bytes for p in parts),
        sum(p.seconds for p in parts),
    )
