"""The variant of a program with the smallest memory peak, whatever its step time.

A budget below that peak is refused, and one above it has a plan. The budget has no
influence here except on which copies are too small to be counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rhino_jax.errors import MicrobatchError
from rhino_jax.ir.transform import CHUNKS, MICROBATCHES, RECOMPUTE, Transform, chosen
from rhino_jax.passes.microbatch import may_cut
from rhino_jax.planner.chunking import counts_of_chunks
from rhino_jax.planner.search.minimum_memory import find_minimum_memory
from rhino_jax.planner.search.remat.choice import least_choice
from rhino_jax.planner.variant_search import Search
from rhino_jax.planner.variants import (
    MAX_COUNTS,
    WITHOUT_REMAT,
    VariantCandidate,
    cut_in,
)


MAX_MESHES = 2
"""Maximum number of meshes on which variants are tried: those with the smallest peaks
of the baseline program."""

Passes = tuple[Transform, ...]


@dataclass(slots=True, eq=False)
class LeastMemory:
    """Search for the variant with the smallest peak.

    Attributes:
      search: the search of the user's program.
      may_cut, may_recompute, has_wish, places: see `planner.variants.Explorer`.
      tried: the variants so far, each with its plan of the smallest peak.
      refused: why the batch cannot be split into micro-batches; None: it can, or this
        is unknown yet.
    """

    search: Search
    may_cut: bool
    may_recompute: bool
    has_wish: bool
    places: tuple[str, ...] = ()
    tried: list[VariantCandidate] = field(default_factory=list)
    refused: MicrobatchError | None = None

    def best(self) -> VariantCandidate:
        """Return the variant with the smallest peak."""
        written = self._try("baseline", ())
        assert written is not None, "the program as it is needs no pass"
        self.search = self.search.on_any(written.found.meshes[:MAX_MESHES])
        for done in self._recomputed(written):
            before = len(self.tried)
            self._cut(done)
            if before == len(self.tried) and done:
                self._try(_name(done), done)
        if self.may_cut:
            self._in_chunks()
        return min(self.tried, key=lambda t: t.peak_bytes)

    def _recomputed(self, written: VariantCandidate) -> Iterator[Passes]:
        """Yield passes without micro-batches: none, and remat that saves least."""
        yield ()
        if not self.may_recompute:
            return
        every = [(), (WITHOUT_REMAT,)] if self.has_wish else [()]
        for before in every:
            kept = self._try("no remat", before) if before else written
            least = kept and least_choice(kept.found.solved[0])
            if least:
                yield (*before, Transform(RECOMPUTE, 0, 0, str(least.choice)))

    def _cut(self, before: Passes) -> None:
        """Try numbers of micro-batches, largest first, while the peak gets lower."""
        last: VariantCandidate | None = None
        for count in self._counts():
            done = (*before, cut_in(count, self.places))
            cut = self._try(_name(done), done)
            if cut is None or (last is not None and cut.peak_bytes >= last.peak_bytes):
                return
            last = cut

    def _counts(self) -> list[int]:
        if not self.may_cut or self.refused is not None:
            return []
        running = self.search.running
        closed, program = running.closed_jaxpr, running.program
        cut = may_cut(closed, program, 2, per_microbatch=self.places)
        if isinstance(cut, MicrobatchError):
            self.refused = cut
            return []
        counts = (2**k for k in range(MAX_COUNTS, 0, -1))
        return [count for count in counts if count <= cut.rows]

    def _in_chunks(self) -> None:
        """Try the best variant so far with a chunked loss."""
        best = min(self.tried, key=lambda t: t.peak_bytes)
        cuts = [t for t in best.search.transforms if t.name == MICROBATCHES]
        for count in counts_of_chunks(self.search, best.peak_bytes)[-1:]:
            name = f"{count} chunks of the loss"
            chunks: Passes = (chosen(CHUNKS, {"count": count}),)
            kept = self._try(name, chunks)
            if kept is None:
                return
            least = least_choice(kept.found.solved[0]) if self.may_recompute else None
            if least:
                chunks = (*chunks, Transform(RECOMPUTE, 0, 0, str(least.choice)))
            if cuts or least:
                self._try(f"{_name((*chunks, *cuts))}, {name}", (*chunks, *cuts))

    def _try(
        self, name: str, transforms: Sequence[Transform]
    ) -> VariantCandidate | None:
        if self.tried and time.monotonic() > self.search.request.deadline:
            return None
        try:
            search = self.search.after(transforms)
        except MicrobatchError:
            return None
        found = find_minimum_memory(
            search.running.program, search.meshes, search.target, search.request
        )
        self.tried.append(VariantCandidate(name, search, found))
        return self.tried[-1]


def _name(done: Sequence[Transform]) -> str:
    """Return the name of some passes, for messages."""
    words = [
        f"{t.chosen['count']} micro-batches" for t in done if t.name == MICROBATCHES
    ]
    again = [t.chosen for t in done if t.name == RECOMPUTE]
    words += ["recompute of all layers"] * any("recompute" in c for c in again)
    words += ["offload"] * any("offload" in c for c in again)
    return ", ".join(words)
