"""GPipe and 1F1B and their variants: forward passes alone, interleaved chunks, kFkB."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product, zip_longest

from rhino_jax.errors import ScheduleError
from rhino_jax.pipeline.schedules.family import (
    BACKWARD,
    FORWARD,
    Placement,
    Step,
    family,
    in_order,
    need_one_chunk,
)
from rhino_jax.pipeline.tasks import Schedule, TaskKind
from rhino_jax.pipeline.work import StepWork


@family("forward-only", "no backward pass", has_backward=False)
def forward_only(work: StepWork) -> Schedule:
    """Schedule forward passes of micro-batches one after another.

    A group with several chunks runs as many micro-batches of each chunk in turn as
    there are groups, so that no group waits for the first ones to come round.
    """

    def order(group: int) -> list[Step]:
        return [
            (FORWARD, c, m)
            for start in range(0, work.micro_batches, work.groups)
            for c in work.chunks_of[group]
            for m in range(start, min(start + work.groups, work.micro_batches))
        ]

    return in_order("forward-only", work, order, is_forward_only=True)


@family("gpipe", "all forward, then all backward")
def gpipe(work: StepWork) -> Schedule:
    """Schedule GPipe: every group holds the residuals of all micro-batches.

    If a group has several chunks, all micro-batches of the earlier one run first.

    Source: Huang et al., "GPipe: efficient training of giant neural networks using
    pipeline parallelism" (arXiv 1811.06965).
    """
    batches = range(work.micro_batches)

    def order(group: int) -> Iterator[Step]:
        chunks = work.chunks_of[group]
        yield from product([FORWARD], chunks, batches)
        yield from product([BACKWARD], chunks[::-1], batches)

    return in_order("gpipe", work, order)


@family(
    "interleaved",
    "1F1B with several chunks in every group",
    placements=(Placement.ROUND,),
)
def interleaved(work: StepWork) -> Schedule:
    """Schedule interleaved 1F1B: v chunks per group, round-robin; 1F1B's bubble over v.

    A group runs S micro-batches of one chunk, then as many of the next. It starts with
    2 (S - s - 1) + (v - 1) S forward passes before forward and backward passes
    alternate.

    If backward passes wait for the forward passes of all micro-batches, chunks run as
    in GPipe: this holds no memory for longer, and leaves time for transfers.

    Source: Narayanan et al., "Efficient large-scale language model training on GPU
    clusters using Megatron-LM" (arXiv 2104.04473), section 2.2.
    """
    groups, count = work.groups, work.micro_batches
    if len(work.chunks) == groups or not work.is_loop:
        raise ScheduleError(
            "`interleaved` needs several chunks in every group, that go round them.",
            where=f"groups of chunks: {[c.group for c in work.chunks]}",
            numbers=f"{len(work.chunks)} chunks in {groups} groups",
            fix=f"cut into a multiple of {groups} chunks, chunk c in group"
            f" c mod {groups}.",
        )
    if work.between:
        return replace(gpipe(work), name="interleaved")
    if count % groups:
        fewer = count // groups * groups
        raise ScheduleError(
            "`interleaved` needs a multiple of as many micro-batches as groups.",
            numbers=f"{count} micro-batches, {groups} groups",
            fix=f"take {fewer + groups} micro-batches"
            + (f" or {fewer}." if fewer else ".")
            + " `searched` takes any number.",
        )
    v = len(work.chunks) // groups
    total = count * v

    def order(stage: int) -> list[Step]:
        def step(kind: TaskKind, chunks: Sequence[int], k: int) -> Step:
            m = k // (groups * v) * groups + k % groups
            return kind, chunks[k // groups % v], m

        chunks = work.chunks_of[stage]
        ahead = [step(FORWARD, chunks, k) for k in range(total)]
        is_all = count == groups
        warm = total if is_all else 2 * (groups - stage - 1) + (v - 1) * groups
        found = ahead[:warm]
        for k in range(total):
            found += [*ahead[warm + k :][:1], step(BACKWARD, chunks[::-1], k)]
        return found

    return in_order("interleaved", work, order)


@family("1f1b", "one forward, one backward")
def one_f_one_b(work: StepWork) -> Schedule:
    """Schedule 1F1B: GPipe's bubble with less memory.

    Forward and backward passes alternate once S - s micro-batches are in flight at
    stage s.

    Source: Narayanan et al., "Memory-efficient pipeline-parallel DNN training" (arXiv
    2006.09503).
    """
    return _in_turn("1f1b", work, 1)


@family("kfkb", "k forward, k backward")
def k_f_k_b(work: StepWork, *, k: int = 2) -> Schedule:
    """Schedule kFkB: k forward passes and k backward passes alternate.

    With k times the memory of 1F1B, transfers have k - 1 tasks to hide behind.

    Args:
      work: costs of the stages.
      k: number of micro-batches per turn; the last turn has the remainder.

    Source: arXiv 2303.01675.
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

    def order(stage: int) -> Iterator[Step]:
        warm = work.groups - stage - 1
        for turn in turns[:warm]:
            yield from product([FORWARD], [stage], turn)
        for ahead, turn in zip_longest(turns[warm:], turns, fillvalue=range(0)):
            yield from product([FORWARD], [stage], ahead)
            yield from product([BACKWARD], [stage], turn)

    return in_order(name, work, order)
