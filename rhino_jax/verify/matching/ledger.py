"""Ledgers of the collectives that have not been matched yet.

A ledger stores collectives as entries by kind, axes and source line, and its bytes can
be taken: what is taken is removed. The plan's ledger and the compiled program's are
emptied against each other.

Explain traffic of the compiled program that the plan does not have.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from rhino_jax.ir.collectives import KINDS
from rhino_jax.ir.printer import format_array
from rhino_jax.ir.program import Program
from rhino_jax.plan.records import Collective, Traffic
from rhino_jax.verify.hlo.module import source_of


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

    def cut_all(self) -> Entry:
        """Take all that is left."""
        return self.cut(self.traffic.bytes)


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


REMATERIALISED = "involuntary rematerialisation"
PART_OF_AXIS = "part of an axis"
REPEATED = "repeated"
NO_RULE = "no rule"
NOT_DIVISIBLE = "not divisible"
OTHER_SIZE = "other size"
INSTEAD = "another collective"
UNPLANNED = "not in the plan"
BY_HAND = "written by hand"

_OP_NAME = re.compile(r'op_name="([^"]*)"')
_OPERATION = re.compile(r"HLO operation:? (%[\w.\-]+ = \S+ [\w\-]+)")


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence on the causes of differences, in addition to the collectives.

    Attributes:
      rematerialised: the compiler's messages on values that it replicated in full.
      unknown: primitives without a sharding rule.
      uneven: source line → values on it with a dim that mesh axes do not divide, and
        those axes, as {"gpt.py:12 (f)": (("add %7 of f32[17]", frozenset({"x"})),)}.
      written: source line → axes of the reductions that a user's `shard_map` requests
        there; None where they are not known.
      in_stages: whether the whole program is in a `shard_map` of the plan's own (an
        SPMD pipeline).
      ops: (source line, whether differentiation produced it) → name of the op with the
        most work there.
    """

    rematerialised: tuple[str, ...] = ()
    unknown: frozenset[str] = frozenset()
    uneven: dict[str, tuple[tuple[str, frozenset[str]], ...]] = field(
        default_factory=dict
    )
    written: dict[str, frozenset[str]] | None = None
    in_stages: bool = False
    ops: dict[tuple[str, bool], str] = field(default_factory=dict)


def evidence_of(
    rematerialised: Iterable[str],
    program: Program | None = None,
    mesh_axes: Sequence[tuple[str, int]] = (),
) -> Evidence:
    """Gather evidence from the compiler's messages and the planned program."""
    if program is None:
        return Evidence(tuple(rematerialised))
    unknown = {op.name for op in program.ops if not op.is_known}
    uneven: dict[str, dict[str, frozenset[str]]] = {}
    work = collections.Counter[tuple[str, bool, str]]()
    for op in program.ops:
        if op.call is None:
            written = sum(program.values[v].bytes for v in op.results)
            work[str(op.source), op.source.is_backward, op.name] += (
                int(op.flops) + written
            )
        for result in op.results:
            value = program.values[result]
            axes = frozenset(
                name
                for name, n in mesh_axes
                if any(d > n and d % n for d in value.shape)
            )
            if axes:
                said = f"{op.name} of {format_array(value.dtype, value.shape)}"
                uneven.setdefault(str(op.source), {})[said] = axes
    least_first = (key for key, _ in reversed(work.most_common()))
    return Evidence(
        tuple(rematerialised),
        frozenset(unknown),
        {source: tuple(found.items()) for source, found in uneven.items()},
        _written_sums(program),
        ops={(line, is_backward): name for line, is_backward, name in least_first},
    )


def _written_sums(program: Program) -> dict[str, frozenset[str]] | None:
    by_hand = [op.manual for op in program.ops if op.name == "shard_map"]
    found: dict[str, frozenset[str]] = {}
    for manual in by_hand:
        if manual is None or not manual.is_all_priced:
            return None
        for c in manual.collectives:
            if KINDS[c.kind].sums:
                source = str(c.source)
                found[source] = found.get(source, frozenset()).union(c.axes)
    return found


def cause_of_extra(
    entry: Entry, evidence: Evidence, planned_runs: Iterable[tuple[str, float]]
) -> tuple[str, str]:
    """Return label and sentence for traffic that the plan does not have.

    Args:
      entry: the traffic.
      evidence: evidence in addition to the collectives.
      planned_runs: (source line, bytes of one run) of the plan's collectives of this
        kind and axes.
    """
    primitive = primitive_of(entry.op)
    axes = " × ".join(entry.key[1])
    found = rematerialisation_of(entry, evidence)
    if found:
        return REMATERIALISED, found
    if entry.reason.startswith("over groups of"):
        return PART_OF_AXIS, (
            f"XLA uses a part of axis {axes} ({entry.reason}), which the plan never"
            " does: it cuts by whole axes"
        )
    if entry.op.split("/").count("shard_map") > evidence.in_stages:
        return BY_HAND, "inside shard_map, beyond what its shapes say of it"
    size = entry.per_run_bytes
    if any(
        source == entry.source and abs(run - size) <= 0.01 * max(run, size)
        for source, run in planned_runs
    ):
        return REPEATED, (
            "XLA runs it again where the plan reads the result of the first"
        )
    if primitive in evidence.unknown:
        return NO_RULE, (
            f"not in the plan: {primitive} has no sharding rule, so the plan keeps it"
            " whole, and XLA moves data around it; rhino.register_rule gives it one"
        )
    uneven = [
        said
        for said, of_axes in evidence.uneven.get(entry.source, ())
        if of_axes & set(entry.key[1])
    ]
    if uneven:
        return NOT_DIVISIBLE, (
            f"not in the plan: {uneven[0]} is not divisible over {axes}, and what does"
            " not divide XLA pads or replicates"
        )
    if not entry.traffic.count:
        return OTHER_SIZE, "the same runs move more than planned"
    asks = f" for {primitive}" if primitive else ""
    return UNPLANNED, f"not in the plan: XLA's own choice{asks}"


def rematerialisation_of(entry: Entry, evidence: Evidence) -> str:
    """Explain a collective by the compiler's rematerialisation message, if any."""
    for line in evidence.rematerialised:
        name = _OP_NAME.search(line)
        same_op = name is not None and bool(entry.op) and name.group(1) == entry.op
        line_source = _line(source_of(line, {}))
        same_line = bool(line_source) and _line(entry.source) == line_source
        if same_op or same_line:
            what = _OPERATION.search(line)
            named = f" of {what.group(1)}" if what else ""
            return (
                f"involuntary full rematerialisation{named}: XLA cannot go from one"
                " sharding to the other, so it replicates the value first"
            )
    return ""


def primitive_of(op_name: str) -> str:
    """Return the primitive at the end of an op name.

    `dot_general` for `jit(step)/transpose(jvp())/bsd,df->bsf/dot_general`.
    """
    if "/" not in op_name:
        return ""
    last = op_name.rsplit("/", 1)[-1]
    return re.split(r"[:()]", last, maxsplit=1)[0].strip()


def _line(source: str) -> str:
    """Return `gpt.py:70` for `gpt.py:70 (mlp)`."""
    return source.partition(" (")[0]
