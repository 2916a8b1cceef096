"""Zero bubble: weight gradients fill idle time."""

from __future__ import annotations

from collections.abc import Iterator

from rhino_jax.errors import ScheduleError
from rhino_jax.pipeline.graph import graph_of
from rhino_jax.pipeline.schedules.family import (
    FORWARD,
    Placement,
    Step,
    family,
    in_order,
    need_one_chunk,
)
from rhino_jax.pipeline.schedules.listed import PriorityRule, listed
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.pipeline.tasks import Schedule, TaskKind
from rhino_jax.pipeline.work import StepWork


@family(
    "zero-bubble",
    "1F1B with gradients of weights put off (ZB-H1)",
    is_split=True,
)
def zero_bubble(work: StepWork) -> Schedule:
    """Schedule ZB-H1: 1F1B with weight gradients deferred by s micro-batches at stage
    s.

    They run where 1F1B idles. Every stage holds the residuals of S micro-batches, as
    the first stage of 1F1B does; the bubble is (S - 1) (F + I - W) instead of (S - 1)
    (F + I + W).

    If backward passes wait for the forward passes of all micro-batches, these come
    first, and I and W alternate: no other stage waits for W, so the bubble is (S - 1)
    (F + I), and GPipe's (S - 1) (F + I + W).

    Source: Qi et al., "Zero bubble pipeline parallelism" (arXiv 2401.10241), section
    2.1, with I for its B.
    """
    need_one_chunk("zero-bubble", work)
    count, is_met = work.micro_batches, bool(work.between)

    def order(stage: int) -> Iterator[Step]:
        warm = count if is_met else work.groups - stage - 1
        late = 0 if is_met else stage
        for k in range(-warm, count + late):
            if 0 <= warm + k < count:
                yield FORWARD, stage, warm + k
            if 0 <= k < count:
                yield TaskKind.INPUT_GRADIENT, stage, k
            if 0 <= k - late < count:
                yield TaskKind.WEIGHT_GRADIENT, stage, k - late

    return in_order("zero-bubble", work, order, is_split=True)


@family(
    "zero-bubble-v",
    "two chunks in every group, there and back (ZB-V)",
    placements=(Placement.BACK,),
    is_split=True,
)
def zero_bubble_v(work: StepWork) -> Schedule:
    """Schedule ZB-V: two chunks per group, placed up to the last group and back.

    The loss is thus on the group of the input, and every group holds as much as the
    first of 1F1B. The source places tasks by hand for equal times; here they are
    list-scheduled, input gradients first, weight gradients last, with as many
    activations in flight. With equal times that gives the same schedule: groups idle
    only until their first task.

    Source: Qi et al., "Zero bubble pipeline parallelism" (arXiv 2401.10241), section 6.
    """
    if not work.is_v:
        raise ScheduleError(
            "`zero-bubble-v` needs two chunks in every group, there and back.",
            where=f"groups of chunks: {[c.group for c in work.chunks]}",
            fix="cut into twice as many chunks as groups, in groups 0 … S-1, S-1 … 0.",
        )
    # If backward passes wait for all micro-batches, all of these are in flight.
    is_met = bool(work.between)
    limit = () if is_met else (2 * work.groups,) * work.groups
    graph, found = graph_of(work, is_split=True), []
    # Without reservation gaps fill better, but it may deadlock if stages differ.
    for is_reserved in (False, True):
        rule = PriorityRule(most_in_flight=limit, is_reserved=is_reserved)
        try:
            found.append(listed("zero-bubble-v", graph, rule))
        except ScheduleError:
            if is_reserved and not found:
                raise
    return min(found, key=lambda schedule: simulate(schedule).step_time_s)
