"""Judge a compiled program by what its plan predicted: its time, memory and traffic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.records import Collective, Predicted
from rhino_jax.units import format_bytes, format_seconds
from rhino_jax.verify.hlo.collectives.repeated_sums import RepeatedSum
from rhino_jax.verify.matching.matcher import Difference
from rhino_jax.verify.stages import CompiledPlan


TIME_FACTOR = 1.6
"""Largest ratio of predicted and compiled step time, either way."""

TIME_FLOOR_S = 20e-6
"""Largest difference of step times that no ratio is asked of: a few launches."""

PEAK_TOLERANCE = 0.20
"""Largest difference of predicted and compiled peak, as a share of the larger."""

BUDGET_TOLERANCE = 0.01
"""Likewise as a share of the memory budget: a smaller difference decides no plan."""

WIRE_TOLERANCE = 0.10
"""Largest unexplained difference of wire bytes, as a share of the planned bytes."""

WIRE_TIME_TOLERANCE = 0.05
"""Largest time of unexplained differences, as a share of the compiled step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Reasons why a plan does not hold, as sentences.

    Attributes:
      time: reasons of the step time.
      peak: reasons of the peak memory.
      traffic: reasons of what the program moves: collectives, values rematerialised
        involuntarily, reductions that give wrong numbers.
      no_time: why the step time is not judged; empty where it is.
    """

    time: tuple[str, ...] = ()
    peak: tuple[str, ...] = ()
    traffic: tuple[str, ...] = ()
    no_time: str = ""


def verdict_of(
    plan: PlanData,
    made: CompiledPlan,
    differences: Sequence[Difference],
    *,
    planned: Iterable[Collective],
    repeated_sums: Sequence[RepeatedSum] = (),
    no_time: str = "",
) -> Verdict:
    """Judge a compiled plan; see `Verification.ok`.

    Args:
      plan: the plan.
      made: its compiled form.
      differences: differences of planned and compiled collectives.
      planned: the plan's collectives, as the target's compiler sends them.
      repeated_sums: reductions of the compiler's that give wrong numbers.
      no_time: why the step time is not judged; empty: it is.
    """
    compiled, out = made.compiled, made.out_of_memory
    if out is not None or compiled is None:
        needed = None if out is None else out.needed_bytes
        size = "" if needed is None else f": it needs {format_bytes(needed)}"
        return Verdict(
            peak=(f"the compiled program does not fit{size}.",),
            no_time="the compiled program does not fit",
        )
    traffic = [
        f"wrong numbers: {x} Run `plan.check`; another sharding of this op"
        " (`rhino.pin`, `pins=`) avoids it."
        for x in repeated_sums
    ]
    if made.rematerialised:
        traffic.append(
            f"XLA rematerialises {len(made.rematerialised)} values involuntarily."
        )
    return Verdict(
        time=() if no_time else _time(plan.predicted, compiled),
        peak=_peak(plan, compiled),
        traffic=(*traffic, *_traffic(compiled, differences, planned)),
        no_time=no_time,
    )


def _time(predicted: Predicted, compiled: Predicted) -> tuple[str, ...]:
    a, b = predicted.step_time_s, compiled.step_time_s
    if abs(a - b) <= max(TIME_FLOOR_S, (TIME_FACTOR - 1) * min(a, b)):
        return ()
    return (
        f"the step takes {format_seconds(b)}, predicted {format_seconds(a)}: off by"
        f" more than {TIME_FACTOR} times.",
    )


def _peak(plan: PlanData, compiled: Predicted) -> tuple[str, ...]:
    budget = plan.memory_budget_bytes
    peak, expected = compiled.peak_bytes, plan.predicted.peak_bytes
    if peak > budget:
        return (
            f"peak memory is {format_bytes(peak)}, over the budget of"
            f" {format_bytes(budget)}.",
        )
    allowed = max(PEAK_TOLERANCE * max(peak, expected), BUDGET_TOLERANCE * budget)
    # A compiler that does not say what the program holds is not judged.
    if not peak or abs(peak - expected) <= allowed:
        return ()
    return (
        f"peak memory is {format_bytes(peak)}, predicted {format_bytes(expected)}: off"
        f" by more than {PEAK_TOLERANCE:.0%}.",
    )


def unexplained_bytes(differences: Iterable[Difference]) -> int:
    """Return the sum of |bytes| of all differences that are not harmless."""
    return sum(abs(d.bytes) for d in differences if not d.is_harmless)


def _traffic(
    compiled: Predicted,
    differences: Sequence[Difference],
    planned: Iterable[Collective],
) -> list[str]:
    allowed_s = WIRE_TIME_TOLERANCE * compiled.step_time_s
    harmful = [d for d in differences if not d.is_harmless]
    problems = [
        f"{d.kind} over {' × '.join(d.axes)}: {format_bytes(d.bytes)} more than"
        f" planned, {format_seconds(d.seconds)} per step."
        for d in harmful
        if d.bytes > 0 and d.seconds > allowed_s
    ]
    planned_bytes = sum(c.bytes for c in planned)
    differ_bytes = unexplained_bytes(differences)
    differ_s = sum(abs(d.seconds) for d in harmful)
    if differ_bytes > WIRE_TOLERANCE * planned_bytes and differ_s > allowed_s:
        problems.append(
            f"{format_bytes(differ_bytes)} on the wire differ from the plan's"
            f" {format_bytes(planned_bytes)}."
        )
    return problems
