"""Compile several candidate plans and choose the fastest one that fits."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import jax
from jax.sharding import Mesh

from rhino_jax.errors import CompilerError
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.target import Target
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.records import CUT_BY_CLOCK, CompiledCandidate
from rhino_jax.planner.search.candidates import PlanCandidate
from rhino_jax.runtime.bound import Bound, lower
from rhino_jax.runtime.sharded import with_trees
from rhino_jax.verify.hlo.reading import read_compiled
from rhino_jax.verify.hlo.records import Compilation, Reading
from rhino_jax.verify.places import CompilePlace, place_of


Judge = Callable[[PlanData], Reading]
"""A function that compiles a plan and returns the reading of its program."""


def judge_of(traced: Traced, what: str, target: Target) -> Judge:
    """Return a judge that compiles plans of a traced function for their own hardware.

    It compiles on the plan's own mesh where its devices are of that kind, else on a
    compile-only one. Plans that lower to the same program are compiled once.
    """
    known: dict[str, Compilation] = {}

    def judge(plan: PlanData) -> Reading:
        is_there = isinstance(plan.mesh, Mesh) and (
            plan.mesh.devices.flat[0].device_kind in target.device.kinds
        )
        place = place_of(plan, None if is_there else target, what)
        return compile_plan(traced, plan, place, target.name, known).reading

    return judge


class Compilations(Protocol):
    """Compiled programs by hash, as a `dict` holds them."""

    def get(self, program: str, /) -> Compilation | None:
        """Return a compiled program; None if there is none."""

    def __setitem__(self, program: str, compilation: Compilation, /) -> None: ...


@dataclass(frozen=True, slots=True)
class PlanProgram:
    """The compiled program of a plan.

    Attributes:
      program: hash of the program before compiling and of its target.
      compilation: the compiled program, or its out-of-memory error.
      reading: its reading.
      is_cached: whether it was compiled before.
    """

    program: str
    compilation: Compilation
    reading: Reading
    is_cached: bool


def compile_plan(
    traced: Traced,
    plan: PlanData,
    place: CompilePlace,
    target: str,
    known: Compilations,
) -> PlanProgram:
    """Compile and read a plan's program, unless it was compiled before.

    Args:
      traced: the planned function.
      plan: its plan.
      place: mesh and hardware to compile for.
      target: name of the hardware, a part of the hash.
      known: compiled programs; a new one is added.
    """
    plan = with_trees(plan, traced, place.mesh)
    lowered = lower(Bound(traced, plan, place.mesh)).lowered
    # The text names the mesh's axes and their sizes.
    text = f"{target}\n{lowered.as_text()}"
    program = hashlib.sha256(text.encode()).hexdigest()[:16]
    cached = known.get(program)
    compilation = place.compile(lowered) if cached is None else cached
    if cached is None:
        known[program] = compilation
    reading = read_compiled(
        compilation, plan.mesh_axes, place.target, while_loops=plan.while_loops
    )
    return PlanProgram(program, compilation, reading, cached is not None)


MARGIN = 0.97
"""Safety factor on the smaller budget that a new plan is made for."""

MAX_TIGHTER = 2
"""How many plans with a smaller budget are tried where nothing fits once compiled."""


def refine(
    candidates: Sequence[PlanCandidate],
    judge: Judge,
    budget_bytes: int,
    plan_within: Callable[[int], PlanCandidate | None],
    deadline: float = math.inf,
) -> PlanData:
    """Return the candidate with the fastest compiled program within the budget.

    Where none fits once compiled, plans for a smaller budget are tried: smaller by the
    ratio of compiled to predicted peak memory.

    Args:
      candidates: plans, the most promising first; at least one.
      judge: compiles and reads a plan.
      budget_bytes: memory budget, bytes per device.
      plan_within: makes a plan for a smaller budget; None where there is none.
      deadline: `time.monotonic()` after which nothing more is compiled.
    Returns:
      The plan, with all compiled candidates in `refined`. Where none fits, it is the
      candidate with the smallest peak memory, with a note; candidates on which the
      compiler failed have a note each.
    Raises:
      jax.errors.JaxRuntimeError: the compiler failed on all candidates.
    """
    seen, failures = _compiled(candidates, judge, budget_bytes, deadline)
    if not seen:
        plan = candidates[0].plan
        return replace(plan, notes=(*plan.notes, *failures))
    for _ in range(MAX_TIGHTER):
        if any(found.is_fitting for _, found in seen) or time.monotonic() > deadline:
            break
        excess = min(
            found.peak_bytes / max(1, c.plan.predicted.peak_bytes) for c, found in seen
        )
        tighter = plan_within(int(budget_bytes / max(excess, 1.0) * MARGIN))
        if tighter is None:
            break
        seen.append((tighter, _judged(tighter, judge, budget_bytes)))
    fitting = [x for x in seen if x[1].is_fitting]
    if fitting:
        best, _ = min(fitting, key=lambda x: x[1].compiled_s)
        notes: tuple[str, ...] = ()
    else:
        best, least = min(seen, key=lambda x: x[1].peak_bytes)
        notes = (
            f"no plan of {len(seen)} fits once compiled: this one needs the least,"
            f" {least.peak_bytes / 2**30:.3g} GiB per device.",
        )
    return replace(
        best.plan,
        memory_budget_bytes=budget_bytes,
        refined=tuple(found for _, found in seen),
        notes=(*best.plan.notes, *notes, *failures),
    )


Seen = list[tuple[PlanCandidate, CompiledCandidate]]


def _compiled(
    candidates: Sequence[PlanCandidate],
    judge: Judge,
    budget_bytes: int,
    deadline: float,
) -> tuple[Seen, list[str]]:
    """Return the candidates that compile, and notes on compiler failures."""
    seen: Seen = []
    failures: list[str] = []
    first: Exception | None = None
    for i, candidate in enumerate(candidates):
        if time.monotonic() > deadline:
            failures.append(
                f"{CUT_BY_CLOCK} was over when {i} of {len(candidates)} candidates"
                " were compiled."
            )
            break
        try:
            seen.append((candidate, _judged(candidate, judge, budget_bytes)))
        except (jax.errors.JaxRuntimeError, CompilerError) as error:
            said = (str(error).splitlines() or [""])[0][:200]
            failures.append(f"the compiler failed on {candidate.name}: {said}")
            first = first or error
    if not seen and first is not None:
        raise first
    return seen, failures


def _judged(
    candidate: PlanCandidate, judge: Judge, budget_bytes: int
) -> CompiledCandidate:
    plan, reading = candidate.plan, judge(candidate.plan)
    return CompiledCandidate(
        name=candidate.name,
        mesh=tuple(size for _, size in plan.mesh_axes),
        predicted_s=plan.predicted.step_time_s,
        compiled_s=reading.compiled.step_time_s,
        peak_bytes=reading.compiled.peak_bytes,
        is_fitting=reading.compiled.peak_bytes <= budget_bytes,
        rematerialised=len(reading.rematerialised),
    )
