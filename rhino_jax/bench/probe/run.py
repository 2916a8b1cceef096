"""Plan, compile and read every variation of every program."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import cycle, islice
from pathlib import Path

import jax

from rhino_jax._compat.attention import fused_attention_traced
from rhino_jax.api import plan as make_plan
from rhino_jax.bench.checks import BenchError
from rhino_jax.bench.child import ProgramStore
from rhino_jax.bench.probe.functions import (
    ON_GPUS,
    ProbedFunction,
    probed_functions,
)
from rhino_jax.bench.probe.variations import (
    VARIATIONS,
    AbstractCall,
    variation,
)
from rhino_jax.bench.progress import Clock, Report
from rhino_jax.errors import RhinoError
from rhino_jax.explain.plan import Plan
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.target import Target
from rhino_jax.units import format_seconds
from rhino_jax.verify.verdict import TIME_FLOOR_S
from rhino_jax.verify.verification import verify


AXIS = "data"
"""The only axis of the mesh that programs are planned for."""


LIMIT_S = 60.0
"""How long a program may compile, in seconds: most take one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A program with what was predicted of it, and what its compiler makes of it.

    Attributes:
      family, program, variation: as in `functions` and `variations`.
      predicted_s, compiled_s: step time; 0 for a program that does not compile.
      predicted_peak_bytes, compiled_peak_bytes: peak memory of a device.
      predicted_wire_bytes, compiled_wire_bytes: what a device sends.
      cause: the ops whose time differs most, with the reason as far as it is known.
      error: why there are no figures; empty where there are.
    """

    family: str
    program: str
    variation: str
    predicted_s: float = 0.0
    compiled_s: float = 0.0
    predicted_peak_bytes: int = 0
    compiled_peak_bytes: int = 0
    predicted_wire_bytes: int = 0
    compiled_wire_bytes: int = 0
    cause: str = ""
    error: str = ""

    @property
    def name(self) -> str:
        return f"{self.family}/{self.program}/{self.variation}"

    @property
    def ratio(self) -> float:
        """Predicted over compiled step time; `TIME_FLOOR_S` of both are a launch's."""
        return (self.predicted_s + TIME_FLOOR_S) / (self.compiled_s + TIME_FLOOR_S)


def chosen(
    only: str, count: int | None, target: Target
) -> list[tuple[ProbedFunction, str]]:
    """Return functions, each with the name of a variation that it has.

    Args:
      only: glob that "FAMILY/PROGRAM/VARIATION" matches; empty: all.
      count: how many; None: all. Functions take turns, each with another variation than
        the one before it.
      target: what they are compiled for.
    Raises:
      BenchError: there are none.
    """
    found = list(probed_functions())
    if target.device.platform != "cuda":
        found = [p for p in found if p.name not in ON_GPUS]
    names = list(VARIATIONS)
    turns = [islice(cycle(names), i, i + len(names)) for i in range(len(found))]
    cells = [
        (function, name)
        for turn in zip(*turns, strict=True)
        for function, name in zip(found, turn, strict=True)
        if fnmatchcase(f"{function.family}/{function.name}/{name}", only or "*")
    ]
    with fused_attention_traced():
        has_call = (c for c in cells if variation(*c) is not None)
        kept = list(islice(has_call, count))
    if not kept:
        raise BenchError(
            f"`probe --only {only!r}`: no program matches.",
            numbers=f"families: {', '.join(dict.fromkeys(p.family for p in found))};"
            f" variations: {', '.join(names)}",
            fix="give a pattern as 'conv/*', '*/gradient' or 'dot/matmul/*'.",
        )
    return kept


def probe(
    hardware: str, only: str, count: int | None, folder: Path, report: Report
) -> Iterator[Probe]:
    """Yield the figures of each program, as it is compiled and read.

    Args:
      hardware: with its topology, as "v5e:4x4".
      only, count: see `chosen`.
      folder: of compiled programs; those that are there are only read.
      report: called with a line for every program.
    """
    target = load_target(hardware)
    cells = chosen(only, count, target)
    known, clock = ProgramStore(folder), Clock(total=len(cells), done=0)
    for function, name in cells:
        started = time.monotonic()
        with fused_attention_traced():
            call = variation(function, name)
            assert call is not None
            found = _measured(function, name, call, target, known)
        took = time.monotonic() - started
        said = found.error or (
            f"predicted {format_seconds(found.predicted_s)}, compiled"
            f" {format_seconds(found.compiled_s)} ({found.ratio:.2f})"
        )
        report(f"{clock.tick()} {found.name}: {said}; {took:.1f} s")
        yield found


def _measured(
    function: ProbedFunction,
    name: str,
    call: AbstractCall,
    target: Target,
    known: ProgramStore,
) -> Probe:
    head = Probe(family=function.family, program=function.name, variation=name)
    assert target.num_devices is not None
    try:
        plan: Plan = make_plan(
            call.fn,
            *call.args,
            mesh={AXIS: target.num_devices},
            hardware=target.name,
            level="fast",
            progress=False,
        )
        found = verify(plan, call.fn, call.args, {}, known=known, time_limit_s=LIMIT_S)
    except (RhinoError, jax.errors.JaxRuntimeError) as error:
        return replace(head, error=str(error).partition("\n")[0])
    if found.compiled is None:
        return replace(head, error="does not fit in memory")
    worst = found.time_differences[0] if found.time_differences else None
    return replace(
        head,
        predicted_s=found.predicted.step_time_s,
        compiled_s=found.compiled.step_time_s,
        predicted_peak_bytes=found.predicted.peak_bytes,
        compiled_peak_bytes=found.compiled.peak_bytes,
        predicted_wire_bytes=sum(c.bytes for c in found.planned),
        compiled_wire_bytes=sum(c.bytes for c in found.collectives),
        cause="" if worst is None else ": ".join(filter(None, (worst.op, worst.cause))),
    )
