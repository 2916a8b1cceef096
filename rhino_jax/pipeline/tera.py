"""Slices of causal sequences, of unequal lengths, that fill a pipeline.

A slice reads what came before it, so that later slices take longer: equal lengths are
not equal times. All stages alike, K of them run slices of t_1 … t_n seconds in
sum(t) + (K - 1) max(t).

Source: Li et al., "TeraPipe: token-level pipeline parallelism for training large-scale
language models" (arXiv 2102.07988), section 3.3. There every value of max(t) is tried;
here only those that some best sum has, from the largest on, which gives the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rhino_jax.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class Part:
    """Some samples of a batch that run together.

    Attributes:
      samples: how many.
      lengths: of its slices, in units of the sequence, first to last.
    """

    samples: int
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slices:
    """How a batch runs through the pipeline.

    Attributes:
      parts: one after another.
      sum_s: of all slices, on one stage.
      longest_s: of one slice.
      step_time_s: of all stages.
    """

    parts: tuple[Part, ...]
    sum_s: float
    longest_s: float
    step_time_s: float


def causal_times(
    units: int, *, fixed_s: float = 0.0, unit_s: float = 0.0, pair_s: float = 0.0
) -> np.ndarray:
    """Seconds of slices by a formula, as TeraPipe fits it to measured ones.

    Args:
      units: that a sequence may be cut into.
      fixed_s: of any slice, as for starting kernels.
      unit_s: for every unit, as of matrix products.
      pair_s: for every unit and each that it attends to: those before the slice, and
        half of those in it.

    Shapes:
      result: [units before, units in the slice], both from 0 to units
    """
    before = np.arange(units + 1)[:, None]
    inside = np.arange(units + 1)[None, :]
    pairs = before * inside + inside * (inside + 1) / 2
    return fixed_s + unit_s * inside + pair_s * pairs


def slice_sequence(
    times_s: np.ndarray, stages: int, repeats: int = 1, count: int | None = None
) -> Slices:
    """The best slices of one sequence, or of several that are alike.

    Args:
      times_s: of a slice on one stage, forward and backward.
      stages: K.
      repeats: micro-batches, each cut in the same way.
      count: how many slices of each; any number unless said.

    Shapes:
      times_s: [units before, units in the slice], both from 0 to the whole sequence
    """
    return slice_batch({1: times_s}, repeats, stages, count)


def slice_batch(
    times_s: Mapping[int, np.ndarray],
    batch: int,
    stages: int,
    count: int | None = None,
) -> Slices:
    """The best parts of a batch, and slices of each.

    Exact: of all choices whose longest slice is below a limit the least sum is found,
    by dynamic programming; then the limit goes below what that one's longest is.

    Args:
      times_s: samples of a part → seconds of its slices, as in `slice_sequence`.
      batch: samples.
      stages: K.
      count: slices of every part; any number unless said.

    Raises:
      ScheduleError: where parts of these sizes cannot make up the batch, or sequences
        have fewer units than they are to have slices.
    """
    costs = {size: _by_ends(times) for size, times in times_s.items()}
    best: Slices | None = None
    limit = np.inf
    shortest = min(map(_least_longest, costs.values()))
    while True:
        found = _least_sum(costs, batch, limit, count)
        if found is None:
            break
        parts, total, longest = found
        step_time_s = total + (stages - 1) * longest
        if best is None or step_time_s < best.step_time_s:
            best = Slices(parts, total, longest, step_time_s)
        # Lower limits have larger sums, and no slice is shorter than `shortest`.
        if total + (stages - 1) * shortest >= best.step_time_s:
            break
        limit = np.nextafter(longest, -np.inf)
    if best is None:
        raise ScheduleError(
            "No parts make up the batch.",
            where=f"sizes {sorted(times_s)}",
            numbers=f"batch {batch}"
            + (f", {count} slices of every sequence" if count else ""),
            fix="add times of a part of 1 sample, or take fewer slices.",
        )
    return best


def _by_ends(times_s: np.ndarray) -> np.ndarray:
    """[first unit, end] in place of [units before, units in it]; ∞ for no slice."""
    units = len(times_s) - 1
    start, end = np.indices((units + 1, units + 1))
    costs = times_s[start, np.maximum(end - start, 0)].astype(float)
    costs[end <= start] = np.inf
    return costs


def _least_longest(costs: np.ndarray) -> float:
    """What the longest slice takes at least."""
    best = np.full(len(costs), np.inf)
    best[0] = -np.inf
    for end in range(1, len(costs)):
        best[end] = np.maximum(best[:end], costs[:end, end]).min()
    return float(best[-1])


def _least_sum(
    costs: Mapping[int, np.ndarray], batch: int, limit: float, count: int | None
) -> tuple[tuple[Part, ...], float, float] | None:
    """Parts, sum and longest of the least sum without a slice above the limit."""
    sliced = {
        size: found
        for size, of_size in costs.items()
        if (found := _shortest_path(of_size, limit, count)) is not None
    }
    total = [0.0] + [np.inf] * batch
    last = [0] * (batch + 1)
    for done in range(1, batch + 1):
        for size, (_, seconds) in sliced.items():
            if size <= done and total[done - size] + seconds < total[done]:
                total[done], last[done] = total[done - size] + seconds, size
    if total[batch] == np.inf:
        return None
    parts, left = [], batch
    while left:
        parts.append(Part(last[left], sliced[last[left]][0]))
        left -= last[left]
    longest = max(
        costs[p.samples][end - n, end]
        for p in parts
        for n, end in zip(p.lengths, np.cumsum(p.lengths), strict=True)
    )
    return tuple(parts), float(total[batch]), float(longest)


def _shortest_path(
    costs: np.ndarray, limit: float, count: int | None = None
) -> tuple[tuple[int, ...], float] | None:
    """Lengths and sum of the slices with the least sum, none above the limit."""
    allowed = np.where(costs <= limit, costs, np.inf)
    units = len(costs) - 1
    if count is not None:
        return _path_of(allowed, units, count)
    best = np.full(units + 1, np.inf)
    best[0] = 0.0
    start = np.zeros(units + 1, int)
    for end in range(1, units + 1):
        sums = best[:end] + allowed[:end, end]
        start[end] = sums.argmin()
        best[end] = sums[start[end]]
    if best[units] == np.inf:
        return None
    lengths, end = [], units
    while end:
        lengths.append(int(end - start[end]))
        end = int(start[end])
    return tuple(lengths[::-1]), float(best[units])


def _path_of(
    allowed: np.ndarray, units: int, count: int
) -> tuple[tuple[int, ...], float] | None:
    """The same of so many slices."""
    best = np.full(units + 1, np.inf)
    best[0] = 0.0
    starts = []
    for _ in range(count):
        sums = best[:, None] + allowed
        starts.append(sums.argmin(0))
        best = sums.min(0)
    if best[units] == np.inf:
        return None
    lengths, end = [], units
    for start in reversed(starts):
        lengths.append(int(end - start[end]))
        end = int(start[end])
    return tuple(lengths[::-1]), float(best[units])
