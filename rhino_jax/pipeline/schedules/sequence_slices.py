"""Token slices: a causal sequence runs through the pipeline slice by slice."""

from __future__ import annotations

from rhino_jax.errors import ScheduleError
from rhino_jax.pipeline.schedules.family import backward, forward, in_order
from rhino_jax.pipeline.tasks import Key, Schedule
from rhino_jax.pipeline.work import StepWork


def token_slices(work: StepWork) -> Schedule:
    """Slices of all micro-batches one after another, then back in the opposite order.

    With few micro-batches of long sequences, slices are what fills the pipeline. How
    long each should be is for `rhino_jax.pipeline.tera`.

    A step that runs so is cut along its sequence by `rhino_jax.passes.sequence_slices`:
    attention under a mask that is proved causal by slices, each with the keys and
    values of those before it, kept by their stage; the gradients of these summed up
    from the last slice to the first; and a task for every slice, as each has shapes of
    its own (`rhino_jax.passes.staged.in_slices`).

    Source: Li et al., "TeraPipe: token-level pipeline parallelism for training
    large-scale language models" (arXiv 2102.07988).
    """
    if work.slices < 2:
        raise ScheduleError(
            "`token-slices` needs sequences that are cut.",
            numbers=f"{work.slices} slice in every chunk",
            fix="give every chunk one cost for every slice, or take `gpipe`.",
        )

    def order(group: int) -> list[Key]:
        chunks, batches = work.chunks_of[group], range(work.micro_batches)
        slices = work.slices
        ahead = [s for c in chunks for m in batches for s in forward(c, m, slices)]
        return ahead + [
            s
            for c in chunks[::-1]
            for m in batches[::-1]
            for s in backward(c, m, slices)
        ]

    return in_order("token-slices", work, [order(g) for g in range(work.groups)])
