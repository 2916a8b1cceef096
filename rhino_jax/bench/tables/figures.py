"""Figures of a whole suite: accuracy of predictions, and quality of plans."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import correlation, geometric_mean
from typing import TypeVar

import numpy as np

from rhino_jax.bench.records import FINAL, Result
from rhino_jax.units import format_seconds


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors of a prediction, |predicted - compiled| / compiled.

    Attributes:
      median, high, worst: the median, 95th percentile and largest over all programs;
        None if there are none.
      worst_cell: the cell with the largest error.
    """

    median: float | None
    high: float | None
    worst: float | None
    worst_cell: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """Accuracy of predictions against compiled programs, of rhino's plans and recipes.

    Attributes:
      programs: number of different compiled programs that fit, each counted once.
      wire, peak, step: errors of bytes on the wire, of peak memory, of step time.
      unpredicted: target → the largest share of a compiled peak that was not predicted,
        as `reserve_share` of a hardware file; 0 if predictions are never too low.
      rank_correlation: target → Spearman correlation of predicted with compiled step
        time; None for fewer than three programs.
    """

    programs: int
    wire: Errors
    peak: Errors
    step: Errors
    unpredicted: dict[str, float]
    rank_correlation: dict[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """One of rhino's plans on one row, against the best recipe that fits there.

    Attributes:
      workload, regime, target, mesh: the row.
      method: "fast", "best" or "refined".
      recipe: the fastest compiled recipe that fits; empty if none does.
      ratio: compiled step time over that recipe's; below 1 is faster. None if either
        does not fit.
      fits: whether the plan fits.
    """

    workload: str
    regime: str
    target: str
    mesh: dict[str, int]
    method: str
    recipe: str
    ratio: float | None
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """All figures of a suite.

    Attributes:
      fidelity: accuracy of predictions.
      quality: quality of each of rhino's plans on every row.
      only_rhino_fits, only_recipes_fit: rows (as text) and method.
      rematerialised: number of values in rhino's plans; `recipes_rematerialised`: in
        recipes.
      failed: number of cells that timed out, died or raised.
    """

    fidelity: Fidelity
    quality: tuple[Quality, ...]
    only_rhino_fits: tuple[str, ...]
    only_recipes_fit: tuple[str, ...]
    rematerialised: int
    recipes_rematerialised: int
    failed: int

    def ratios(self, regime: str = "") -> dict[str, list[float]]:
        """Return method → its ratios to the best recipes, of rows with a batch."""
        return by_name(
            (q.method, q.ratio)
            for q in self.quality
            if q.ratio is not None and regime in ("", q.regime)
        )


def figures_of(results: Sequence[Result]) -> Figures:
    """Return the figures of a suite's results."""
    quality = tuple(_quality(results))
    return Figures(
        fidelity=fidelity_of(results),
        quality=quality,
        only_rhino_fits=tuple(_name(q) for q in quality if q.fits and not q.recipe),
        only_recipes_fit=tuple(_name(q) for q in quality if q.recipe and not q.fits),
        rematerialised=_total(r for r in results if not r.is_recipe),
        recipes_rematerialised=_total(r for r in results if r.is_recipe),
        failed=sum(r.status in ("timeout", "died", "error") for r in results),
    )


def fidelity_of(results: Iterable[Result]) -> Fidelity:
    """Return errors over all programs that compiled and fit; a program counts once."""
    programs: dict[tuple[str, str], Result] = {}
    for r in results:
        if r.fits and r.predicted is not None and r.compiled is not None:
            programs.setdefault((r.target, r.program or r.key), r)
    kept = list(programs.values())
    by_target = by_name((r.target, r) for r in kept)
    return Fidelity(
        programs=len(kept),
        wire=_errors(kept, "wire_bytes"),
        peak=_errors(kept, "peak_bytes"),
        step=_errors(kept, "step_time_s"),
        unpredicted={t: max(map(_unpredicted, rs)) for t, rs in by_target.items()},
        rank_correlation={
            target: spearman(
                *([getattr(r, side).step_time_s for r in rs] for side in _SIDES)
            )
            for target, rs in by_target.items()
        },
    )


_SIDES = ("predicted", "compiled")


def by_name(pairs: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
    """Return the values of each name, in the order in which names occur first."""
    found: dict[str, list[T]] = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return found


def _unpredicted(result: Result) -> float:
    assert result.predicted is not None and result.compiled is not None
    predicted, compiled = result.predicted.peak_bytes, result.compiled.peak_bytes
    if not predicted or not compiled:
        return 0.0
    return max(0.0, 1 - predicted / compiled)


def relative_error(predicted: float, compiled: float) -> float:
    """Return |predicted - compiled| / compiled; infinite if only `compiled` is zero."""
    if predicted == compiled:
        return 0.0
    return abs(predicted - compiled) / compiled if compiled else math.inf


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation; equal values share their mean rank.

    Returns:
      In [-1, 1]; None for fewer than three pairs, or if one side is constant.
    """
    if len(a) < 3 or len({*a}) == 1 or len({*b}) == 1:
        return None
    return correlation(_ranks(a), _ranks(b))


def format_span(values: Sequence[float]) -> str:
    """Format positive numbers as `0.90 to 1.20 (geometric mean 1.03)`."""
    mean = geometric_mean(values)
    return f"{min(values):.2f} to {max(values):.2f} (geometric mean {mean:.2f})"


def format_seconds_span(values: Sequence[float]) -> str:
    """Format seconds as `3.00 ms to 2.50 s`: the least and the most."""
    return f"{format_seconds(min(values))} to {format_seconds(max(values))}"


def format_ms(seconds: float | None) -> str:
    """Format seconds in milliseconds; empty for None."""
    return "" if seconds is None else f"{1e3 * seconds:.3g}"


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(bisect_left(ordered, x) + bisect_right(ordered, x)) / 2 for x in values]


def _errors(results: Sequence[Result], quantity: str) -> Errors:
    if not results:
        return Errors(median=None, high=None, worst=None)
    found = [
        relative_error(*(getattr(getattr(r, side), quantity) for side in _SIDES))
        for r in results
    ]
    at = int(np.argmax(found))
    worst = results[at]
    return Errors(
        median=float(np.median(found)),
        high=float(np.quantile(found, 0.95)),
        worst=found[at],
        worst_cell=f"{worst.workload} on {worst.target}, {worst.method}",
    )


def best_recipe(results: Iterable[Result]) -> Result | None:
    """Return the fastest compiled recipe that fits in a row; None without one."""
    fitting = [r for r in results if r.fits and r.is_recipe]
    return min(fitting, key=lambda r: r.step_s, default=None)


def by_row(results: Iterable[Result]) -> Collection[list[Result]]:
    """Return the results of each row."""
    return by_name((r.row, r) for r in results).values()


def _quality(results: Sequence[Result]) -> Iterable[Quality]:
    for cells in by_row(results):
        recipes = [r for r in cells if r.is_recipe]
        if not recipes or not all(r.status in FINAL for r in recipes):
            # Without all recipes compiled, neither speed nor fit can be compared.
            continue
        best = best_recipe(recipes)
        for r in cells:
            if r.is_recipe or r.status not in FINAL:
                continue
            yield Quality(
                workload=r.workload,
                regime=r.regime,
                target=r.target,
                mesh=dict(r.mesh),
                method=r.method,
                recipe="" if best is None else best.method,
                ratio=r.step_s / best.step_s if best and r.fits else None,
                fits=r.fits,
            )


def _total(results: Iterable[Result]) -> int:
    """Return the number of rematerialised values over different programs."""
    programs = {(r.target, r.program): r.rematerialised or 0 for r in results}
    return sum(programs.values())


def _name(q: Quality) -> str:
    return f"{q.workload} ({q.regime}) on {q.target}: {q.method}"
