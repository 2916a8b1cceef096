"""Choice of interleaved (block-cyclic) storage for fused weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from rhino_jax.ir.transform import BLOCKS, stored_in_blocks
from rhino_jax.passes.program_pass import ChoiceLimits
from rhino_jax.plan.plan import PlanData
from rhino_jax.planner.variant_search import (
    MIN_LAYOUT_GAIN,
    Search,
    Variants,
    briefly,
)


def best_stored(search: Search) -> Search:
    """Return the search of the program with its fused weights in interleaved storage,
    in as many blocks as some mesh axes have devices, where that is predicted to be
    faster; else the search as given.

    Args:
      search: the search of the user's program.
    """
    plain = replace(search, refine=0)
    first = briefly(plain)
    axes = first.plan().mesh_axes if first.fits else search.meshes[-1]
    plain = plain.on(axes)
    variants = Variants(plain, min_gain=MIN_LAYOUT_GAIN)
    variants.add("baseline", (), plain, first)
    counts = _counts([size for _, size in axes])
    for stored in search.choices(BLOCKS, ChoiceLimits(counts=counts)):
        variants.plan("interleaved storage", [stored])
    best = min(variants.tried[1:], key=lambda t: t.step_s, default=None)
    if best is None:
        return search
    if search.request.level != "fast":
        # A fast search misses more than interleaved storage often gains.
        pair = variants.tried[0], best
        variants.tried = [replace(t, found=t.search.find()) for t in pair]
    best = variants.fastest()
    return search.after(best.done) if best.done and best.found.fits else search


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
