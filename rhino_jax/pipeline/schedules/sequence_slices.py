"""Sequence slices (TeraPipe): causal sequences run through the pipeline by slice."""

from __future__ import annotations

from rhino_jax.errors import ScheduleError
from rhino_jax.pipeline.schedules.family import backward, family, forward, in_order
from rhino_jax.pipeline.tasks import Key, Schedule
from rhino_jax.pipeline.work import StepWork


TOKEN_SLICES = "token-slices"


@family(
    TOKEN_SLICES,
    "slices of the sequence, one after another",
    "arXiv 2102.07988",
    in_slices=True,
)
def token_slices(work: StepWork) -> Schedule:
    """Schedule the slices of all micro-batches one after another, then back in reverse.

    With few micro-batches of long sequences, slices fill the pipeline. Their lengths
    are chosen by `rhino_jax.pipeline.tera`.

    The step is divided along its sequence by `rhino_jax.passes.sequence_slices`:
    attention under a mask that is proved causal by slices, each with the keys and
    values of the slices before it, which their stage saves; the gradients of these are
    summed from the last slice to the first; and every slice has its own task, as its
    shapes differ (`rhino_jax.passes.staged.in_slices`).

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

    return in_order(TOKEN_SLICES, work, [order(g) for g in range(work.groups)])
