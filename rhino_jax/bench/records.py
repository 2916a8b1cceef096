"""Results of a benchmark: one per cell, as plain values that are JSON."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rhino_jax.bench.methods import ShardingMethod, parse_method
from rhino_jax.bench.suite import BenchRow
from rhino_jax.plan.records import Collective, Predicted
from rhino_jax.verify.hlo.records import Rates


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
"""Outcomes of a cell.

ok: compiled, and fits in memory. out of memory: the compiler refuses it, or its peak
exceeds the device's memory. no plan: rhino finds that nothing fits. not allowed: the
recipe is not possible for this program or mesh. timeout, died, error: the child process
timed out, was killed, or raised. no extra: the compiler for this target is not
installed.
"""
FINAL = STATUSES[:4]
"""Outcomes that a repetition would not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Cost of one step of a program, per device: predicted, or as compiled.

    Attributes:
      step_time_s, compute_s, communication_s, peak_bytes: as in `Predicted`; None if
        the program does not compile.
      slack_s: as in `Predicted`; None for a compiled program.
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
    """Result of one cell, a method on a row: of planning alone, or compiled as well.

    Attributes:
      status: one of `STATUSES`.
      key: key of the cell, see `cell_key`; empty, as all that is of the request, in a
        child process.
      row: key of the row, see `row_key`, which is common to the methods that are
        compared.
      workload, regime, target, method: the request.
      versions: see `rhino_jax.bench.versions`.
      mesh: mesh of the plan, size by axis, major first; as requested without a plan.
      predicted: predictions of the plan; None without a plan.
      compiled: measure of the compiled program; only the peak if it does not fit.
      rematerialised: number of values that the compiler had to replicate in full.
      plan_s: seconds of planning, tracing excluded; for "refined" in all, compiling
        included.
      compile_s: seconds of compiling.
      rates: rates of the compiled program; None if there is none.
      program: hash of the program before compiling; equal programs are compiled once.
      candidates: compiled candidates of "refined", as the fields of
        `CompiledCandidate`.
      error: what went wrong, in a few lines.
      notes: what the user should know, in sentences.
    """

    status: str
    mesh: Mapping[str, int] = field(default_factory=dict)
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
    key: str = ""
    row: str = ""
    workload: str = ""
    regime: str = ""
    target: str = ""
    method: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status {self.status!r}")

    @property
    def fits(self) -> bool:
        return self.status == "ok"

    @property
    def is_recipe(self) -> bool:
        return parse_method(self.method).is_recipe

    @property
    def step_s(self) -> float:
        """Seconds of the compiled step; infinite if it does not fit."""
        made = self.compiled
        if not self.fits or made is None or made.step_time_s is None:
            return math.inf
        return made.step_time_s


def row_key(row: BenchRow) -> str:
    """Return a row's name for files: readable, and different for different rows."""
    axes = "x".join(str(n) for _, n in row.mesh) or "any"
    what = row.to_table()
    del what["methods"]
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:8]
    return f"{row.model}-{row.target.replace(':', '_')}-{axes}-{digest}"


def cell_key(row: BenchRow, method: ShardingMethod) -> str:
    """Return a cell's name for files and results."""
    return f"{row_key(row)}-{file_name(method.name)}"


def file_name(name: str) -> str:
    """Return a method's name as part of a file name."""
    return name.replace("@", "_").replace(":", "")
