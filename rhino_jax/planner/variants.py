"""Variants of a program with a smaller memory peak, each planned briefly."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from rhino_jax.errors import InfeasiblePlanError, MicrobatchError
from rhino_jax.ir.transform import CHUNKS, MICROBATCHES, UN_REMAT, Transform, chosen
from rhino_jax.passes.microbatch import may_cut
from rhino_jax.passes.remat.unremat import ALL
from rhino_jax.plan.records import Variant
from rhino_jax.planner.chunking import counts_of_chunks
from rhino_jax.planner.remat import (
    SHARES,
    MicrobatchedProgram,
    RematSite,
    remat_sites,
    with_room,
)
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.remat.choice import SOME
from rhino_jax.planner.variant_search import Search
from rhino_jax.solver.incumbents import EFFORTS
from rhino_jax.units import format_bytes


MAX_COUNTS = 8
"""Maximum number of doublings of the number of micro-batches: up to 256."""

MIN_GAIN = 0.03
"""Share of the predicted step time that a variant must gain over a baseline program
that fits. Of nine pairs of suite full (`--methods best,auto`) and GPT 7B in frontier,
all four on TPU predicted to gain 4 % and more gained 7 to 11 % once compiled, and those
below 2 % gained up to 1 %. On H100 four that were predicted to gain 7 to 12 % gained 4,
4, -2 and -5 %, which no threshold tells apart. A tiny GPT predicted to be 6 % faster
compiled 5 % slower on v5e:2x4: XLA combined reductions of its gradients with those of
two norms' scales into one all-reduce of six arrays, which is not split again."""

NEAR = EFFORTS["fast"].near
"""Share of the step time by which brief plans may be off: remat policies are planned
whose estimates are this close to the best plan."""

WITHOUT_REMAT = Transform(UN_REMAT, 0, 0, ALL)
"""The pass that drops `jax.checkpoint`: everything that it would recompute is saved."""


def cut_in(count: int, places: Sequence[str] = ()) -> Transform:
    """Return the pass that splits the batch into micro-batches.

    Args:
      count: the number of micro-batches.
      places: places where sums over the batch are taken over each micro-batch.
    """
    own = {"per_microbatch": list(places)} if places else {}
    return chosen(MICROBATCHES, {"count": count, **own})


@dataclass(frozen=True, slots=True, eq=False)
class VariantCandidate:
    """A variant, searched briefly.

    Attributes:
      name: the passes applied to the program, for messages.
      search: the search of the variant, with the request's own level.
      found: the result of a brief search.
    """

    name: str
    search: Search
    found: SearchResult

    @property
    def peak_bytes(self) -> int:
        """Peak of the plan in bytes, or the smallest peak where nothing fits."""
        solution = self.found.solved[0].solution
        return int(solution.peak if self.found.fits else solution.smallest_peak)

    def is_better(self, other: VariantCandidate) -> bool:
        """Whether it is faster, or nearer to fitting where neither fits."""
        if self.found.fits or other.found.fits:
            return self.found.step_s < other.found.step_s
        return self.peak_bytes < (1 - MIN_GAIN) * other.peak_bytes


