"""Sequence slices of unequal lengths that fill a pipeline (TeraPipe).

In causal attention a slice reads the slices before it, so that later slices take
longer: equal lengths are not equal times. K equal stages run slices of t_1 … t_n
seconds in sum(t) + (K - 1) max(t).

Source: Li et al., "TeraPipe: token-level pipeline parallelism for training large-scale
language models" (arXiv 2102.07988), section 3.3. The source tries every value of
max(t); here only those of optimal sums are tried, from the largest on, which gives the
same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rhino_jax.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class SequenceSlices:
    """The division of sequences into slices, and its predicted time.

    Attributes:
      lengths: lengths of a sequence's slices, first to last, in units of the sequence.
      sum_s: seconds of all slices of all sequences, on one stage.
      longest_s: seconds of the longest slice.
      step_time_s: seconds of a step over all stages.
    """

    lengths: tuple[int, ...]
    sum_s: float
    longest_s: float
    step_time_s: float


def slice_sequence(
    times_s: np.ndarray, stages: int, repeats: int = 1, count: int | None = None
) -> SequenceSlices:
    """Return the best slices of a sequence, or of several of equal length.

    Exact: dynamic programming finds the smallest sum of all slicings whose longest
    slice is below a limit; then the limit is lowered below that slicing's longest
    slice.

    Args:
      times_s: seconds of a slice on one stage, forward and backward.
      stages: number of stages, K.
      repeats: number of micro-batches, all with the same slices.
      count: number of slices of a sequence; None: any number.

    Shapes:
      times_s: [units before, units in the slice], both from 0 to the whole sequence

    Raises:
      ScheduleError: sequences have fewer units than `count`.
    """
    # Seconds of a slice by its first unit and its end.
    size = len(times_s)
    start, end = np.indices((size, size))
    costs = times_s[start, np.maximum(end - start, 0)].astype(float)
    costs[end <= start] = np.inf
    # The longest slice up to every end, of the slices in which it is shortest.
    least = np.full(size, np.inf)
    least[0] = -np.inf
    for at in range(1, size):
        least[at] = np.maximum(least[:at], costs[:at, at]).min()
    best: SequenceSlices | None = None
    limit, shortest = np.inf, float(least[-1])
    while (found := _shortest_path(costs, limit, count)) is not None:
        lengths, seconds = found
        ends = np.cumsum(lengths)
        longest = float(costs[ends - lengths, ends].max())
        total = repeats * seconds
        step_time_s = total + (stages - 1) * longest
        if best is None or step_time_s < best.step_time_s:
            best = SequenceSlices(lengths, total, longest, step_time_s)
        # Lower limits have larger sums, and no longest slice is below `shortest`.
        if total + (stages - 1) * shortest >= best.step_time_s:
            break
        limit = np.nextafter(longest, -np.inf)
    if best is None:
        raise ScheduleError(
            f"sequences are too short for {count} slices.",
            where="`schedule=`",
            numbers=f"{size - 1} units, of which slices are made",
            fix="take fewer slices.",
        )
    return best


def _shortest_path(
    costs: np.ndarray, limit: float, count: int | None
) -> tuple[tuple[int, ...], float] | None:
    """Return lengths and sum of the cheapest slices, none above the limit.

    Args:
      costs: costs of slices by first unit and end.
      limit: largest cost of a slice.
      count: number of slices; None: any number.
    """
    allowed = np.where(costs <= limit, costs, np.inf)
    units = len(costs) - 1
    best = np.full(units + 1, np.inf)
    best[0] = 0.0
    # By number of slices, and by end, the start of the last slice.
    starts: list[np.ndarray] = []
    for _ in range(count or 0):
        sums = best[:, None] + allowed
        starts.append(sums.argmin(0))
        best = sums.min(0)
    if count is None:
        starts = [np.zeros(units + 1, int)] * units
        for end in range(1, units + 1):
            sums = best[:end] + allowed[:end, end]
            starts[0][end] = sums.argmin()
            best[end] = sums.min()
    if best[units] == np.inf:
        return None
    lengths, end = [], units
    while end:
        start = int(starts.pop()[end])
        lengths.append(end - start)
        end = start
    return tuple(lengths[::-1]), float(best[units])
