"""Variants of a program with a smaller memory peak, each planned briefly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rhino_jax.errors import MicrobatchError
from rhino_jax.ir.transform import CHUNKS, MICROBATCHES, UN_REMAT, Transform
from rhino_jax.plan.records import Variant
from rhino_jax.planner.remat import (
    SHARES,
    MicrobatchedProgram,
    RematSite,
    remat_sites,
    with_room,
)
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.remat.choice import SOME
from rhino_jax.planner.variant_search import (
    MIN_GAIN,
    Search,
    VariantCandidate,
    Variants,
    nothing_fits,
)


@dataclass(frozen=True, slots=True)
class AllowedPasses:
    """The passes that the user leaves to the planner.

    Attributes:
      may_cut, may_recompute: whether it may choose micro-batches, and
        rematerialization.
      places: places where sums over the batch are taken over each micro-batch.
    """

    may_cut: bool
    may_recompute: bool
    places: tuple[str, ...] = ()

    def remat_of(self, search: Search) -> list[Transform]:
        """Return the pass that drops the program's `jax.checkpoint`, if it may run."""
        return search.choices(UN_REMAT) if self.may_recompute else []

    def chunks_of(self, search: Search, peak_bytes: int) -> list[Transform]:
        """Return the numbers of chunks in which the loss is worth a try: none where the
        logits, sharded over all devices, are less of the peak than a variant must gain.

        Args:
          search: the search of the program; `peak_bytes`: the peak of one device.
        """
        if not self.may_cut:
            return []
        devices = math.prod(size for _, size in search.meshes[0])
        return search.choices(CHUNKS, least_bytes=MIN_GAIN * peak_bytes * devices)

    def cuts_of(self, search: Search) -> list[Transform]:
        """Return the numbers of micro-batches, fewest first.

        Raises:
          MicrobatchError: the batch cannot be split.
        """
        if not self.may_cut:
            return []
        return search.choices(MICROBATCHES, places=self.places)


