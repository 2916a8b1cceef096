"""Verify a plan: compare it with its compiled program.

`Plan.verify` compiles the planned program, reads its HLO, and reports whether the plan
holds. Nothing is run; the hardware need not be present.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rhino_jax.frontend.parameters import Parameters, read_parameters
from rhino_jax.plan.lines import with_lines
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.trees import donated_arguments, with_mesh
from rhino_jax.runtime.lowering import Lowered
from rhino_jax.runtime.sharded import ShardedFunction, unbound
from rhino_jax.runtime.with_plan import sharded_by
from rhino_jax.verify.compile import CompileLimit
from rhino_jax.verify.hlo.collectives.repeated_sums import by_compiler
from rhino_jax.verify.hlo.reading import read_compiled, with_seconds
from rhino_jax.verify.hlo.records import Compilation
from rhino_jax.verify.matching.ledger import Evidence, evidence_of
from rhino_jax.verify.matching.matcher import Difference
from rhino_jax.verify.places import CompilePlace, place_of
from rhino_jax.verify.problems import differences_of, problems_of
from rhino_jax.verify.results.verification import Verification
from rhino_jax.verify.stages import CompiledPlan, compiled_stages


def verify(
    plan: PlanData,
    fn: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    compile_for: Any = None,
    static_argnums: Any = None,
    static_argnames: Any = None,
    time_limit_s: float | str | None = None,
) -> Verification:
    """Compile `fn` as planned and read it back; see `Plan.verify`."""
    what = "`plan.verify`"
    fn, args = unbound(fn, args)
    parameters = planned_parameters(
        plan,
        fn,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        what=what,
    )
    place = place_of(plan, compile_for, what)
    place = replace(place, limit=CompileLimit.of(what, time_limit_s))
    sharded = sharded_by(parameters, with_mesh(plan, place.mesh), what)
    if plan.has_tasks:
        bound = sharded.bound(*args, **kwargs)
        return _beside(plan, compiled_stages(bound, place), place)
    lowered = sharded.lower(*args, **kwargs)
    plan = with_lines(plan, lowered.bound.running.program)
    return verification_of(plan, lowered, place.compile(lowered), place)


def planned_parameters(
    plan: PlanData,
    fn: Callable[..., Any],
    *,
    static_argnums: Any,
    static_argnames: Any,
    what: str,
) -> Parameters:
    """Return the parameters of `fn`, with the plan's donated arguments added."""
    if isinstance(fn, ShardedFunction):
        parameters = fn.parameters
    else:
        parameters = read_parameters(
            fn,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            what=what,
        )
    donated: set[str | int] = set(parameters.donated)
    for key in donated_arguments(plan):
        is_named = isinstance(key, int) and key < len(parameters.positional)
        donated.add(parameters.positional[int(key)] if is_named else key)
    return replace(parameters, donated=frozenset(donated))


def verification_of(
    plan: PlanData, lowered: Lowered, compilation: Compilation, place: CompilePlace
) -> Verification:
    """Compare a plan with a compilation of it.

    Args:
      plan: the plan.
      lowered: the lowered program that was compiled.
      compilation: its compilation.
      place: the mesh and the hardware that it was compiled for.
    """
    reading = read_compiled(
        compilation, plan.mesh_axes, place.target, while_loops=plan.while_loops
    )
    program = lowered.bound.running.program
    made = CompiledPlan(
        **reading.facts(),
        # In an SPMD pipeline every device runs the whole program.
        stage_peak_bytes=(reading.compiled.peak_bytes,) * plan.num_stages
        if plan.is_one_program and reading.out_of_memory is None
        else (),
        evidence=replace(
            evidence_of(reading.rematerialised, program, plan.mesh_axes),
            in_stages=plan.is_one_program,
        ),
    )
    return _beside(plan, made, place)


def _beside(plan: PlanData, made: CompiledPlan, place: CompilePlace) -> Verification:
    """Compare a plan with its compiled form, of one program or of several tasks."""
    planned = with_seconds(plan.collectives, plan.mesh_axes, place.target)
    differences: tuple[Difference, ...] = ()
    if made.out_of_memory is None:
        differences = differences_of(
            planned,
            made.collectives,
            plan.mesh_axes,
            platform=made.platform,
            evidence=made.evidence,
        )
    notes = list(made.notes)
    if place.target.name != plan.hardware:
        notes.append(
            f"compiled for {place.target.name}, planned for {plan.hardware}: bytes and"
            " memory compare, step times do not."
        )
    evidence = made.evidence or Evidence()
    return Verification(
        **made.facts() | {"notes": tuple(notes)},
        stage_peak_bytes=made.stage_peak_bytes,
        evidence=made.evidence,
        stages=made.stages,
        between=made.between,
        program_name=plan.program_name,
        mesh_axes=plan.mesh_axes,
        hardware=place.target.name,
        planned_hardware=plan.hardware,
        predicted=plan.predicted,
        planned=planned,
        differences=differences,
        memory_budget_bytes=plan.memory_budget_bytes,
        problems=tuple(
            problems_of(
                plan,
                made.compiled,
                differences,
                out_of_memory=made.out_of_memory,
                rematerialised=made.rematerialised,
                planned=planned,
                repeated_sums=by_compiler(
                    made.repeated_sums, evidence.written, in_stages=evidence.in_stages
                ),
            )
        ),
    )
