"""Check whether a plan holds: list what its compiled program does beyond the plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.records import Collective, Predicted
from rhino_jax.units import format_bytes, format_seconds
from rhino_jax.verify.hlo.collectives.repeated_sums import RepeatedSum
from rhino_jax.verify.hlo.records import OutOfMemory
from rhino_jax.verify.matching.differences import unexplained_bytes
from rhino_jax.verify.matching.matcher import Difference


WIRE_TOLERANCE = 0.10
"""Largest unexplained difference of wire bytes, as a share of the planned bytes."""

TIME_TOLERANCE = 0.05
"""Largest time of unexplained differences, as a share of the compiled step."""

PEAK_TOLERANCE = 0.30
"""Largest excess of peak memory over the prediction, as a share of the prediction."""

BUDGET_TOLERANCE = 0.10
"""Likewise as a share of the memory budget: a smaller excess decides no plan."""


def problems_of(
    plan: PlanData,
    compiled: Predicted | None,
    differences: Sequence[Difference],
    *,
    out_of_memory: OutOfMemory | None,
    rematerialised: Sequence[str],
    planned: Iterable[Collective],
    repeated_sums: Sequence[RepeatedSum] = (),
) -> list[str]:
    """Return why a plan does not hold, as sentences; see `Verification.ok`."""
    budget = plan.memory_budget_bytes
    if out_of_memory is not None or compiled is None:
        needed = None if out_of_memory is None else out_of_memory.needed_bytes
        size = "" if needed is None else f": it needs {format_bytes(needed)}"
        return [f"the compiled program does not fit{size}."]
    problems = [f"wrong numbers: {x}" for x in repeated_sums]
    peak, expected = compiled.peak_bytes, plan.predicted.peak_bytes
    if peak > budget:
        problems.append(
            f"peak memory is {format_bytes(peak)}, over the budget of"
            f" {format_bytes(budget)}."
        )
    elif peak - expected > max(PEAK_TOLERANCE * expected, BUDGET_TOLERANCE * budget):
        problems.append(
            f"peak memory is {format_bytes(peak)}, predicted {format_bytes(expected)}."
        )
    if rematerialised:
        problems.append(
            f"XLA rematerialises {len(rematerialised)} values involuntarily."
        )
    return problems + _traffic_problems(compiled, differences, planned)


def _traffic_problems(
    compiled: Predicted,
    differences: Sequence[Difference],
    planned: Iterable[Collective],
) -> list[str]:
    allowed_s = TIME_TOLERANCE * compiled.step_time_s
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
