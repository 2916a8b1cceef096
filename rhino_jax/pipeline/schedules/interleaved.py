"""Interleaved 1F1B: several smaller chunks in every group, a smaller bubble."""

from __future__ import annotations

from dataclasses import replace

from rhino_jax.errors import ScheduleError
from rhino_jax.pipeline.schedules.family import (
    Placement,
    backward,
    family,
    forward,
    in_order,
)
from rhino_jax.pipeline.schedules.gpipe import gpipe
from rhino_jax.pipeline.tasks import Key, Schedule
from rhino_jax.pipeline.work import StepWork


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
    is_met = bool(work.between) and not work.is_twice
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
