"""1F1B, and kFkB: backward passes as early as they can be."""

from __future__ import annotations

from rhino_jax.errors import ScheduleError
from rhino_jax.pipeline.schedules.family import (
    backward,
    family,
    forward,
    in_order,
    need_one_chunk,
)
from rhino_jax.pipeline.tasks import Key, Schedule
from rhino_jax.pipeline.work import StepWork


@family("1f1b", "one forward, one backward", "arXiv 2006.09503", waits=False)
def one_f_one_b(work: StepWork) -> Schedule:
    """Schedule 1F1B: GPipe's bubble with less memory.

    Forward and backward passes alternate once S - s micro-batches are in flight at
    stage s.
    """
    return _in_turn("1f1b", work, 1)


@family("kfkb", "k forward, k backward", "arXiv 2303.01675", waits=False)
def k_f_k_b(work: StepWork, *, k: int = 2) -> Schedule:
    """Schedule kFkB: k forward passes and k backward passes alternate.

    With k times the memory of 1F1B, transfers have k - 1 tasks to hide behind.

    Args:
      work: costs of the stages.
      k: number of micro-batches per turn; the last turn has the remainder.
    """
    if not 1 <= k <= work.micro_batches:
        raise ScheduleError(
            "`kfkb` takes from 1 to all micro-batches in turn.",
            numbers=f"k = {k}, {work.micro_batches} micro-batches",
            fix=f"take k from 1 to {work.micro_batches}.",
        )
    return _in_turn("kfkb", work, k)


def _in_turn(name: str, work: StepWork, k: int) -> Schedule:
    need_one_chunk(name, work)
    count = work.micro_batches
    turns = [range(i, min(i + k, count)) for i in range(0, count, k)]

    def order(stage: int) -> list[Key]:
        warm = min(len(turns), work.groups - stage - 1)
        ahead, found = iter(turns[warm:]), []
        for turn in turns[:warm]:
            found += [s for m in turn for s in forward(stage, m, work.slices)]
        for turn in turns:
            for m in next(ahead, ()):
                found += forward(stage, m, work.slices)
            found += [s for m in turn for s in backward(stage, m, work.slices)]
        return found

    return in_order(name, work, [order(s) for s in range(work.groups)])