@dataclass(slots=True, eq=False)
class Explorer:
    """Search for the best variant of a program that holds less memory.

    Attributes:
      search: the search of the program without further passes.
      written: its result.
      first: its result at level "fast", from which variants are explored at any level,
        so that none is worse than "fast".
      may_cut, may_recompute: whether the planner may choose micro-batches, and
        rematerialization.
      has_wish: the program uses `jax.checkpoint`.
      places: places where sums over the batch are taken over each micro-batch.
      least: the variant with the smallest peak, where the program without passes does
        not fit; planned where no other variant fits.
      tried: all variants searched so far.
      estimated: name → remat policy that is estimated only, and the passes before it.
      chosen: the variant that is taken, once that is known.
    """

    search: Search
    written: SearchResult
    may_cut: bool
    may_recompute: bool
    has_wish: bool
    places: tuple[str, ...] = ()
    least: VariantCandidate | None = None
    tried: list[VariantCandidate] = field(default_factory=list)
    estimated: dict[str, tuple[RematSite, Sequence[Transform]]] = field(
        default_factory=dict
    )
    chosen: VariantCandidate | None = None

    @property
    def first(self) -> SearchResult:
        """The result of the program without further passes at level "fast"."""
        return self.written.at_fast

    @property
    def has_more(self) -> bool:
        """Whether other variants may be faster, or fit."""
        if self.may_recompute and self.has_wish:
            return True
        return self.first.is_bound_by_memory and (self.may_cut or self.may_recompute)

    def best(self) -> tuple[Search, SearchResult]:
        """Return the best variant's search, with its result at the requested level.

        Raises:
          InfeasiblePlanError: nothing fits.
        """
        written = VariantCandidate("baseline", self.search, self.first)
        self.tried.append(written)
        kept = written
        if self.may_recompute and self.has_wish:
            kept = self._try("no remat", [WITHOUT_REMAT]) or written
        if self.may_cut and self.first.is_bound_by_memory:
            nearer = kept if kept.is_better(written) else written
            cut = self._in_chunks(nearer)
            if cut is not nearer and kept is not nearer:
                all_kept = [*self._done(kept), *self._done(cut)]
                kept = self._try("no remat, the loss in chunks", all_kept) or kept
            else:
                kept = cut
        if self.may_recompute:
            self._recompute(kept)
            self._try_policies()
        if self.may_cut and all(t.found.is_bound_by_memory for t in self.tried):
            self._cut_in_time(kept)
        best = self._fastest()
        if not best.found.fits and self.least is not None:
            least = self.least
            brief = least.search.asking(level="fast", has_recipes=False)
            best = replace(least, found=brief.again(least.found))
            self.tried.append(best)
        if not best.found.fits:
            raise self._nothing_fits()
        self.tried[0] = self.chosen = replace(written, found=self.written)
        if best is written:
            return self.search, self.written
        found = self._again(best)
        if found.step_s >= self.written.step_s:
            return self.search, self.written
        self.chosen = best
        return best.search, found

    def _again(self, tried: VariantCandidate) -> SearchResult:
        """Search a variant with the request's own level, from its brief result; with
        recipes if the program without passes does not fit."""
        has_recipes = not self.first.fits
        return tried.search.asking(has_recipes=has_recipes).again(tried.found)

    def _fastest(self) -> VariantCandidate:
        """Return the fastest variant, or the baseline if that is hardly slower."""
        written, best = self.tried[0], min(self.tried, key=lambda t: t.found.step_s)
        is_faster = best.found.step_s < self._worth_s()
        return best if is_faster or not written.found.fits else written

    def variants(self) -> tuple[Variant, ...]:
        """Return the rows of the plan's table of variants, tried or estimated."""
        best, written = self.chosen, self.tried[0]
        tried = tuple(
            Variant(
                t.name,
                t.found.step_s,
                t.peak_bytes,
                is_chosen=t is best,
                is_brief=t is not written and t is not best,
            )
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
            planned_s = min(t.found.step_s for t in self.tried)
            if (1 - NEAR) * again.step_s >= min(self._worth_s(), planned_s):
                return
            del self.estimated[again.name]
            self._try(again.name, [*done, again.transform])

    def _worth_s(self) -> float:
        """Return the step in seconds below which a variant is worth taking."""
        return (1 - MIN_GAIN) * self.first.step_s

    def _in_chunks(self, kept: VariantCandidate) -> VariantCandidate:
        """Try the loss in more and more chunks while that helps; return the best."""
        before, best = self._done(kept), kept
        for count in counts_of_chunks(kept.search, kept.peak_bytes):
            chunks = chosen(CHUNKS, {"count": count})
            tried = self._try(f"{count} chunks of the loss", [*before, chunks])
            if tried is None or not tried.is_better(best):
                break
            best = tried
        return best

    def _done(self, tried: VariantCandidate) -> tuple[Transform, ...]:
        """Return the passes of a variant that the explored program does not have."""
        return tried.search.transforms[len(self.search.transforms) :]

    def _cut_in_time(self, kept: VariantCandidate) -> None:
        """Try more and more micro-batches, while that helps."""
        chunks = [t for t in self._done(kept) if t.name == CHUNKS]
        words = ", the loss in chunks" if chunks else ""
        peaks: list[int] = []
        for count in self._counts():
            best_s = min(t.found.step_s for t in self.tried)
            name, cut_here = f"{count} micro-batches{words}", cut_in(count, self.places)
            cut = self._try(name, [*chunks, cut_here])
            tried = [cut]
            if self.may_recompute and cut and not cut.found.fits:
                tried += self._recompute(
                    kept, MicrobatchedProgram(count, cut.peak_bytes)
                )
            now_s = min((t.found.step_s for t in tried if t), default=math.inf)
            if math.isfinite(best_s) and now_s >= best_s:
                return
            if any(t and not t.found.is_bound_by_memory for t in tried):
                return
            peaks += [min(t.peak_bytes for t in tried if t)] if any(tried) else []
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

    def _counts(self) -> Iterator[int]:
        traced = self.search.running
        for k in range(1, MAX_COUNTS + 1):
            options = {"per_microbatch": self.places}
            cut = may_cut(traced.closed_jaxpr, traced.program, 2**k, **options)
            if isinstance(cut, MicrobatchError) or 2**k > cut.rows:
                return
            yield cut.count

    def _recompute(
        self, kept: VariantCandidate, cut: MicrobatchedProgram | None = None
    ) -> list[VariantCandidate | None]:
        """Try selective remat under several shardings; return the variants tried.

        Args:
          kept: the variant whose residuals are all saved.
          cut: the micro-batches that it will run in; None: the whole batch at once.
        """
        pieces = f"{cut.count} micro-batches, " if cut else ""
        done = self._done(kept)
        if any(t.name == CHUNKS for t in done):
            pieces += "the loss in chunks, "
        then = [cut_in(cut.count, self.places)] if cut else []
        budget = self.search.request.memory_budget_bytes
        tried: list[VariantCandidate | None] = []
        seen: set[str] = set()
        for wide in with_room(self._there(kept.search), kept.found):
            for share in SHARES:
                every = remat_sites(wide, share * budget, cut)
                if not every or every[0].transform.choice in seen:
                    break
                best = every[0]
                seen.add(best.transform.choice)
                if best.name != SOME and best.step_s >= self._worth_s():
                    self._note(every, done)
                    break
                name = f"{pieces}{best.name}{_extent(best.transform)}"
                found = self._try(name, [*done, best.transform, *then])
                tried.append(found)
                if found is not None and found.found.fits and cut is None:
                    self._note(every[1:], done, found.found.step_s / best.step_s)
                if found is None or found.found.fits:
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

    def _there(self, search: Search) -> Search:
        """Return the search on the mesh of the first plan, where there is one."""
        if not self.first.fits:
            return search
        return search.on(self.first.mesh_axes)

    def _try(
        self, name: str, transforms: Sequence[Transform]
    ) -> VariantCandidate | None:
        if time.monotonic() > self.search.request.deadline:
            return None
        try:
            search = self._there(self.search.after(transforms))
        except MicrobatchError:
            return None
        found = search.asking(level="fast", has_recipes=False).find()
        self.tried.append(VariantCandidate(name, search, found))
        return self.tried[-1]

    def _nothing_fits(self) -> InfeasiblePlanError:
        """Return the error of the variant that comes nearest to the budget."""
        nearest = min(self.tried, key=lambda t: t.peak_bytes)
        others = ", ".join(f"{t.name} {format_bytes(t.peak_bytes)}" for t in self.tried)
        try:
            nearest.found.plan()
        except InfeasiblePlanError as error:
            if len(self.tried) == 1:
                return error
            return InfeasiblePlanError(
                error.what,
                where=error.where,
                numbers=f"{error.numbers}; smallest peaks: {others}",
                fix=error.fix,
            )
        raise AssertionError("a variant that does not fit has a plan")


def _extent(remat: Transform) -> str:
    """Return how many values a solver's choice of remat recomputes or offloads."""
    counts = ((key, len(remat.chosen.get(key, ()))) for key in ("recompute", "offload"))
    words = {"recompute": "recomputed", "offload": "offloaded"}
    found = ", ".join(f"{n} {words[key]}" for key, n in counts if n)
    return f" ({found})" if found else ""
