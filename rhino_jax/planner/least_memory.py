"""The variant of a program with the smallest memory peak, whatever its step time; and
the error where that is over the budget.

A budget below that peak is refused, and one above it has a plan. The budget has no
influence here except on which copies are too small to be counted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from rhino_jax.errors import (
    CoupledBatchError,
    InfeasiblePlanError,
    MicrobatchError,
)
from rhino_jax.ir.transform import MICROBATCHES, RECOMPUTE, UN_REMAT, Transform
from rhino_jax.passes.apply import PASSES
from rhino_jax.passes.microbatch import may_cut
from rhino_jax.passes.program_pass import Gain, TrialKind
from rhino_jax.planner.decision import AUTO
from rhino_jax.planner.search.driver import find_minimum_memory
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.records import SolvedMesh
from rhino_jax.planner.search.remat.candidates import candidates_of
from rhino_jax.planner.search.remat.choice import smallest_peak
from rhino_jax.planner.variant_search import (
    Passes,
    Search,
    VariantCandidate,
    Variants,
    nothing_fits,
    peaks_text,
)
from rhino_jax.planner.variants import as_pass, trials
from rhino_jax.units import format_bytes


MAX_MESHES = 2
"""Maximum number of meshes on which variants are tried: those with the smallest peaks
of the baseline program."""

MAX_PLACES = 4
"""Maximum number of rounds in which the places of the last refusal are added until the
batch can be split."""


@dataclass(eq=False, kw_only=True)
class LeastMemory(Variants):
    """Search for the variant with the smallest peak; each is planned for that.

    Attributes:
      left_to_plan: plans the variants that are left, with pauses.
      refused: why the batch cannot be split into micro-batches; None: it can, or this
        is unknown yet.
    """

    find: Callable[[Search], SearchResult] = lambda search: find_minimum_memory(
        *search.problem
    )
    left_to_plan: Iterator[None] = field(init=False)
    refused: MicrobatchError | None = None

    def __post_init__(self) -> None:
        Variants.__post_init__(self)
        self.rank = lambda variant: (variant.peak_bytes,)
        self.left_to_plan = self._each()

    def smallest(self) -> VariantCandidate:
        """Return the variant with the smallest peak."""
        deque(self.left_to_plan, maxlen=0)
        return self.fastest()

    def fits(self) -> bool:
        """Whether any variant fits the budget; the search pauses at the first."""
        budget = self.search.request.memory_budget_bytes

        def has_one() -> bool:
            return any(t.peak_bytes <= budget for t in self.tried)

        return any(has_one() for _ in self.left_to_plan) or has_one()

    def _each(self) -> Iterator[None]:
        """Plan the variants, with pauses."""
        self.variant("baseline", ())
        written = self.fastest()
        yield
        self.meshes = written.found.meshes[:MAX_MESHES]
        for done in self._recomputed(written):
            before = len(self.plans)
            yield from self._cut(done)
            if before == len(self.plans) and done:
                self.variant(_name(done), done)
            yield
        # The best variant so far with the last choice of a pass, such as a loss in the
        # most chunks.
        for each, trial in trials(TrialKind.WHILE_BETTER):
            best, label = self.fastest(), trial.label
            cuts = [t for t in best.search.transforms if t.name == MICROBATCHES]
            chunks = self.search.tries(each.name, best.peak_bytes)[-1:]
            if trial.gain is not Gain.MEMORY or not chunks:
                continue
            kept = self.variant(label(*chunks), chunks)
            least = () if kept is None else self._least_of(kept)
            if kept is not None and (cuts or least):
                done = (*chunks, *least, *cuts)
                self.variant(f"{_name(done)}, {label(*chunks)}", done)

    def _recomputed(self, written: VariantCandidate) -> Iterator[Passes]:
        """Yield passes without micro-batches: none, and remat that saves least."""
        yield ()
        every = [(), tuple(self.search.tries(UN_REMAT))]
        for before in dict.fromkeys(every):
            kept = self.variant("no remat", before) if before else written
            if kept and (least := self._least_of(kept)):
                yield (*before, *least)

    def _least_of(self, kept: VariantCandidate) -> Passes:
        """Return the remat of a variant that saves least; empty for none."""
        trial = PASSES[RECOMPUTE].trial
        if trial is None or not self.search.may(trial):
            return ()
        least = smallest_peak(candidates_of(kept.found.best))
        return (as_pass(least),) if least else ()

    def _cut(self, before: Passes) -> Iterator[None]:
        """Try numbers of micro-batches, largest first, while the peak gets lower, with
        pauses."""
        if self.refused is not None:
            return
        try:
            cuts = self.search.tries(MICROBATCHES)
        except MicrobatchError as error:
            self.refused = error
            return
        last = math.inf
        for count in reversed(cuts):
            done = (*before, count)
            cut = self.variant(_name(done), done)
            if cut is None or cut.peak_bytes >= last:
                return
            yield
            last = cut.peak_bytes

    def freeing(self) -> list[str]:
        """Return the keyword by which sums are taken over each micro-batch, so that the
        batch can be split, where that lowers the peak."""
        options, refused = self.search.options, self.refused
        places, running = options.per_microbatch, self.search.running
        for _ in range(MAX_PLACES):
            more = refused.places if isinstance(refused, CoupledBatchError) else ()
            if not {*more} - {*places}:
                return []
            places = (*dict.fromkeys([*places, *more]),)
            found = may_cut(
                running.closed_jaxpr, running.program, 2, per_microbatch=places
            )
            if not isinstance(found, MicrobatchError):
                free = replace(options, microbatches=AUTO, per_microbatch=places)
                freely = LeastMemory(search=replace(self.search, options=free))
                lower = freely.smallest().peak_bytes
                if lower >= self.fastest().peak_bytes:
                    return []
                names = repr(places[0]) if len(places) == 1 else repr(places)
                return [
                    "take these sums over each micro-batch:"
                    f" per_microbatch={names} (smallest peak then"
                    f" {format_bytes(lower)})"
                ]
            refused = found
        return []


def _name(done: Sequence[Transform]) -> str:
    """Return the name of some passes, for messages."""
    words = [
        f"{t.chosen['count']} micro-batches" for t in done if t.name == MICROBATCHES
    ]
    again = [t.chosen for t in done if t.name == RECOMPUTE]
    words += ["recompute of all layers"] * any("recompute" in c for c in again)
    words += ["offload"] * any("offload" in c for c in again)
    return ", ".join(words)


def error_of(least: LeastMemory) -> InfeasiblePlanError:
    """Return the error of the variant with the smallest peak, with the reason why
    further variants were refused and the keyword that allows them."""
    best = least.smallest()
    search = best.search
    one, request = best.found.best, search.request
    nothing = replace(one.solution, labels=None, objective=math.inf)
    refused = SolvedMesh(one.mesh_problem.within(request.memory_budget_bytes), nothing)
    found = replace(best.found, solved=[refused], request=request)
    told = nothing_fits([replace(best, found=found)])
    where, fixes = [told.where], list[str]()
    if least.refused is not None:
        couples = "; ".join(filter(None, [least.refused.where, least.refused.numbers]))
        where.append(f"no micro-batches: {least.refused.what} {couples}")
        fixes = least.freeing()
    closed = (t for _, t in trials() if t.gain is Gain.MEMORY and not search.may(t))
    open_to = sorted({f"{trial.option}='auto'" for trial in closed})
    if open_to:
        fixes.append(f"leave it to the planner: {' and '.join(open_to)}")
    numbers = f"{told.numbers}; {peaks_text(least.tried)}"
    divided = math.ceil(best.found.best.mesh_problem.divided_peak)
    if divided > search.request.memory_budget_bytes:
        numbers += (
            f"; evenly divided over all devices {format_bytes(divided)}, which stages"
            " do not lower"
        )
    return InfeasiblePlanError(
        told.what,
        where="; ".join(where),
        numbers=numbers,
        fix="; or ".join([*fixes, told.fix]),
        smallest_peak_bytes=told.smallest_peak_bytes,
        divided_peak_bytes=divided,
    )
