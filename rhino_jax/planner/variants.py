"""Variants of a program with a smaller memory peak, each planned briefly; and what they
recompute, chosen under the shardings of a brief plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

from rhino_jax.errors import MicrobatchError
from rhino_jax.ir.transform import RECOMPUTE, Transform, num_microbatches
from rhino_jax.passes.apply import PASSES
from rhino_jax.passes.program_pass import Gain, ProgramPass, Trial, TrialKind
from rhino_jax.plan.records import Variant
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.remat.candidates import candidates_of
from rhino_jax.planner.search.remat.choice import SOME, Chosen, RematQuestion, ask
from rhino_jax.planner.variant_search import VariantCandidate, Variants, nothing_fits


ROOMS = (4.0, 1.25)
"""Memory budgets of the plans whose shardings are taken, in multiples of the smallest
peak of any plan of the program with all residuals saved: little communication needs
more memory. The second is for programs where no choice fits under the first, and takes
up to ten times as long."""

SHARES = (0.97, 0.85)
"""Shares of the requested budget within which a step's values are chosen, the second
where the plan with the first choice does not fit: a plan of the rematerialized program
has a slightly higher peak than the choice predicts, since its kernels differ. Planning
a step takes longer than planning a stage, so there are no more choices."""

MAX_CHOICES = 5
"""Maximum number of choices of a stage, one after the other, each to free the bytes
that a plan with the one before still lacks."""

MIN_MORE = 0.01
"""Share of the budget by which at least a choice of a stage must free more: with less,
the next choice is the same again."""

EFFORT = 1.0
"""Limit on CP-SAT's deterministic seconds for one choice of what to recompute: about
two seconds on one core."""


def with_room(saved: VariantCandidate) -> Iterator[SearchResult]:
    """Yield brief plans of a program with as much memory as it needs.

    Args:
      saved: the program with all residuals saved, which need not fit.
    """
    found = saved.found
    if not found.is_bound_by_memory:
        yield found
        return
    least = found.best.solution.smallest_peak
    for room in ROOMS:
        brief = saved.search.brief.asking(memory_budget_bytes=room * least)
        wide = brief.again(found)
        if wide.fits:
            yield wide


def as_pass(chosen: Chosen) -> Transform:
    """Return the pass that applies a choice of what to recompute."""
    return Transform(RECOMPUTE, 0, 0, str(chosen.choice))


@dataclass(slots=True)
class RematTries:
    """Choices of what to recompute, each to be planned: the shardings, and so the peak,
    of the plan are not those under which the choice fits. While plans do not fit, the
    next choice has less memory.

    Attributes:
      asked: the residuals of a step, or of a stage, under some shardings.
      budget_bytes: the memory budget of the next choice.
      least_bytes: bytes by which the next choice must free more at least.
      count: maximum number of choices.
      lacks_bytes: bytes by which the plan with the last choice exceeds its budget.
    """

    asked: RematQuestion
    budget_bytes: float
    least_bytes: float
    count: int = MAX_CHOICES
    lacks_bytes: float = 0.0

    def __iter__(self) -> Iterator[list[Chosen]]:
        """Yield choices, the cheapest first; see `ask`."""
        for _ in range(self.count):
            found = ask(self.asked, self.budget_bytes, effort=EFFORT)
            if not found:
                return
            yield found
            self.budget_bytes -= max(self.lacks_bytes, self.least_bytes)


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


@dataclass(eq=False, kw_only=True)
class Explorer(Variants):
    """Search for the best variant of a program that holds less memory.

    Variants are explored from the program at level "fast", at any level, so that none
    is worse than "fast".

    Attributes:
      written: the program without further passes, searched.
      least: finds the variant with the smallest peak, where the program without passes
        does not fit; called where no other variant fits.
      estimated: name → row of a remat policy that is estimated only, and its passes.
    """

    written: VariantCandidate
    least: Callable[[], VariantCandidate] | None = None
    estimated: dict[str, tuple[Variant, tuple[Transform, ...]]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        Variants.__post_init__(self)
        brief = self.begin(replace(self.written, found=self.written.found.at_fast))
        self.meshes = [brief.found.mesh_axes] if brief.found.fits else None

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

    def explored(self) -> tuple[VariantCandidate, tuple[Variant, ...]]:
        """Return the best variant, its result at the requested level, and the rows of
        the plan's table of variants, tried or estimated.

        Raises:
          InfeasiblePlanError: nothing fits.
        """
        kept = brief = self.tried[0]
        for each, trial in trials():
            if self.search.may(trial):
                kept = self._try(each.name, trial, kept)
        best, tried = self.taken(), self.tried
        if not best.found.fits and self.least is not None:
            best = self.least().again(level="fast", has_recipes=False)
            tried.append(best)
        if not best.found.fits:
            raise nothing_fits(tried)
        own = chosen = tried[0] = self.written
        if best is not brief:
            # The recipes are those of the program without passes, where that fits.
            further = best.again(has_recipes=not brief.found.fits)
            if further.step_s < own.step_s:
                own, chosen = further, best
        rows = [
            Variant(
                t.name,
                t.step_s,
                t.peak_bytes,
                is_chosen=t is chosen,
                is_brief=t is not self.written and t is not chosen,
            )
            for t in tried
        ]
        rows += [
            replace(row, name=f"{row.name} (estimated)")
            for row, _ in self.estimated.values()
        ]
        return own, (*rows,)

    def _try(self, name: str, trial: Trial, kept: VariantCandidate) -> VariantCandidate:
        """Try the choices of a pass; see `TrialKind`.

        Args:
          name, trial: the pass.
          kept: the variant whose residuals are all saved, so far.
        Returns:
          That variant for the passes after it.
        """
        written = self.tried[0]
        match trial.kind:
            case TrialKind.BASIS:
                for choice in self.search.tries(name)[:1]:
                    done = [*kept.done, choice]
                    kept = self.variant(trial.label(choice), done) or kept
            case TrialKind.SELECTED:
                if kept is not written or written.found.is_bound_by_memory:
                    self._recompute(kept, trial)
                    # Estimates that no plan has calibrated are too rough to follow.
                    is_known = any(t.name.startswith(SOME) for t in self.tried)
                    rows = [*self.estimated.values()] if is_known else []
                    for row, passes in sorted(rows, key=lambda e: e[0].step_time_s):
                        if not self.may_win(row.step_time_s):
                            break
                        del self.estimated[row.name]
                        self.variant(row.name, passes, must_win=True)
            case TrialKind.REPEATED:
                if all(t.found.is_bound_by_memory for t in self.tried):
                    self._try_repeated(name, trial, kept)
            case _:
                if trial.gain is not Gain.MEMORY or written.found.is_bound_by_memory:
                    return self._try_while_better(name, trial, kept)
        return kept

    def _try_while_better(
        self, name: str, trial: Trial, kept: VariantCandidate
    ) -> VariantCandidate:
        """Try the choices of a pass on the best variant so far, or only while that
        helps; return the best one of `kept`'s residuals."""
        for_stacks = trial.gain is Gain.STACK_COPIES
        start = kept
        if not for_stacks:  # The fastest so far, or the nearest to fitting.
            start = reduce(lambda a, b: b if b.is_better(a) else a, self.tried)
        if not self._may_save(trial, start):
            return kept
        best = start
        on_mesh = start.search.on(start.found.mesh_axes)
        for choice in on_mesh.tries(name, start.peak_bytes):
            label = [trial.label(choice), *among(start.done)]
            if for_stacks and start.done:
                label.insert(0, start.name)
            tried = self.variant(", ".join(label), [*start.done, choice])
            if tried is not None and tried.is_better(best):
                best = tried
            elif trial.kind is TrialKind.WHILE_BETTER:
                break
        if best is start or kept is start:
            return best
        done = [*kept.done, *(t for t in best.done if t not in kept.done)]
        return self.variant(", ".join([kept.name, *among(best.done)]), done) or kept

    def _try_repeated(self, name: str, trial: Trial, kept: VariantCandidate) -> None:
        """Try more and more micro-batches, while that helps."""
        bases = {each.name for each, _ in trials(TrialKind.BASIS)}
        before = [t for t in kept.done if t.name not in bases]
        peaks: list[int] = []
        try:
            cuts = self.search.tries(name)
        except MicrobatchError:
            return
        for cut in cuts:
            best_s = min(t.step_s for t in self.tried)
            label = ", ".join([trial.label(cut), *among(before)])
            must_win = math.isfinite(best_s)
            found = self.variant(label, [*before, cut], must_win=must_win)
            if found and found.found.is_too_slow:
                return
            tried = [found] if found else []
            for _, selected in trials(TrialKind.SELECTED):
                if found and not found.found.fits and self.search.may(selected):
                    tried += self._recompute(kept, selected, found)
            now_s = min((t.step_s for t in tried), default=math.inf)
            if math.isfinite(best_s) and now_s >= best_s:
                return
            if any(not t.found.is_bound_by_memory for t in tried):
                return
            peaks += [min(t.peak_bytes for t in tried)] if tried else []
            if math.isinf(now_s) and len(peaks) > 1:
                # Each doubling saves half as much as the one before, so all further
                # ones together at most as much again; twice as much is allowed for, as
                # these are estimates.
                least = peaks[-1] - 2 * max(0, peaks[-2] - peaks[-1])
                if least > self.search.request.memory_budget_bytes:
                    return

    def _recompute(
        self,
        kept: VariantCandidate,
        trial: Trial,
        cut: VariantCandidate | None = None,
    ) -> list[VariantCandidate]:
        """Try selective remat under several shardings; return the variants tried.

        Args:
          kept: the variant whose residuals are all saved.
          trial: of the remat pass.
          cut: the variant that is split into micro-batches, and does not fit; None: the
            whole batch at once.
        """
        then = cut.done[-1:] if cut else ()
        count = num_microbatches(then)
        words = [f"{count} micro-batches"] if cut else []
        words += among(kept.done)
        search = kept.search
        if self.meshes is not None:
            search = search.on(*self.meshes)
        budget = search.request.memory_budget_bytes
        tried: list[VariantCandidate] = []
        for wide in with_room(replace(kept, search=search)):
            within = SHARES[0] * budget
            if cut is not None:  # It has to fit in micro-batches.
                # One byte less in a micro-batch is `count` bytes less in the batch.
                within = wide.best.solution.peak - count * (cut.peak_bytes - within)
            more = count * (SHARES[0] - SHARES[1]) * budget
            question = candidates_of(wide.best)
            tries = RematTries(question, within, more, len(SHARES))
            for every in tries:
                best, applied = every[0], as_pass(every[0])
                best_s = wide.step_s + best.answer.added_s
                if best.name != SOME and best_s >= self.enough_s:
                    self._note(every, kept.done, wide.step_s)
                    break
                name = ", ".join([*words, best.name + trial.label(applied)])
                found = self.variant(name, [*kept.done, applied, *then])
                if found is None:
                    return tried
                tried += [] if found in tried else [found]
                if found.found.fits:
                    if cut is None:
                        scale = found.step_s / best_s
                        self._note(every[1:], kept.done, wide.step_s, scale)
                    return tried
                tries.lacks_bytes = count * (found.peak_bytes - budget)
        return tried

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
