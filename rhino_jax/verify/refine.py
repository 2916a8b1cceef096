"""Compile several candidate plans and choose the fastest one that fits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
from jax.sharding import Mesh

from rhino_jax.errors import CompilerError
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.target import Target
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.records import CUT_BY_CLOCK, CompiledCandidate
from rhino_jax.planner.search.records import PlanCandidate
from rhino_jax.runtime.bound import Bound, lower
from rhino_jax.runtime.sharded import with_trees
from rhino_jax.verify.hlo.reading import read_compiled
from rhino_jax.verify.hlo.records import Compilation, Reading
from rhino_jax.verify.places import Compilations, CompilePlace, place_of


Judge = Callable[[PlanData], Reading]
"""A function that compiles a plan and returns the reading of its program."""


def programs_of(
    traced: Traced, what: str, target: Target
) -> Callable[[PlanData], PlanProgram]:
    """Return a function that compiles plans of a traced function for their own
    hardware.

    It compiles on the plan's own mesh where its devices are of that kind, else on a
    compile-only one. Plans that lower to the same program are compiled once.
    """
    known: dict[str, Compilation] = {}

    def program_of(plan: PlanData) -> PlanProgram:
        is_there = isinstance(plan.mesh, Mesh) and (
            plan.mesh.devices.flat[0].device_kind in target.device.kinds
        )
        place = place_of(plan, None if is_there else target, what)
        return compile_plan(traced, plan, place, known)

    return program_of


def judge_of(traced: Traced, what: str, target: Target) -> Judge:
    """Return a judge that compiles plans as `programs_of` does."""
    program_of = programs_of(traced, what, target)
    return lambda plan: program_of(plan).reading


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
    known: Compilations,
) -> PlanProgram:
    """Compile and read a plan's program, unless it was compiled before.

    Args:
      traced: the planned function.
      plan: its plan.
      place: mesh and hardware to compile for.
      known: compiled programs; a new one is added.
    """
    plan = with_trees(plan, traced, place.mesh)
    found = place.compile_once(lower(Bound(traced, plan, place.mesh)), known)
    reading = read_compiled(
        found.compilation, plan.mesh_axes, place.target, while_loops=plan.while_loops
    )
    return PlanProgram(found.program, found.compilation, reading, found.is_cached)


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
        tighter = plan_within(tighter_budget(seen, budget_bytes))
        if tighter is None:
            break
        reading = judge(tighter.plan)
        seen.append((tighter, compiled_candidate(tighter, reading, budget_bytes)))
    best, notes = fastest_of(seen)
    return replace(
        best.plan,
        memory_budget_bytes=budget_bytes,
        refined=tuple(found for _, found in seen),
        notes=(*best.plan.notes, *notes, *failures),
    )


Seen = list[tuple[PlanCandidate, CompiledCandidate]]
"""Candidates with the figures of their compiled programs."""


def tighter_budget(seen: Seen, budget_bytes: int) -> int:
    """Return the budget for a plan that fits once compiled: smaller by the smallest
    ratio of compiled to predicted peak memory."""
    excess = min(
        found.peak_bytes / max(1, c.plan.predicted.peak_bytes) for c, found in seen
    )
    return int(budget_bytes / max(excess, 1.0) * MARGIN)


def fastest_of(seen: Seen) -> tuple[PlanCandidate, tuple[str, ...]]:
    """Return the fastest candidate that fits, and notes; where none does, the one with
    the smallest peak memory."""
    fitting = [x for x in seen if x[1].is_fitting]
    if fitting:
        return min(fitting, key=lambda x: x[1].compiled_s)[0], ()
    best, least = min(seen, key=lambda x: x[1].peak_bytes)
    note = (
        f"no plan of {len(seen)} fits once compiled: this one needs the least,"
        f" {least.peak_bytes / 2**30:.3g} GiB per device."
    )
    return best, (note,)


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
            reading = judge(candidate.plan)
        except COMPILER_ERRORS as error:
            failures.append(failure_note(candidate.name, error))
            first = first or error
        else:
            seen.append(
                (candidate, compiled_candidate(candidate, reading, budget_bytes))
            )
    if not seen and first is not None:
        raise first
    return seen, failures


COMPILER_ERRORS = (jax.errors.JaxRuntimeError, CompilerError)


def failure_note(name: str, error: Exception) -> str:
    """Return the note on a candidate on which the compiler failed."""
    said = (str(error).splitlines() or [""])[0][:200]
    return f"the compiler failed on {name}: {said}"


def compiled_candidate(
    candidate: PlanCandidate, reading: Reading, budget_bytes: int
) -> CompiledCandidate:
    """Return the figures of a candidate's compiled program."""
    plan = candidate.plan
    return CompiledCandidate(
        name=candidate.name,
        mesh=tuple(size for _, size in plan.mesh_axes),
        predicted_s=plan.predicted.step_time_s,
        compiled_s=reading.compiled.step_time_s,
        peak_bytes=reading.compiled.peak_bytes,
        is_fitting=reading.compiled.peak_bytes <= budget_bytes,
        rematerialised=len(reading.rematerialised),
    )
