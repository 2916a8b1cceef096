"""The independent checker: cost and memory of a choice, in exact integers.

It shares nothing with the solver but the instance as read from the file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rhino_jax.contest.errors import InstanceError
from rhino_jax.contest.instance import FORBIDDEN, Instance


@dataclass(frozen=True, slots=True)
class Checked:
    """Recomputed cost and memory of a choice.

    Attributes:
      objective: costs of nodes and edges together.
      peak: largest memory in use at any time.
      peak_time: the first time at which that much is in use.
      forbidden: number of nodes and edges whose cost forbids the choice.
      fits: whether the memory stays within the limit at every time, and nothing is
        forbidden.
    """

    objective: int
    peak: int
    peak_time: int
    forbidden: int
    fits: bool


def check(instance: Instance, choices: Sequence[int]) -> Checked:
    """Recompute objective and memory.

    Raises:
      InstanceError: the choices are not one valid strategy of every node.
    """
    if len(choices) != len(instance.costs):
        raise InstanceError(
            "`check`: there is not one choice per node.",
            numbers=f"{len(choices)} choices, {len(instance.costs)} nodes",
            fix="give a list with one index per node.",
        )
    for i, k in enumerate(choices):
        if not 0 <= k < len(instance.costs[i]):
            raise InstanceError(
                f"`check`: node {i} has no such strategy.",
                numbers=f"choice {k}, {len(instance.costs[i])} strategies",
                fix="strategies are counted from 0.",
            )
    paid = [cost[k] for cost, k in zip(instance.costs, choices, strict=True)]
    for (i, j), table in zip(instance.edges, instance.tables, strict=True):
        paid.append(table[choices[i] * len(instance.costs[j]) + choices[j]])
    change: dict[int, int] = defaultdict(int)
    for (start, stop), usage, k in zip(
        instance.intervals, instance.usages, choices, strict=True
    ):
        if start < stop:
            change[start] += usage[k]
            change[stop] -= usage[k]
    peak = peak_time = held = 0
    for time in sorted(change):
        held += change[time]
        if held > peak:
            peak, peak_time = held, time
    forbidden = sum(cost >= FORBIDDEN for cost in paid)
    fits = peak <= instance.limit and not forbidden
    return Checked(sum(paid), peak, peak_time, forbidden, fits)
