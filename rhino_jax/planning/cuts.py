"""Which passes a program is planned with: micro-batches, recompute, open sums.

What needs none of them is planned once, as it is. Where that does not fit, or would be
faster with more memory, variants that hold less are planned too, each with shardings of
its own, and the one with the shortest predicted step that fits is kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from rhino_jax.errors import InfeasiblePlanError, MicrobatchError
from rhino_jax.ir.transform import MICROBATCHES, UN_REMAT, Transform, chosen
from rhino_jax.plan.plan import Plan
from rhino_jax.plan.records import Variant
from rhino_jax.planning.partial_sums import with_open_sums
from rhino_jax.planning.search import Search
from rhino_jax.search.found import Found
from rhino_jax.transform.microbatch import may_cut
from rhino_jax.transform.recompute.as_kept import ALL, has_remat
from rhino_jax.units import format_bytes


AUTO = "auto"

MOST_COUNTS = 8
"""Doublings of the number of micro-batches that are tried: up to 256."""


def best_cut(search: Search, microbatches: int | str, recompute: str) -> Plan:
    """The plan of the variant of a program that is predicted fastest within memory.

    Args:
      search: of the program as its user wrote it.
      microbatches, recompute: as of `auto_shard`.
    Raises:
      InfeasiblePlanError: nothing fits, whatever is done.
      MicrobatchError: the program has no batch that can be cut as it is asked to be.
    """
    has_wish = has_remat(search.traced.program)
    if recompute == "none" and has_wish:
        search = search.after([KEPT_INSTEAD])
    if isinstance(microbatches, int) and microbatches > 1:
        search = search.after([cut_in(microbatches)])
    first: Found | None = search.find()
    assert first is not None
    variants: tuple[Variant, ...] = ()
    explorer = Explorer(
        search, first, microbatches == AUTO, recompute == AUTO, has_wish
    )
    if explorer.has_more:
        search, first = explorer.best()
        variants = explorer.variants()
    plan = search.plan(first)
    plan = with_open_sums(search, plan)[1]
    return replace(plan, variants=variants)


KEPT_INSTEAD = Transform(UN_REMAT, 0, 0, ALL)
"""Nothing is made again that `jax.checkpoint` would have."""


def cut_in(count: int) -> Transform:
    """The batch, cut into so many micro-batches."""
    return chosen(MICROBATCHES, {"count": count})


@dataclass(frozen=True, slots=True, eq=False)
class Tried:
    """One variant, searched briefly.

    Attributes:
      name: what was done to the program, for people.
      search: of it, as it is asked for.
      found: what a brief search found.
    """

    name: str
    search: Search
    found: Found

    @property
    def peak_bytes(self) -> int:
        solution = self.found.solved[0].solution
        return int(solution.peak if self.found.fits else solution.smallest_peak)


@dataclass(slots=True, eq=False)
class Explorer:
    """Variants that hold less memory than the program as it is.

    Attributes:
      search: of the program as it is.
      first: what was found of that.
      may_cut, may_recompute: whether micro-batches, and recompute, are free to choose.
      has_wish: the program says `jax.checkpoint`.
      tried: all that was searched.
    """

    search: Search
    first: Found
    may_cut: bool
    may_recompute: bool
    has_wish: bool
    tried: list[Tried] = field(default_factory=list)

    @property
    def has_more(self) -> bool:
        """Whether other variants may be faster, or fit."""
        if self.may_recompute and self.has_wish:
            return True
        return self.may_cut and self.first.is_bound_by_memory

    def best(self) -> tuple[Search, Found | None]:
        """The search of the best variant, and what it found, where that is known.

        Raises:
          InfeasiblePlanError: nothing fits.
        """
        self.tried.append(Tried("as written", self.search, self.first))
        if self.may_recompute and self.has_wish:
            self._try("nothing made again", [KEPT_INSTEAD])
        if all(t.found.is_bound_by_memory for t in self.tried) and self.may_cut:
            for tried in self._cut_in_time():
                if not tried.found.is_bound_by_memory:
                    break
        best = min(self.tried, key=lambda t: t.found.step_s)
        if not best.found.fits:
            raise self._nothing_fits()
        found = self.first if best.search is self.search else None
        return best.search, found

    def variants(self) -> tuple[Variant, ...]:
        best_s = min(t.found.step_s for t in self.tried)
        return tuple(
            Variant(
                t.name, t.found.step_s, t.peak_bytes, is_chosen=t.found.step_s == best_s
            )
            for t in self.tried
        )

    def _cut_in_time(self) -> Iterator[Tried]:
        """More and more micro-batches, while that is of use."""
        for count in self._counts():
            best_s = min(t.found.step_s for t in self.tried)
            tried = self._try(f"{count} micro-batches", [cut_in(count)])
            if tried is None:
                return
            yield tried
            if math.isfinite(best_s) and tried.found.step_s >= best_s:
                return

    def _counts(self) -> Iterator[int]:
        traced = self.search.running
        for k in range(1, MOST_COUNTS + 1):
            cut = may_cut(traced.closed_jaxpr, traced.program, 2**k)
            if isinstance(cut, MicrobatchError) or 2**k > cut.rows:
                return
            yield 2**k

    def _try(self, name: str, transforms: list[Transform]) -> Tried | None:
        if time.monotonic() > self.search.request.deadline:
            return None
        try:
            search = self.search.after(transforms)
        except MicrobatchError:
            return None
        if self.first.fits:
            search = search.on(self._mesh_axes())
        tried = Tried(
            name, search, search.asking(level="fast", has_recipes=False).find()
        )
        self.tried.append(tried)
        return tried

    def _mesh_axes(self) -> tuple[tuple[str, int], ...]:
        axes = self.first.solved[0].mesh_problem.model.mesh.axes
        return tuple((a.name, a.size) for a in axes)

    def _nothing_fits(self) -> InfeasiblePlanError:
        """The error of the variant that comes nearest to the budget."""
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
