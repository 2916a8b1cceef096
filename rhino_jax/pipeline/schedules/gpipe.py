"""GPipe: all forward passes, then all backward passes.

Forward passes alone: inference and evaluation.
"""

from __future__ import annotations

from rhino_jax.pipeline.schedules.family import backward, family, forward, in_order
from rhino_jax.pipeline.tasks import Key, Schedule
from rhino_jax.pipeline.work import StepWork


@family("forward-only", "no backward pass", has_backward=False)
def forward_only(work: StepWork) -> Schedule:
    """Schedule forward passes of micro-batches one after another.

    A group with several chunks runs as many micro-batches of each chunk in turn as
    there are groups, so that no group waits for the first ones to come round.
    """

    def order(group: int) -> list[Key]:
        return [
            step
            for start in range(0, work.micro_batches, work.groups)
            for c in work.chunks_of[group]
            for m in range(start, min(start + work.groups, work.micro_batches))
            for step in forward(c, m, work.slices)
        ]

    orders = [order(g) for g in range(work.groups)]
    return in_order("forward-only", work, orders, is_forward_only=True)


@family("gpipe", "all forward, then all backward", "arXiv 1811.06965", waits=True)
def gpipe(work: StepWork) -> Schedule:
    """Schedule GPipe: every group holds the residuals of all micro-batches.

    If a group has several chunks, all micro-batches of the earlier one run first.

    Source: Huang et al., "GPipe: efficient training of giant neural networks using
    pipeline parallelism" (arXiv 1811.06965).
    """
    return in_order("gpipe", work, [_order(work, g) for g in range(work.groups)])


def _order(work: StepWork, group: int) -> list[Key]:
    chunks, batches = work.chunks_of[group], range(work.micro_batches)
    return [
        *(s for c in chunks for m in batches for s in forward(c, m, work.slices)),
        *(
            s
            for c in chunks[::-1]
            for m in batches
            for s in backward(c, m, work.slices)
        ),
    ]
