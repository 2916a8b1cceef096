"""Choice of a program's passes: micro-batches, remat, deferred reductions.

A program that needs none of them is planned once, as it is. Where it does not fit, or
would be faster with more memory, variants that hold less are planned too (`variants`),
each with its own shardings, and the one with the shortest predicted step that fits is
taken.

Fused weights are in interleaved (block-cyclic) storage where that is predicted faster.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rhino_jax.ir.transform import (
    BLOCKS,
    EXPERTS,
    UN_REMAT,
    UNROLL,
    Transform,
    as_text,
    stored_in_blocks,
)
from rhino_jax.passes.microbatch import cut_in
from rhino_jax.passes.program_pass import ChoiceLimits, Gain
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.records import Variant
from rhino_jax.planner.deferred_reductions import with_deferred_reductions
from rhino_jax.planner.least_memory import LeastMemory, error_of
from rhino_jax.planner.per_microbatch import notes_of_microbatches
from rhino_jax.planner.variant_search import (
    MIN_LAYOUT_GAIN,
    Search,
    Solved,
    Variants,
    briefly,
)
from rhino_jax.planner.variants import Explorer, trials
from rhino_jax.utils.gc import no_garbage_collection


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
    # Of layouts of equal cost, the one with the longest runs of columns is taken.
    limits = ChoiceLimits(counts=plain.counts())
    for stored in search.choices(BLOCKS, limits):
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


IN_BLOCKS = "blocks"


@no_garbage_collection()
def best_cut(search: Search) -> PlanData:
    """Return the plan of the variant predicted fastest within the memory budget.

    Args:
      search: the search of the user's program.
    Raises:
      InfeasiblePlanError: nothing fits, whatever the passes.
      MicrobatchError: the program has no batch that can be split as requested.
    """
    if search.storage == IN_BLOCKS:
        search = best_stored(search)
    elif not isinstance(search.storage, str) and (as_before := as_text(search.storage)):
        search = search.after([Transform(BLOCKS, 0, 0, as_before)])
    search, microbatches = as_requested(search), search.options.microbatches
    if isinstance(microbatches, int) and microbatches > 1:
        search = search.after([cut_in(microbatches, search.options.per_microbatch)])
    written, search = search, replace(search, refine=0)
    found = first = search.find()
    # The recipes are those of the user's program, where that fits.
    typed_search, typed = search, first
    variants: tuple[Variant, ...] = ()
    explorer = Explorer(search, written=first)
    saving = (t for _, t in trials() if t.gain is Gain.MEMORY)
    if not first.fits and any(map(search.may, saving)):
        least = LeastMemory(search)
        if not least.fits():
            raise error_of(least, least.best())
        explorer.least = least.best
    if explorer.has_more:
        search, found = explorer.best()
        if not first.fits:
            typed_search, typed = search, found
        variants = explorer.records()
    if found.fits:
        search, found = with_deferred_reductions(search, found)
    if written.refine:
        plan = _fastest_compiled(
            written if first.fits else None, search, written.refine
        )
    else:
        plan = replace(search.plan(found), recipes=typed.recipes())
    # Variants are planned on the mesh of the first plan, where that fits.
    meshes = plan.meshes or first.compared
    notes = (*plan.notes, *_notes(search, plan, microbatches))
    plan = replace(plan, variants=variants, meshes=meshes, notes=notes)
    if not written.refine:
        solved = Solved(search, found, typed_search, typed)
        plan = replace(plan, origin=solved.alone())
    return with_storage_note(plan)


def _notes(search: Search, plan: PlanData, microbatches: int | str) -> tuple[str, ...]:
    """Return a plan's notes on its micro-batches and loops."""
    notes = notes_of_microbatches(search.traced, plan.transforms)
    if any(t.name == UNROLL for t in plan.transforms):
        notes += (
            "layers are unrolled, since the compiler would copy what their loops stack;"
            " compiling takes longer, and loops='as written' leaves them.",
        )
    if any(t.name == EXPERTS for t in plan.transforms):
        notes += (
            "tokens are sorted by expert on each device, not all together;"
            " grouped='as written' sorts them as the program says.",
        )
    if isinstance(microbatches, int) and plan.microbatches != microbatches:
        notes += (
            f"{plan.microbatches} micro-batches run instead of {microbatches}: each"
            f" has as many rows as the largest of {microbatches} would, and so many"
            " hold the batch.",
        )
    return notes


def as_requested(search: Search) -> Search:
    """Return the search of the program without `jax.checkpoint` if `recompute` is
    "none"; else the search as given."""
    done = search.choices(UN_REMAT) if search.options.recompute == "none" else []
    return search.after(done) if done else search


def _fastest_compiled(
    written: Search | None, chosen: Search, refine: int | str
) -> PlanData:
    """Return the plan that the compiler makes fastest: of the plans of the variant that
    is predicted to be fastest, and of the user's program where it fits, with plain
    recipes among them."""
    searches = [replace(chosen.asking(has_recipes=True), refine=refine)]
    if written is not None and written.transforms != chosen.transforms:
        searches.append(written)

    def compiled_s(plan: PlanData) -> float:
        # The fastest candidate that fits is the plan.
        fitting = [c.compiled_s for c in plan.refined if c.is_fitting]
        return min(fitting, default=math.inf)

    return min((s.plan() for s in searches), key=compiled_s)
