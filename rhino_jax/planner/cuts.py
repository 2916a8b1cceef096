"""Choice of a program's passes: micro-batches, remat, deferred reductions.

A program that needs none of them is planned once, as it is. Where it does not fit, or
would be faster with more memory, variants that hold less are planned too (`variants`),
each with its own shardings, and the one with the shortest predicted step that fits is
taken.

Fused weights are in interleaved (block-cyclic) storage where that is predicted faster.
Reductions are deferred at sites that a first plan suggests.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rhino_jax.cost.collectives import collective_s, wire_bytes
from rhino_jax.cost.combine import combine_steps
from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.hardware.layout import lay_out
from rhino_jax.hardware.mesh import LaidMesh, size_of
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Op, Program
from rhino_jax.ir.spec import Spec, replicated, share_of, without
from rhino_jax.ir.traits import OpKind
from rhino_jax.ir.transform import (
    BLOCKS,
    DEFERRED_REDUCTIONS,
    EXPERTS,
    OFFLOADED,
    STACKED,
    UN_REMAT,
    UNROLL,
    Transform,
    as_text,
    stored_in_blocks,
)
from rhino_jax.passes.deferred_reductions import (
    Site,
    SitePrices,
    accumulated,
    as_text as groups_text,
    sites,
)
from rhino_jax.passes.microbatch import cut_in
from rhino_jax.passes.program_pass import ChoiceLimits, Gain
from rhino_jax.plan.decisions import Decisions
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.records import Variant
from rhino_jax.planner.decision import AUTO, noted
from rhino_jax.planner.experts import all_recipes, with_experts
from rhino_jax.planner.least_memory import LeastMemory, error_of
from rhino_jax.planner.notes import notes_of_microbatches
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.variant_search import (
    MIN_LAYOUT_GAIN,
    Search,
    Solved,
    VariantCandidate,
    Variants,
)
from rhino_jax.planner.variants import Explorer, trials
from rhino_jax.units import format_bytes
from rhino_jax.utils.gc import no_garbage_collection


@dataclass(frozen=True)
class PlannedPrices(SitePrices):
    """Read costs off a plan.

    Attributes:
      decisions: the specs of the plan.
      mesh: the mesh, laid out on the hardware.
      target: the hardware.
    """

    decisions: Decisions
    mesh: LaidMesh
    target: Target

    @cached_property
    def cuts(self) -> Mapping[int, tuple[tuple[int, ...], ...]]:
        """Op id → the mesh axes that shard each factor of its rule, as the op reads its
        operands."""
        found = {}
        for op in self.program.ops:
            if op.rule is None:
                continue
            axes_of: dict[int, tuple[int, ...]] = {}
            for i, layout in enumerate(op.rule.operands):
                held = self._spec(op.operands[i])
                spec = self.decisions.operands.get((op.id, i), held)
                if len(spec) == len(layout):
                    for dim, axes in zip(layout, spec, strict=True):
                        if len(dim) == 1 and axes:
                            axes_of[dim[0]] = axes
            every = range(len(op.rule.factors))
            found[op.id] = tuple(axes_of.get(f, ()) for f in every)
        return found

    def _spec(self, value: int) -> Spec:
        rank = self.program.values[value].rank
        spec = self.decisions.values.get(value)
        return spec if spec is not None and len(spec) == rank else replicated(rank)

    def _made(self, value: int, axes: Sequence[int]) -> tuple[Spec, float]:
        """Return the spec of a value while it is unreduced over mesh axes, and its
        bytes on one device."""
        spec = without(self._spec(value), axes)
        whole = self.program.values[value]
        return spec, whole.bytes * share_of(spec, whole.shape, self.mesh.sizes)

    def close(self, value: int, axes: tuple[int, ...]) -> tuple[float, float]:
        """Return the seconds and wire bytes of reducing a value to its own spec."""
        made, local = self._made(value, axes)
        steps = combine_steps(made, self._spec(value), axes, local, self.mesh)
        seconds = sent = 0.0
        for s in steps:
            of = s.kind, s.local_bytes
            seconds += s.runs * collective_s(*of, self.mesh.over(s.axes))
            sent += s.runs * wire_bytes(*of, size_of(self.mesh, s.axes))
        return seconds, sent

    def held_s(self, op: Op, axes: tuple[int, ...]) -> float:
        """Return the added memory and FLOP seconds of an op's unreduced result."""
        value, device = op.results[0], self.target.device
        whole, sizes = self.program.values[value], self.mesh.sizes
        made, local = self._made(value, axes)
        less = whole.bytes * share_of(self._spec(value), whole.shape, sizes)
        memory_s = (local - less) / (device.hbm_bytes_per_s * device.memory_efficiency)
        if not op.traits.is_contraction:
            return memory_s
        shares = [share_of(s, whole.shape, sizes) for s in (made, self._spec(value))]
        peak = device.matmul_efficiency * max(f for _, f in device.peak_flops_per_s)
        return memory_s + op.flops * (shares[0] - shares[1]) / peak


def sites_of(program: Program, found: SearchResult, target: Target) -> list[Site]:
    """Return the sites where a plan could defer a reduction, most useful first."""
    mesh = lay_out(target, found.mesh_axes)
    decisions = found.decisions()
    return sites(program, PlannedPrices(program, mesh.sizes, decisions, mesh, target))


