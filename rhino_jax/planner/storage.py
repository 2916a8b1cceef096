"""Choice of interleaved (block-cyclic) storage for fused weights."""

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
    """Return the search of the program with these inputs in interleaved storage."""
    choice = as_text(stored)
    return search.after([Transform(BLOCKS, 0, 0, choice)]) if choice else search


def best_stored(search: Search) -> Search:
    """Return the search of the program with its fused weights in interleaved storage,
    in as many blocks as some mesh axes have devices, where that is predicted to be
    faster; else the search as given.

    Args:
      search: the search of the user's program.
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
        # A fast search misses more than interleaved storage often gains.
        asked = [plain.on(axes), stored_as(plain, from_text(choice)).on(axes)]
        written_s, best_s = (each.find().step_s for each in asked)
    if best_s >= (1 - MIN_GAIN) * written_s:
        return search
    return stored_as(search, from_text(choice))


def _counts(sizes: Sequence[int]) -> Iterator[int]:
    """Yield the number of devices of every subset of mesh axes, fewest first: among
    layouts of equal cost, the one with the longest runs of columns is taken."""
    counts = {
        math.prod(some)
        for n in range(1, len(sizes) + 1)
        for some in combinations(sizes, n)
    }
    yield from sorted(counts - {1})


def with_storage_note(plan: PlanData) -> PlanData:
    """Return the plan with a note on which inputs are in interleaved storage."""
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
