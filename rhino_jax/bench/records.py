"""What a benchmark finds: one result per cell, as plain values that are JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rhino_jax.bench.methods import ShardingMethod
from rhino_jax.bench.suite import BenchRow
from rhino_jax.plan.records import Collective, Predicted
from rhino_jax.verify.hlo.rates import Rates


STATUSES = (
    "ok",
    "out of memory",
    "no plan",
    "not allowed",
    "timeout",
    "died",
    "error",
    "no extra",
)
"""How a cell can end.

ok: compiled, and what it holds fits. out of memory: the compiler refuses it, or it
holds more than a device has. no plan: rhino says that nothing fits. not allowed: the
program or mesh has no such recipe. timeout, died, error: the child process was
stopped, was killed, or raised. no extra: what compiles for this target is not
installed.
"""
FINAL = STATUSES[:4]
"""How a cell ends that would end so again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """What one step of a program takes, per device: predicted, or as compiled.

    Attributes:
      step_time_s, compute_s, communication_s, peak_bytes: as of `Predicted`; None
        where the program does not compile.
      slack_s: as of `Predicted`; None as compiled.
      wire_bytes: bytes that one device puts on the wire.
      wire: the same by kind and mesh axes, as {"all-gather over data": …}.
    """

    step_time_s: float | None = None
    compute_s: float | None = None
    communication_s: float | None = None
    slack_s: float | None = None
    peak_bytes: int | None = None
    wire_bytes: int | None = None
    wire: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Measure:
        return cls(**values)

    @classmethod
    def of(cls, predicted: Predicted, collectives: Iterable[Collective]) -> Measure:
        wire: dict[str, int] = {}
        for c in collectives:
            key = f"{c.kind} over {'+'.join(c.axes)}"
            wire[key] = wire.get(key, 0) + c.bytes
        return cls(
            step_time_s=predicted.step_time_s,
            compute_s=predicted.compute_s,
            communication_s=predicted.communication_s,
            slack_s=predicted.slack_s or None,
            peak_bytes=predicted.peak_bytes,
            wire_bytes=sum(wire.values()),
            wire=dict(sorted(wire.items(), key=lambda w: -w[1])),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One cell: a method on a row.

    Attributes:
      key: of the cell, see `cell_key`.
      row: of the row, see `row_key`: what methods share that are compared.
      workload, regime, target, mesh, method: what was asked for; `mesh` as
        {"data": 4}, of the plan where rhino chose it.
      status: one of `STATUSES`.
      predicted: of the plan; None where there is none.
      compiled: of the compiled program; of one that does not fit, only the peak.
      rematerialised: values that the compiler had to replicate in full.
      plan_s: seconds of planning, tracing excluded; of "refined" all in all, its
        compiling included.
      compile_s: seconds of compiling.
      rates: of the compiled program; None where there is none.
      program: hash of the program before compiling; programs that are the same are
        compiled once.
      candidates: of "refined": what was compiled, the fields of `CompiledCandidate`.
      error: what went wrong, in a few lines.
      notes: what the user should know, in sentences.
      versions: see `rhino_jax.bench.versions`.
    """

    key: str
    row: str
    workload: str
    regime: str
    target: str
    mesh: Mapping[str, int]
    method: str
    status: str
    predicted: Measure | None = None
    compiled: Measure | None = None
    rematerialised: int | None = None
    plan_s: float | None = None
    compile_s: float | None = None
    rates: Rates | None = None
    program: str = ""
    candidates: tuple[Mapping[str, Any], ...] = ()
    error: str = ""
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        return self.status == "ok"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Result:
        """Read back what `to_dict` gave.

        Raises:
          ValueError: these are no such values.
        """
        given = dict(values)
        try:
            for name in ("predicted", "compiled"):
                if given[name] is not None:
                    given[name] = Measure.from_dict(given[name])
            if given["rates"] is not None:
                given["rates"] = Rates(**given["rates"])
            for name in ("notes", "candidates"):
                given[name] = tuple(given[name])
            if given["status"] not in STATUSES:
                raise ValueError(f"status {given['status']!r}")
            return cls(**given)
        except (KeyError, TypeError) as error:
            known = ", ".join(f.name for f in fields(cls))
            raise ValueError(f"no result of a cell ({error}); keys: {known}") from None


def row_key(row: BenchRow) -> str:
    """Names a row in files: readable, and different for different rows."""
    axes = "x".join(str(n) for _, n in row.mesh) or "any"
    what: list[object] = [row.model, row.overrides, row.target, row.mesh]
    if row.memory_share is not None:
        what.append(row.memory_share)
    if row.memory_room is not None:
        what.append(["room", row.memory_room])
    if row.memory:
        what.append(["memory", row.memory])
    if row.microbatches:
        what.append(["microbatches", row.microbatches])
    if row.stages:
        what.append(["stages", row.stages])
    if row.per_microbatch:
        what.append(["per_microbatch", row.per_microbatch])
    if row.alpa is not None:
        what.append(["alpa", row.alpa.to_table()])
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:8]
    return f"{row.model}-{row.target.replace(':', '_')}-{axes}-{digest}"


def cell_key(row: BenchRow, method: ShardingMethod) -> str:
    """Names a cell in files and results."""
    return f"{row_key(row)}-{file_name(method.name)}"


def file_name(name: str) -> str:
    """A method's name as part of a file's."""
    return name.replace("@", "_").replace(":", "")