def with_deferred_reductions(written: VariantCandidate) -> VariantCandidate:
    """Plan with deferred reductions, where that is predicted to be faster.

    Reductions of the given plan are deferred where it has them; those of loops in any
    case, since a plan that reduces in every trip has none left to defer.

    Args:
      written: the program, searched; a plan fits.
    Returns:
      The program with deferred reductions, searched at the same level; or the argument.
    """
    search, found = written.search, written.found
    program, sizes = search.running.program, [size for _, size in found.mesh_axes]
    variants = Variants(
        search=search.on(found.mesh_axes).asking(has_recipes=False),
        min_gain=MIN_LAYOUT_GAIN,
    )
    brief = variants.begin(replace(written, found=found.at_fast, done=()))

    def plan(sites: Sequence[Site]) -> VariantCandidate | None:
        """Plan with the reductions of some sites deferred; None where nothing fits,
        where they are estimated to save less than a variant must gain, or were tried
        before."""
        text = groups_text(site.group for site in sites)
        done = (Transform(DEFERRED_REDUCTIONS, 0, 0, text),)
        least_s = variants.min_gain * brief.step_s
        if done in variants.plans or sum(s.saved_s for s in sites) < least_s:
            return None
        found = variants.variant("deferred reductions", done)
        return found if found is not None and found.found.fits else None

    plan(sites_of(program, brief.found, search.target))
    count = math.prod(sizes)
    supposed = plan(accumulated(program, [count]))
    if supposed is not None:
        # The mesh axes that shard most of the partial sums stacked in `count` parts, by
        # bytes.
        weights: Counter[tuple[int, ...]] = Counter()
        again = supposed.search.running.program
        specs = supposed.found.decisions().values
        for op in again.ops:
            value = again.values[op.operands[0]] if op.operands else None
            is_sum = op.traits.kind is OpKind.REDUCTION
            if is_sum and value and value.rank and value.shape[0] == count:
                if spec := specs.get(value.id):
                    weights[tuple(sorted(spec[0]))] += value.bytes
        used = weights.most_common(1)[0][0] if weights else ()
        if 0 < math.prod(sizes[a] for a in used) < count:
            plan(accumulated(program, [sizes[a] for a in used]))
    # What level "fast" takes is searched in any case, so that no level is worse.
    taken = [variants.taken()]
    if not found.is_same_choice(brief.found):
        plan(sites_of(program, found, search.target))
        taken.append(variants.taken())
    further = [one.again() for one in dict.fromkeys(taken) if one is not brief]
    return min([written, *further], key=lambda one: one.step_s)


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
    """Return the plan of the variant predicted fastest within the memory budget; where
    none fits, with as little of the state in the host's memory as makes one fit.

    Args:
      search: the search of the user's program.
    Raises:
      InfeasiblePlanError: nothing fits, whatever the passes.
      MicrobatchError: the program has no batch that can be split as requested.
    """
    searches, may_offload = [search], search.options.offload == AUTO
    while True:
        try:
            return _best_cut(searches.pop(0))
        except InfeasiblePlanError:
            if may_offload and search.target.device.host_bytes_per_s:
                hosted = search.choices(OFFLOADED)
                searches, may_offload = [search.after([t]) for t in hosted], False
            if not searches:
                raise


def _best_cut(search: Search) -> PlanData:
    """Return `best_cut` of a search with its state where it is."""
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
        own = with_deferred_reductions(with_experts(own, first))
    if written.refine:
        # Plain recipes are among the plans, also of the user's program.
        searches = [replace(own.search.asking(has_recipes=True), refine=written.refine)]
        if fits and written.transforms != own.search.transforms:
            searches.append(written)
        plan = min((s.plan() for s in searches), key=_compiled_s)
    else:
        plan = replace(own.search.plan(own.found), recipes=all_recipes(recipes))
        plan = replace(plan, origin=Solved(own, recipes).alone())
    # Variants are planned on the mesh of the first plan, where that fits.
    meshes = plan.meshes or first.found.compared
    plan = noted(plan, *_notes(search, plan))
    return with_storage_note(replace(plan, variants=variants, meshes=meshes))


OF_PASSES = {
    UNROLL: "layers are unrolled, since the compiler would copy what their loops stack;"
    " compiling takes longer, and loops='as written' leaves them.",
    EXPERTS: "tokens are sorted by expert on each device, not all together;"
    " grouped='as written' sorts them as the program says.",
    STACKED: "isomorphic products of many leaves are computed as one stack, which"
    " devices share; stacks='as written' computes each by itself.",
}
"""Pass → the note on a plan that has it."""


def _notes(search: Search, plan: PlanData) -> tuple[str, ...]:
    """Return a plan's notes on its micro-batches and loops."""
    microbatches = search.options.microbatches
    notes = notes_of_microbatches(search.traced, plan.transforms)
    done = {t.name for t in plan.transforms}
    notes += tuple(note for name, note in OF_PASSES.items() if name in done)
    if OFFLOADED in done:
        hosted = [leaf for leaf in plan.inputs if leaf.on_host]
        size = format_bytes(sum(leaf.bytes_per_device for leaf in hosted))
        notes += (
            f"{len(hosted)} arrays of state, {size} per device, wait in host memory"
            " between steps, since nothing fits otherwise; offload='as written' leaves"
            " them on the devices.",
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
