"""GPipe and 1F1B and their variants: forward passes alone, interleaved chunks, kFkB."""

from __future__ import annotations

from dataclasses import replace

from rhino_jax.errors import ScheduleError
from rhino_jax.pipeline.schedules.family import (
    Placement,
    backward,
    family,
    forward,
    in_order,
    need_one_chunk,
)
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


@family("gpipe", "all forward, then all backward", "arXiv 1811.06965")
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


@family(
    "interleaved",
    "1F1B with several chunks in every group",
    "arXiv 2104.04473",
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
    is_met = bool(work.between)
    _check(work, is_any=is_met)
    if is_met:
        return replace(gpipe(work), name="interleaved")
    groups, count = work.groups, work.micro_batches
    v = len(work.chunks) // groups
    total = count * v

    def order(stage: int) -> list[Key]:
        chunks = work.chunks_of[stage]

        def place(k: int) -> tuple[int, int]:
            return k // groups % v, k // (groups * v) * groups + k % groups

        ahead = [
            forward(chunks[c], m, work.slices) for c, m in map(place, range(total))
        ]
        back = [
            backward(chunks[v - 1 - c], m, work.slices)
            for c, m in map(place, range(total))
        ]
        is_all = count == groups
        warm = total if is_all else 2 * (groups - stage - 1) + (v - 1) * groups
        warm = min(warm, total)
        found = [step for steps in ahead[:warm] for step in steps]
        for k, steps in enumerate(back):
            found += ahead[warm + k] if warm + k < total else []
            found += steps
        return found

    return in_order("interleaved", work, [order(s) for s in range(groups)])


def _check(work: StepWork, *, is_any: bool) -> None:
    if len(work.chunks) == work.groups or not work.is_loop:
        raise ScheduleError(
            "`interleaved` needs several chunks in every group, that go round them.",
            where=f"groups of chunks: {[c.group for c in work.chunks]}",
            numbers=f"{len(work.chunks)} chunks in {work.groups} groups",
            fix=f"cut into a multiple of {work.groups} chunks, chunk c in group"
            f" c mod {work.groups}.",
        )
    if work.micro_batches % work.groups and not is_any:
        fewer = work.micro_batches // work.groups * work.groups
        raise ScheduleError(
            "`interleaved` needs a multiple of as many micro-batches as groups.",
            numbers=f"{work.micro_batches} micro-batches, {work.groups} groups",
            fix=f"take {fewer + work.groups} micro-batches"
            + (f" or {fewer}." if fewer else ".")
            + " `searched` takes any number.",
        )


@family("1f1b", "one forward, one backward", "arXiv 2006.09503")
def one_f_one_b(work: StepWork) -> Schedule:
    """Schedule 1F1B: GPipe's bubble with less memory.

    Forward and backward passes alternate once S - s micro-batches are in flight at
    stage s.
    """
    return _in_turn("1f1b", work, 1)


@family("kfkb", "k forward, k backward", "arXiv 2303.01675")
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
