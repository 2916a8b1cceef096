"""Choice of the number of pipeline stages, and whether they beat one mesh.

Stages save the time that one mesh spends on collectives over slow links: they send
activations there instead of gradients or weights, and idle while the pipeline fills. Or
they save memory, where one mesh has too little.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from rhino_jax.errors import (
    InfeasiblePlanError,
)
from rhino_jax.hardware.layout import lay_out
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Program
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.records import Variant
from rhino_jax.planner.decision import MIN_GAIN, NOT_POSSIBLE, Decision, noted, row_of
from rhino_jax.planner.variant_search import Search
from rhino_jax.units import format_seconds


MAX_BATCHES = 8
"""Micro-batches per stage with which a pipeline is filled best: the largest number that
is compared (`planner.staging.cuts.PER_STAGE`)."""

FIRST_COUNT = 8
"""Number of stages that is tried first, where there are more domains than that:
Megatron-LM (Narayanan et al. 2021, table 1) trains 39B parameters in 2, 145B in 8 of
them."""

MIN_UNEVEN = 0.85
"""Ratio of mean to longest busy time of equal submeshes from which on unequal ones are
not tried: 32 equal layers on four submeshes had 0.88."""

Places = tuple[int, ...]
"""For each stage, its number of places along the stage axis."""


def slow_seconds(plan: PlanData, target: Target) -> tuple[float, str]:
    """Return an upper bound on the seconds that a step spends on collectives over other
    than the fastest links, and the name of the slowest of these links; 0 where all
    devices share the fastest."""
    if len(target.tiers) < 2:
        return 0.0, ""
    fast = target.tiers[0].name
    axes = {
        axis.name: {part.tier for part in axis.parts} - {fast}
        for axis in lay_out(target, plan.mesh_axes).axes
    }
    total, names = 0.0, set[str]()
    for collective in plan.collectives:
        slow = set[str]().union(*(axes[name] for name in collective.axes))
        if slow:
            total += collective.seconds
            names |= slow
    order = [tier.name for tier in target.tiers]
    return total, max(names, key=order.index, default="")


def least_step_s(plan: PlanData, flops: float, slow_s: float, stages: int) -> float:
    """Return a lower bound on a step in some number of stages: nothing is sent over
    slow links, nothing is computed twice to avoid that, and the pipeline fills as fast
    as with late weight gradients: in a third of the time of 1F1B (Qi et al. 2023, table
    1).

    Args:
      plan: the plan on one mesh.
      flops: FLOPs of a step of the program.
      slow_s: seconds that the plan spends on slow links.
      stages: the number of stages.
    """
    fill = 1 + (stages - 1) / (3 * MAX_BATCHES * stages)
    compute_s, step_s = plan.predicted.compute_s, plan.predicted.step_time_s
    sent_s = max(0.0, step_s - slow_s - compute_s)
    return (compute_s / times_done(plan, flops) + sent_s) * fill


def times_done(plan: PlanData, flops: float) -> float:
    """Return how many times the devices together compute the FLOPs of a step; more than
    1 where all compute what they would otherwise have to send."""
    done = plan.predicted.flops_per_device * math.prod(n for _, n in plan.mesh_axes)
    return max(1.0, done / flops) if flops else 1.0


def flops_of(program: Program) -> float:
    """Return the FLOPs of a step, with all trips of loops."""
    return sum(op.flops * count for op, count in program.walk())


def counts_of(target: Target, devices: int, fits: bool) -> list[int]:
    """Return candidate numbers of stages: submeshes of whole domains of the fastest
    links; where one mesh does not fit, small powers of two."""
    domain = target.tiers[0].size if target.tiers else None
    domains = devices // domain if domain else 1
    if domains < 2:
        return [] if fits else [n for n in (2, 4, 8) if devices % n == 0]
    return [n for n in range(2, domains + 1) if domains % n == 0]


def evenness(plan: PlanData) -> tuple[float, int]:
    """Return mean over longest busy time of the submeshes, and the busiest one."""
    assert plan.pipeline is not None
    busy = plan.pipeline.busy_s
    most = max(busy)
    return sum(busy) / (len(busy) * most) if most else 1.0, busy.index(most)


def merged(plan: PlanData, enough_s: float) -> list[Places]:
    """Return unequal submeshes with which a step may take less than `enough_s`: the
    busiest submesh of a plan with equal ones takes a neighbour's devices too.

    With equal busy times, a step by the same schedule would be shorter by that ratio
    (`evenness`): where that is not enough, the list is empty.
    """
    count, (even, at) = plan.num_stages, evenness(plan)
    # TPU collectives run in groups whose size divides the number of all devices.
    if count < 4 or count % 2 or even >= MIN_UNEVEN:
        return []
    if plan.predicted.step_time_s * even >= enough_s:
        return []
    firsts = [i for i in (at - 1, at) if 0 <= i < count - 1]
    return [(1,) * i + (2,) + (1,) * (count - 2 - i) for i in firsts]


def climb(sizes: Decision[Places, PlanData], counts: list[int]) -> None:
    """Try more and fewer stages than at first, as long as steps get shorter; bounds on
    those that are not fast enough, by as much as stages must gain."""
    equal = [(1,) * count for count in counts]
    at = max(i for i, n in enumerate(counts) if n <= max(FIRST_COUNT, counts[0]))
    for after in (equal[at + 1 :], reversed(equal[:at])):
        last = sizes.seconds(equal[at])
        for places in after:
            took = sizes.seconds(places)
            is_bound = places in sizes.left and math.isfinite(took)
            least = (1 - MIN_GAIN) * last if is_bound else last
            if took >= least and math.isfinite(took + last):
                break
            last = took


def with_stages(
    on_one: PlanData | InfeasiblePlanError,
    search: Search,
    plan_in: Callable[[Places, float], PlanData],
) -> PlanData:
    """Return the plan on one mesh, or one in stages that is predicted clearly faster.

    Args:
      on_one: the plan on one mesh, or the error where there is none.
      search: the search of the program.
      plan_in: plans stages of given sizes, with a step shorter than some seconds.
    Raises:
      InfeasiblePlanError: `on_one`, where stages do not help.
    """
    target, enough = search.target, math.inf
    sizes: Decision[Places, PlanData]
    sizes = Decision(lambda of: plan_in(of, enough), NOT_POSSIBLE)
    if isinstance(on_one, InfeasiblePlanError):
        for count in counts_of(target, search.devices, fits=False):
            if sizes.plan((1,) * count) is not None:
                break
        if not sizes.plans:
            raise on_one
        why = "stages were compared, since nothing fits on one mesh"
        others: tuple[Variant, ...] = ()
    else:
        slow_s, tier = slow_seconds(on_one, target)
        flops = flops_of(search.traced.program)
        step_s = on_one.predicted.step_time_s
        enough = (1 - MIN_GAIN) * step_s
        counts = [
            n
            for n in counts_of(target, search.devices, fits=True)
            if least_step_s(on_one, flops, slow_s, n) < enough
        ]
        if not counts:
            return on_one
        climb(sizes, counts)
        why = f"stages were compared: in {format_seconds(step_s)} a step on one mesh"
        if slow_s:
            took = format_seconds(slow_s)
            why += f", collectives over `{tier}` take up to {took}"
        if (times := times_done(on_one, flops)) > 1 + MIN_GAIN:
            why += f", devices do the work {times:.1f} times, to send less"
        others = on_one.variants or (row_of("one mesh", on_one, is_chosen=True),)
    # Unequal submeshes that may be clearly faster than the best equal ones.
    equal, clear_s = [*sizes.plans.values()], math.inf
    if equal:
        clear_s = (1 - MIN_GAIN) * sizes.fastest().predicted.step_time_s
    unequal = (
        (p.predicted.step_time_s * evenness(p)[0], merged(p, clear_s)) for p in equal
    )
    for places in min((way for way in unequal if way[1]), default=(0.0, []))[1]:
        sizes.plan(places)
    in_order = sorted({**sizes.plans, **sizes.left}, key=lambda of: (len(of), of))
    lines = ", ".join(f"{_groups(places)}: {sizes.text(places)}" for places in in_order)
    taken = on_one
    if sizes.plans:
        plan = sizes.fastest()
        if plan.predicted.step_time_s < enough:
            taken = plan
            others = tuple(replace(row, is_chosen=False) for row in others)
        name = f"{plan.num_stages} stages, {plan.microbatches} micro-batches"
        name += ", one program" if plan.is_one_program else ""
        others = (*others, row_of(name, plan, is_chosen=taken is plan))
    assert isinstance(taken, PlanData)
    return noted(replace(taken, variants=others), f"{why} ({lines}).")


def _groups(places: Places) -> str:
    """Return the number of submeshes, or their shares of all devices, as text."""
    is_equal = len({*places}) == 1
    shares = " + ".join(f"{n}/{sum(places)}" for n in places)
    return str(len(places)) if is_equal else f"{len(places)} of {shares}"
