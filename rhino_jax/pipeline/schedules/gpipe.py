"""GPipe: all forward passes, then all backward passes."""

from __future__ import annotations

from rhino_jax.pipeline.schedules.family import backward, forward, in_order
from rhino_jax.pipeline.tasks import Key, Schedule
from rhino_jax.pipeline.work import StepWork


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