@dataclass(slots=True, eq=False)
class Explorer:
    """Search for the best variant of a program that holds less memory.

    Attributes:
      search: the search of the program without further passes.
      written: its result.
      allowed: the passes that may be tried.
      least: the variant with the smallest peak, where the program without passes does
        not fit; planned where no other variant fits.
      variants: the program at level "fast", from which variants are explored at any
        level, so that none is worse than "fast"; and all variants searched so far.
      estimated: name → remat policy that is estimated only, and the passes before it.
      chosen: the variant that is taken, once that is known.
    """

    search: Search
    written: SearchResult
    allowed: AllowedPasses
    least: VariantCandidate | None = None
    variants: Variants = field(init=False)
    estimated: dict[str, tuple[RematSite, Sequence[Transform]]] = field(
        default_factory=dict
    )
    chosen: VariantCandidate | None = None

    def __post_init__(self) -> None:
        first = self.written.at_fast
        meshes = [first.mesh_axes] if first.fits else None
        self.variants = Variants(self.search, meshes=meshes)
        self.variants.add("baseline", (), self.search, first)

    @property
    def tried(self) -> list[VariantCandidate]:
        """All variants searched so far, the program without further passes first."""
        return self.variants.tried

    @property
    def has_more(self) -> bool:
        """Whether other variants may be faster, or fit."""
        may = self.allowed
        is_bound = self.tried[0].found.is_bound_by_memory
        if is_bound and (may.may_cut or may.may_recompute):
            return True
        return bool(may.remat_of(self.search))

    def best(self) -> tuple[Search, SearchResult]:
        """Return the best variant's search, with its result at the requested level.

        Raises:
          InfeasiblePlanError: nothing fits.
        """
        may, written = self.allowed, self.tried[0]
        kept = written
        if without := may.remat_of(self.search):
            kept = self.variants.plan("no remat", without) or written
        if may.may_cut and written.found.is_bound_by_memory:
            nearer = kept if kept.is_better(written) else written
            cut = self._in_chunks(nearer)
            if cut is not nearer and kept is not nearer:
                all_kept = [*kept.done, *cut.done]
                name = "no remat, the loss in chunks"
                kept = self.variants.plan(name, all_kept) or kept
            else:
                kept = cut
        if may.may_recompute:
            self._recompute(kept)
            self._try_policies()
        if all(t.found.is_bound_by_memory for t in self.tried):
            self._cut_in_time(kept)
        best = self.variants.fastest()
        if not best.found.fits and self.least is not None:
            brief = self.least.search.asking(level="fast", has_recipes=False)
            best = replace(self.least, found=brief.again(self.least.found))
            self.tried.append(best)
        if not best.found.fits:
            raise nothing_fits(self.tried)
        self.tried[0] = self.chosen = replace(written, found=self.written)
        if best is written:
            return self.search, self.written
        # The recipes are those of the program without passes, where that fits.
        has_recipes = not written.found.fits
        found = best.search.asking(has_recipes=has_recipes).again(best.found)
        if found.step_s >= self.written.step_s:
            return self.search, self.written
        self.chosen = best
        return best.search, found

    def records(self) -> tuple[Variant, ...]:
        """Return the rows of the plan's table of variants, tried or estimated."""
        best, written = self.chosen, self.tried[0]
        tried = tuple(
            t.record(is_chosen=t is best, is_brief=t is not written and t is not best)
            for t in self.tried
        )
        return tried + tuple(
            Variant(f"{again.name} (estimated)", again.step_s, again.peak_bytes)
            for again, _ in self.estimated.values()
        )

    def _try_policies(self) -> None:
        """Plan the estimated remat policies that may beat those planned so far."""
        if not any(t.name.startswith(SOME) for t in self.tried):
            return  # Estimates that no plan has calibrated are too rough to follow.
        for again, done in sorted(self.estimated.values(), key=lambda e: e[0].step_s):
            if not self.variants.may_win(again.step_s):
                return
            del self.estimated[again.name]
            transforms = [*done, again.transform]
            self.variants.plan(again.name, transforms, must_win=True)

    def _in_chunks(self, kept: VariantCandidate) -> VariantCandidate:
        """Try the loss in more and more chunks while that helps; return the best."""
        best = kept
        for chunks in self.allowed.chunks_of(kept.search, kept.peak_bytes):
            name = f"{chunks.chosen['count']} chunks of the loss"
            tried = self.variants.plan(name, [*kept.done, chunks])
            if tried is None or not tried.is_better(best):
                break
            best = tried
        return best

    def _cut_in_time(self, kept: VariantCandidate) -> None:
        """Try more and more micro-batches, while that helps."""
        chunks = [t for t in kept.done if t.name == CHUNKS]
        words = ", the loss in chunks" if chunks else ""
        peaks: list[int] = []
        try:
            cuts = self.allowed.cuts_of(self.search)
        except MicrobatchError:
            return
        for cut in cuts:
            count, best_s = cut.chosen["count"], self.variants.shortest_s
            name = f"{count} micro-batches{words}"
            found = self.variants.plan(name, [*chunks, cut])
            tried = [found] if found else []
            if self.allowed.may_recompute and found and not found.found.fits:
                in_cut = MicrobatchedProgram(count, found.peak_bytes)
                tried += self._recompute(kept, in_cut, [cut])
            now_s = min((t.step_s for t in tried), default=math.inf)
            if math.isfinite(best_s) and now_s >= best_s:
                return
            if any(not t.found.is_bound_by_memory for t in tried):
                return
            peaks += [min(t.peak_bytes for t in tried)] if tried else []
            if not math.isfinite(now_s) and self._is_hopeless(peaks):
                return

    def _is_hopeless(self, peaks: Sequence[int]) -> bool:
        """Whether more micro-batches cannot fit: each doubling saves half as much as
        the one before, so all further ones together at most as much again; twice as
        much is allowed for, as these are estimates."""
        if len(peaks) < 2:
            return False
        saved = max(0, peaks[-2] - peaks[-1])
        budget = self.search.request.memory_budget_bytes
        return peaks[-1] - 2 * saved > budget

    def _recompute(
        self,
        kept: VariantCandidate,
        cut: MicrobatchedProgram | None = None,
        then: Sequence[Transform] = (),
    ) -> list[VariantCandidate]:
        """Try selective remat under several shardings; return the variants tried.

        Args:
          kept: the variant whose residuals are all saved.
          cut: the micro-batches that it will run in; None: the whole batch at once.
          then: the pass that splits it into these.
        """
        pieces = f"{cut.count} micro-batches, " if cut else ""
        if any(t.name == CHUNKS for t in kept.done):
            pieces += "the loss in chunks, "
        search = kept.search
        if self.variants.meshes is not None:
            search = search.on_any(self.variants.meshes)
        budget = search.request.memory_budget_bytes
        tried: list[VariantCandidate] = []
        seen: set[str] = set()
        for wide in with_room(search, kept.found):
            for share in SHARES:
                every = remat_sites(wide, share * budget, cut)
                if not every or every[0].transform.choice in seen:
                    break
                best = every[0]
                seen.add(best.transform.choice)
                if best.name != SOME and best.step_s >= self.variants.worth_s:
                    self._note(every, kept.done)
                    break
                name = f"{pieces}{best.name}{_extent(best.transform)}"
                found = self.variants.plan(name, [*kept.done, best.transform, *then])
                if found is None:
                    return tried
                tried.append(found)
                if found.found.fits and cut is None:
                    self._note(every[1:], kept.done, found.step_s / best.step_s)
                if found.found.fits:
                    return tried
        return tried

    def _note(
        self, every: Sequence[RematSite], done: Sequence[Transform], scale: float = 1.0
    ) -> None:
        """Record the estimates of remat policies.

        Args:
          every: the candidates.
          done: the passes applied before them.
          scale: planned over estimated step time of another choice, to calibrate these.
        """
        for again in every:
            again = replace(again, step_s=scale * again.step_s)
            known = self.estimated.get(again.name)
            if again.name != SOME and (not known or again.step_s < known[0].step_s):
                self.estimated[again.name] = again, done


def _extent(remat: Transform) -> str:
    """Return how many values a solver's choice of remat recomputes or offloads."""
    counts = ((key, len(remat.chosen.get(key, ()))) for key in ("recompute", "offload"))
    words = {"recompute": "recomputed", "offload": "offloaded"}
    found = ", ".join(f"{n} {words[key]}" for key, n in counts if n)
    return f" ({found})" if found else ""
