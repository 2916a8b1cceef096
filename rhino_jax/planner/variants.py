"""Variants of a program with a smaller memory peak, each planned briefly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rhino_jax.errors import MicrobatchError
from rhino_jax.ir.transform import Transform
from rhino_jax.passes.apply import PASSES
from rhino_jax.passes.program_pass import (
    Gain,
    ProgramPass,
    Trial,
    TrialKind,
)
from rhino_jax.plan.records import Variant
from rhino_jax.planner.remat import (
    MicrobatchedProgram,
    as_pass,
    tries_of_step,
    with_room,
)
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.remat.choice import SOME, Chosen
from rhino_jax.planner.variant_search import (
    Search,
    VariantCandidate,
    Variants,
    nothing_fits,
)


def trials(*kinds: TrialKind) -> Iterator[tuple[ProgramPass, Trial]]:
    """Yield the passes that the planner tries, in order, with how.

    Args:
      kinds: how they are tried; none: in any way.
    """
    for each in PASSES.values():
        if each.trial is not None and each.trial.kind in (kinds or TrialKind):
            yield each, each.trial


def among(done: Iterable[Transform]) -> list[str]:
    """Return the parts that some passes have in the name of a variant with others."""
    found = (PASSES[t.name].trial for t in done)
    return [t.among for t in found if t is not None and t.among]


@dataclass(slots=True, eq=False, kw_only=True)
class Explorer(Variants):
    """Search for the best variant of a program that holds less memory.

    Variants are explored from the program at level "fast", at any level, so that none
    is worse than "fast".

    Attributes:
      written: the result of the program without further passes.
      least: finds the variant with the smallest peak, where the program without passes
        does not fit; called where no other variant fits.
      estimated: name → row of a remat policy that is estimated only, and its passes.
      chosen: the variant that is taken, once that is known.
    """

    written: SearchResult
    least: Callable[[], VariantCandidate] | None = None
    estimated: dict[str, tuple[Variant, tuple[Transform, ...]]] = field(
        default_factory=dict
    )
    chosen: VariantCandidate | None = None

    def __post_init__(self) -> None:
        first = self.written.at_fast
        self.meshes = [first.mesh_axes] if first.fits else None
        self.add("baseline", (), self.search, first)

    @property
    def has_more(self) -> bool:
        """Whether other variants may be faster, or fit."""
        written = self.tried[0]
        return any(
            written.found.is_bound_by_memory
            if trial.gain is Gain.MEMORY
            else self._may_save(trial, written) and self.search.tries(each.name)
            for each, trial in trials()
            if self.search.may(trial)
        )

    def _may_save(self, trial: Trial, start: VariantCandidate) -> bool:
        """Whether what a pass saves of a variant's step may be worth it; see
        `Gain`."""
        if trial.gain is not Gain.STACK_COPIES:
            return True
        found = start.found
        if not found.fits or not found.target.device.copies_stacks:
            return False
        return self.may_win(start.step_s - found.stack_copies_s)

    def best(self) -> tuple[Search, SearchResult]:
        """Return the best variant's search, with its result at the requested level.

        Raises:
          InfeasiblePlanError: nothing fits.
        """
        kept = written = self.tried[0]
        for each, trial in trials():
            if self.search.may(trial):
                kept = _TRY[trial.kind](self, each.name, trial, kept)
        best = self.fastest()
        if not best.found.fits and self.least is not None:
            least = self.least()
            brief = least.search.asking(level="fast", has_recipes=False)
            best = replace(least, found=brief.again(least.found))
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
            replace(row, name=f"{row.name} (estimated)")
            for row, _ in self.estimated.values()
        )

    def _try_basis(
        self, name: str, trial: Trial, kept: VariantCandidate
    ) -> VariantCandidate:
        """Try the first choice of a pass; return that variant, faster or not.

        Args:
          name, trial: the pass.
          kept: the variant whose residuals are all saved, so far.
        """
        for choice in self.search.tries(name)[:1]:
            done = [*kept.done, choice]
            return self.plan(trial.label(choice), done) or kept
        return kept

    def _try_while_better(
        self, name: str, trial: Trial, kept: VariantCandidate
    ) -> VariantCandidate:
        """Try the choices of a pass on the best variant so far, or only while that
        helps; return the best one of `kept`'s residuals; see `_try_basis`."""
        if trial.gain is Gain.MEMORY and not self.tried[0].found.is_bound_by_memory:
            return kept
        for_stacks = trial.gain is Gain.STACK_COPIES
        start = kept if for_stacks else self._nearest()
        if not self._may_save(trial, start):
            return kept
        best = start
        on_mesh = start.search.on(start.found.mesh_axes)
        for choice in on_mesh.tries(name, start.peak_bytes):
            label = [trial.label(choice), *among(start.done)]
            if for_stacks and start.done:
                label.insert(0, start.name)
            tried = self.plan(", ".join(label), [*start.done, choice])
            if tried is not None and tried.is_better(best):
                best = tried
            elif trial.kind is TrialKind.WHILE_BETTER:
                break
        if best is start or kept is start:
            return best
        done = [*kept.done, *(t for t in best.done if t not in kept.done)]
        label = [kept.name, *among(best.done)]
        return self.plan(", ".join(label), done) or kept

    def _nearest(self) -> VariantCandidate:
        """Return the fastest variant so far, or the nearest to fitting."""
        best = self.tried[0]
        for other in self.tried[1:]:
            best = other if other.is_better(best) else best
        return best

    def _try_selected(
        self, name: str, trial: Trial, kept: VariantCandidate
    ) -> VariantCandidate:
        """Try what the solver chooses to recompute, and remat policies; see
        `_try_basis`."""
        written = self.tried[0]
        if kept is not written or written.found.is_bound_by_memory:
            self._recompute(kept, trial)
            self._try_policies()
        return kept

    def _try_policies(self) -> None:
        """Plan the estimated remat policies that may beat those planned so far."""
        if not any(t.name.startswith(SOME) for t in self.tried):
            return  # Estimates that no plan has calibrated are too rough to follow.
        rows = self.estimated.values()
        for row, done in sorted(rows, key=lambda e: e[0].step_time_s):
            if not self.may_win(row.step_time_s):
                return
            del self.estimated[row.name]
            self.plan(row.name, done, must_win=True)

    def _try_repeated(
        self, name: str, trial: Trial, kept: VariantCandidate
    ) -> VariantCandidate:
        """Try more and more micro-batches, while that helps; see `_try_basis`."""
        if not all(t.found.is_bound_by_memory for t in self.tried):
            return kept
        bases = {each.name for each, _ in trials(TrialKind.BASIS)}
        before = [t for t in kept.done if t.name not in bases]
        peaks: list[int] = []
        try:
            cuts = self.search.tries(name)
        except MicrobatchError:
            return kept
        for cut in cuts:
            best_s = self.shortest_s
            label = ", ".join([trial.label(cut), *among(before)])
            must_win = math.isfinite(best_s)
            found = self.plan(label, [*before, cut], must_win=must_win)
            if found and found.found.is_too_slow:
                break
            tried = [found] if found else []
            if found and not found.found.fits:
                for _, selected in trials(TrialKind.SELECTED):
                    if self.search.may(selected):
                        in_cut = MicrobatchedProgram(
                            cut.chosen["count"], found.peak_bytes
                        )
                        tried += self._recompute(kept, selected, in_cut, [cut])
            now_s = min((t.step_s for t in tried), default=math.inf)
            if math.isfinite(best_s) and now_s >= best_s:
                break
            if any(not t.found.is_bound_by_memory for t in tried):
                break
            peaks += [min(t.peak_bytes for t in tried)] if tried else []
            if not math.isfinite(now_s) and self._is_hopeless(peaks):
                break
        return kept

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
        trial: Trial,
        cut: MicrobatchedProgram | None = None,
        then: Sequence[Transform] = (),
    ) -> list[VariantCandidate]:
        """Try selective remat under several shardings; return the variants tried.

        Args:
          kept: the variant whose residuals are all saved.
          trial: of the remat pass.
          cut: the micro-batches that it will run in; None: the whole batch at once.
          then: the pass that splits it into these.
        """
        words = [f"{cut.count} micro-batches"] if cut else []
        words += among(kept.done)
        search = kept.search
        if self.meshes is not None:
            search = search.on(*self.meshes)
        budget = search.request.memory_budget_bytes
        tried: dict[str, VariantCandidate] = {}
        for wide in with_room(search, kept.found):
            tries = tries_of_step(wide, budget, cut)
            for every in tries:
                best, applied = every[0], as_pass(every[0])
                best_s = wide.step_s + best.answer.added_s
                if best.name != SOME and best_s >= self.worth_s:
                    self._note(every, kept.done, wide.step_s)
                    break
                found = tried.get(applied.choice)
                if found is None:
                    name = ", ".join([*words, best.name + trial.label(applied)])
                    found = self.plan(name, [*kept.done, applied, *then])
                    if found is None:
                        return [*tried.values()]
                    tried[applied.choice] = found
                if found.found.fits:
                    if cut is None:
                        scale = found.step_s / best_s
                        self._note(every[1:], kept.done, wide.step_s, scale)
                    return [*tried.values()]
                tries.lacks_bytes = found.peak_bytes - budget
                if cut is not None:
                    tries.lacks_bytes *= cut.count
        return [*tried.values()]

    def _note(
        self,
        every: Sequence[Chosen],
        done: Sequence[Transform],
        wide_s: float,
        scale: float = 1.0,
    ) -> None:
        """Record the estimates of remat policies.

        Args:
          every: the candidates.
          done: the passes applied before them.
          wide_s: the step in seconds with all residuals saved.
          scale: planned over estimated step time of another choice, to calibrate these.
        """
        for again in every:
            step_s = scale * (wide_s + again.answer.added_s)
            known = self.estimated.get(again.name)
            if again.name != SOME and (not known or step_s < known[0].step_time_s):
                row = Variant(again.name, step_s, again.answer.peak_bytes)
                self.estimated[again.name] = row, (*done, as_pass(again))


_TRY: Mapping[
    TrialKind, Callable[[Explorer, str, Trial, VariantCandidate], VariantCandidate]
] = {
    TrialKind.BASIS: Explorer._try_basis,
    TrialKind.WHILE_BETTER: Explorer._try_while_better,
    TrialKind.EACH: Explorer._try_while_better,
    TrialKind.SELECTED: Explorer._try_selected,
    TrialKind.REPEATED: Explorer._try_repeated,
}
"""How the choices of a pass are tried: (search, its name, its trial, the variant whose
residuals are all saved) → that variant for the passes after it."""
