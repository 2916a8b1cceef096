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
    STACKED,
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
from rhino_jax.planner.decision import noted
from rhino_jax.planner.deferred_reductions import with_deferred_reductions
from rhino_jax.planner.least_memory import LeastMemory, error_of
from rhino_jax.planner.per_microbatch import notes_of_microbatches
from rhino_jax.planner.variant_search import (
    MIN_LAYOUT_GAIN,
    Search,
    Solved,
    VariantCandidate,
    Variants,
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
    first = plain.brief.find()
    axes = first.plan().mesh_axes if first.fits else search.meshes[-1]
    plain = plain.on(axes)
    variants = Variants(search=plain, min_gain=MIN_LAYOUT_GAIN)
    variants.begin(VariantCandidate(plain, first))
    # Of layouts of equal cost, the one with the longest runs of columns is taken.
    limits = ChoiceLimits(counts=plain.counts())
    for stored in search.choices(BLOCKS, limits):
        variants.variant("interleaved storage", [stored])
    written, *others = variants.tried
    if not others:
        return search
    if search.request.level != "fast":
        # A fast search misses more than interleaved storage often gains.
        pair = written, min(others, key=lambda t: t.step_s)
        variants.plans = {
            option: replace(one, found=one.search.find())
            for option, one in variants.plans.items()
            if one in pair
        }
    best = variants.taken()
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
    return noted(plan, note)


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
    search = as_requested(search)
    microbatches = search.options.microbatches
    if isinstance(microbatches, int) and microbatches > 1:
        search = search.after([cut_in(microbatches, search.options.per_microbatch)])
    written, search = search, replace(search, refine=0)
    # The recipes are those of the user's program, where that fits.
    own = recipes = first = VariantCandidate(search, search.find())
    fits, variants = first.found.fits, tuple[Variant, ...]()
    explorer = Explorer(search=search, written=first)
    saving = (t for _, t in trials() if t.gain is Gain.MEMORY)
    if not fits and any(map(search.may, saving)):
        least = LeastMemory(search=search)
        if not least.fits():
            raise error_of(least)
        explorer.least = least.smallest
    if explorer.has_more:
        own, variants = explorer.explored()
        recipes = recipes if fits else own
    if own.found.fits:
        own = with_deferred_reductions(own)
    if written.refine:
        # Plain recipes are among the plans, also of the user's program.
        searches = [replace(own.search.asking(has_recipes=True), refine=written.refine)]
        if fits and written.transforms != own.search.transforms:
            searches.append(written)
        plan = min((s.plan() for s in searches), key=_compiled_s)
    else:
        plan = replace(own.search.plan(own.found), recipes=recipes.found.recipes())
        plan = replace(plan, origin=Solved(own, recipes).alone())
    # Variants are planned on the mesh of the first plan, where that fits.
    meshes = plan.meshes or first.found.compared
    plan = noted(plan, *_notes(search, plan))
    return with_storage_note(replace(plan, variants=variants, meshes=meshes))


def _notes(search: Search, plan: PlanData) -> tuple[str, ...]:
    """Return a plan's notes on its micro-batches and loops."""
    microbatches = search.options.microbatches
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
    if any(t.name == STACKED for t in plan.transforms):
        notes += (
            "isomorphic products of many leaves are computed as one stack, which"
            " devices share; stacks='as written' computes each by itself.",
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


def _compiled_s(plan: PlanData) -> float:
    """Return the seconds of the fastest compiled candidate that fits, which is the
    plan."""
    fitting = [c.compiled_s for c in plan.refined if c.is_fitting]
    return min(fitting, default=math.inf)
