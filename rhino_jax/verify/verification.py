"""Verify a plan: compare it with its compiled program.

`Plan.verify` compiles the planned program, reads its HLO, and reports whether the plan
holds. Nothing is run; the hardware need not be present.

Collectives are matched by kind, axes, source line and size; then by kind and axes; then
by identities (an all-reduce for a reduce-scatter and an all-gather). The cause of a
difference is the simplest match that explains it; what no match explains is labelled as
not in the plan, or eliminated. Seconds are matched by source line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from rhino_jax.frontend.parameters import Parameters, read_parameters
from rhino_jax.hardware.target import Target
from rhino_jax.plan.lines import with_lines
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.records import Collective
from rhino_jax.plan.trees import donated_arguments, with_mesh
from rhino_jax.runtime.bound import Lowered
from rhino_jax.runtime.sharded import ShardedFunction, sharded_by, unbound
from rhino_jax.verify.compile import CompileLimit
from rhino_jax.verify.hlo.collectives.repeated_sums import by_compiler
from rhino_jax.verify.hlo.reading import read_compiled, with_seconds
from rhino_jax.verify.hlo.records import Compilation
from rhino_jax.verify.matching.identities import Identity, identities
from rhino_jax.verify.matching.ledger import Evidence, Ledger, evidence_of, total
from rhino_jax.verify.matching.matcher import Difference, Matcher
from rhino_jax.verify.matching.times import TimeDifference, time_differences
from rhino_jax.verify.places import Compilations, CompilePlace, place_of
from rhino_jax.verify.results.verification import Verification
from rhino_jax.verify.stages import CompiledPlan, compiled_stages
from rhino_jax.verify.verdict import unexplained_bytes, verdict_of


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
    known: Compilations | None = None,
) -> Verification:
    """Compile `fn` as planned and read it back; see `Plan.verify`.

    Args:
      known: compiled programs of plans without tasks; a new one is added.
    """
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
    if known is None:
        return verification_of(plan, lowered, place.compile(lowered), place)
    found = place.compile_once(lowered, known)
    return verification_of(plan, lowered, found.compilation, place)


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
    sent = [_sent_on(place.target, c) for c in plan.collectives]
    planned = with_seconds(sent, plan.mesh_axes, place.target)
    differences: tuple[Difference, ...] = ()
    times: tuple[TimeDifference, ...] = ()
    evidence = made.evidence or Evidence()
    notes, is_same = list(made.notes), place.target.name == plan.hardware
    if made.compiled is not None:
        differences = differences_of(
            planned,
            made.collectives,
            plan.mesh_axes,
            platform=made.platform,
            evidence=made.evidence,
        )
        if is_same:
            times = time_differences(plan, made.compiled, made.kernels, evidence.ops)
    if not is_same:
        notes.append(
            f"compiled for {place.target.name}, planned for {plan.hardware}: bytes and"
            " memory compare, step times do not."
        )
    return Verification(
        **made.facts(CompiledPlan) | {"notes": tuple(notes)},
        program_name=plan.program_name,
        mesh_axes=plan.mesh_axes,
        hardware=place.target.name,
        planned_hardware=plan.hardware,
        predicted=plan.predicted,
        planned=planned,
        differences=differences,
        time_differences=times,
        memory_budget_bytes=plan.memory_budget_bytes,
        verdict=verdict_of(
            plan,
            made,
            differences,
            planned=planned,
            repeated_sums=by_compiler(
                made.repeated_sums, evidence.written, in_stages=evidence.in_stages
            ),
            no_time=_no_time(plan, place.target, made.platform),
        ),
    )


def _no_time(plan: PlanData, target: Target, platform: str) -> str:
    """Return why the compiled step time is not judged, or empty."""
    if target.name != plan.hardware:
        return f"planned for {plan.hardware}"
    if platform == "cpu":
        return "emulated devices have no step time that could be read"
    if platform == "tpu" and target.device.clock_hz is None:
        return f"{target.name!r} has no `clock_hz`"
    return ""


def _sent_on(target: Target, planned: Collective) -> Collective:
    """Return a planned collective in the type that a target's compiler sends."""
    if not planned.is_rounded or target.device.rounds_products:
        return planned
    return replace(planned, bytes=2 * planned.bytes, is_rounded=False)


def differences_of(
    predicted: Iterable[Collective],
    compiled: Iterable[Collective],
    mesh_axes: Sequence[tuple[str, int]],
    *,
    platform: str,
    evidence: Evidence | None = None,
) -> tuple[Difference, ...]:
    """Return all differences, those with the largest change of seconds first.

    Bytes, runs and seconds of all differences add up to the difference of the totals of
    both sides; collectives that match exactly appear in none.

    Args:
      predicted: the plan's collectives.
      compiled: collectives of the compiled program, with seconds by the same cost
        model.
      mesh_axes: (name, size), major first.
      platform: "cpu", "tpu" or "gpu".
      evidence: evidence on causes; None: there is none.
    """
    predicted, compiled, sizes = tuple(predicted), tuple(compiled), dict(mesh_axes)
    keys = {(c.kind, c.axes) for c in (*predicted, *compiled)}
    known = identities(keys, sizes)

    def explained(order: Iterable[Identity], may_retype: bool) -> list[Difference]:
        planned, made = Ledger.of(predicted), Ledger.of(compiled)
        matcher = Matcher(planned, made, platform, evidence or Evidence())
        return _merged([
            *matcher.same_runs(),
            *matcher.windowed(),
            *(matcher.retyped() if may_retype else ()),
            *matcher.same_key(),
            *matcher.by_identity(tuple(order)),
            *matcher.instead(),
            *matcher.extra(),
            *matcher.missing(),
        ])  # fmt: skip

    # Several readings are possible: an all-reduce may stand for a reduce-scatter alone
    # or with an all-gather, two gathers may have any order, half the bytes may be
    # another dtype. The reading that leaves the fewest bytes unexplained is chosen.
    simple_first = sorted(known, key=lambda i: len(i.planned) + len(i.compiled))
    orders = (known, simple_first, known[::-1], simple_first[::-1])
    readings = (explained(x, retype) for retype in (False, True) for x in orders)
    best = min(readings, key=lambda d: (unexplained_bytes(d), len(d)))
    return tuple(
        sorted(
            best,
            key=lambda d: (-abs(d.seconds), -abs(d.bytes), d.kind, d.axes, d.label),
        )
    )


def _merged(found: Iterable[Difference]) -> list[Difference]:
    """Merge differences that are equal in all but source lines and amounts."""
    groups: dict[tuple[object, ...], list[Difference]] = {}
    for d in found:
        key = (d.kind, d.axes, d.became, d.label, d.cause, d.is_harmless)
        groups.setdefault(key, []).append(d)
    merged = []
    for members in groups.values():
        members.sort(key=lambda d: -max(d.predicted.bytes, d.compiled.bytes))
        lines = dict.fromkeys(s for d in members for s in d.sources)
        merged.append(
            replace(
                members[0],
                predicted=total(d.predicted for d in members),
                compiled=total(d.compiled for d in members),
                sources=tuple(lines),
            )
        )
    return merged
