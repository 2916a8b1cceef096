"""Whether fused weights are stored in blocks, and in how many."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from rhino_jax.ir.blocks import Stored, as_text, from_text, stored_in_blocks
from rhino_jax.ir.transform import BLOCKS, Transform
from rhino_jax.passes.interleaved import split_inputs
from rhino_jax.plan.plan import PlanData
from rhino_jax.planner.deferred_reductions import MIN_GAIN
from rhino_jax.planner.variant_search import Search


def stored_as(search: Search, stored: Stored) -> Search:
    """The search of a program with these inputs in blocks."""
    choice = as_text(stored)
    return search.after([Transform(BLOCKS, 0, 0, choice)]) if choice else search


def best_stored(search: Search) -> Search:
    """The search of the program with its fused weights in blocks, as many as some axes
    of the mesh have devices, where that is predicted to be faster; else as given.

    Args:
      search: of the program as its user wrote it.
    """
    plain = replace(search, refine=0)
    briefly = plain.asking(level="fast", has_recipes=False)
    first = briefly.find()
    axes = first.plan().mesh_axes if first.fits else search.meshes[-1]
    found: dict[str, float] = {}
    for count in _counts([size for _, size in axes]):
        traced = search.running
        stored = split_inputs(traced.closed_jaxpr, traced.program, count)
        choice = as_text(stored)
        is_late = time.monotonic() > search.request.deadline
        if choice and choice not in found and not is_late:
            variant = stored_as(briefly, stored).on(axes)
            found[choice] = variant.find().step_s
    if not found:
        return search
    choice = min(found, key=lambda c: found[c])
    written_s, best_s = first.step_s, found[choice]
    if search.request.level != "fast":
        # A quick search misses more than there often is to gain.
        asked = [plain.on(axes), stored_as(plain, from_text(choice)).on(axes)]
        written_s, best_s = (each.find().step_s for each in asked)
    if best_s >= (1 - MIN_GAIN) * written_s:
        return search
    return stored_as(search, from_text(choice))


def _counts(sizes: Sequence[int]) -> Iterator[int]:
    """The devices of every choice of mesh axes, fewest first: of layouts that cost the
    same, that with the longest runs of columns is taken."""
    counts = {
        math.prod(some)
        for n in range(1, len(sizes) + 1)
        for some in combinations(sizes, n)
    }
    yield from sorted(counts - {1})


def told_of_storage(plan: PlanData) -> PlanData:
    """The plan, with what is stored in blocks told in a note."""
    stored = stored_in_blocks(plan.transforms)
    if not stored:
        return plan
    (slot, ((dim, blocks), *_)), *_ = stored.items()
    note = (
        f"{len(stored)} arrays are stored in blocks, `{plan.inputs[slot].path}` in"
        f" {blocks} along dim {dim}: plan.put takes them as written, plan.as_written"
        " gives them so."
    )
    return replace(plan, notes=(*plan.notes, note))
