"""Cost of a cut.

A pipeline of m micro-batches takes every stage and every hop once, for the first of
them to pass through, and then m - 1 times the bottleneck:

- the slowest stage, or one direction of the slowest hop; or
- the round trip from a stage to the last, over the number k of micro-batches that it
  has in flight: the next one waits for the first to return. So 1F1B exposes most
  transfers, and GPipe only those of the first micro-batch.

With equal stages and no transfers that is (m + S - 1) times a stage.

Source: Zheng et al., "Alpa: automating inter- and intra-operator parallelism for
distributed deep learning" (arXiv 2201.12023), section 5; hops and round trips are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rhino_jax.pipeline.cut.numbers import NS, CutArrays
from rhino_jax.pipeline.cut.ops import StageCut


@dataclass(frozen=True)
class Price:
    """The cost of one cut.

    Attributes:
      stage_ns: time of every stage for one micro-batch, [S].
      sent_ns: time of every hop, forward and backward, [S - 1, 2].
      once_ns: time of sending gradients of shared parameters, once a step.
      held_bytes: peak bytes of a device of every stage, [S].
      round_trips: see `CutArrays.round_trips`, [S].
      micro_batches: number of micro-batches, m.
    """

    stage_ns: np.ndarray
    sent_ns: np.ndarray
    once_ns: int
    held_bytes: np.ndarray
    round_trips: np.ndarray
    micro_batches: int

    @property
    def bottleneck_ns(self) -> int:
        ways = ways_ns(self.stage_ns, self.sent_ns.sum(axis=1), self.round_trips)
        return int(max(self.stage_ns.max(), self.sent_ns.max(initial=0), ways.max()))

    @property
    def step_time_ns(self) -> int:
        once = int(self.stage_ns.sum() + self.sent_ns.sum()) + self.once_ns
        return (self.micro_batches - 1) * self.bottleneck_ns + once


def price(numbers: CutArrays, stages: np.ndarray) -> Price:
    """Return the cost of a cut.

    A stage holds its parameters, its residuals and received values of every micro-batch
    in flight, and in addition one value that arrives and one gradient.
    """
    count = numbers.stages
    stage_ns = np.zeros(count, np.int64)
    np.add.at(stage_ns, stages, numbers.op_ns[np.arange(numbers.count), stages])
    left = np.zeros(count, np.int64)
    np.add.at(left, stages, numbers.activation_bytes)
    held = np.zeros(count, np.int64)
    np.add.at(held, stages, numbers.own_bytes)
    sent_ns = np.repeat(numbers.latency_ns[:, None], 2, axis=1)
    received = np.zeros((count + 1, 2), np.int64)
    for v, readers in enumerate(numbers.readers):
        first, last = stages[numbers.sources[v]], stages[list(readers)].max()
        sent_ns[first:last] += numbers.value_ns[v, first:last]
        received[first + 1 : last + 1] += numbers.value_bytes[v]
    once = 0
    for p, readers in enumerate(numbers.shared):
        among = np.unique(stages[list(readers)])
        held[among] += numbers.shared_bytes[p]
        once += int(numbers.shared_ns[p, among[0] : among[-1]].sum())
    ahead, back = received[:count, 0], received[1:, 1]
    held += numbers.in_flight * (left + ahead) + ahead + back
    m = numbers.micro_batches
    return Price(stage_ns, sent_ns, once, held, numbers.round_trips, m)


def ways_ns(
    stage_ns: np.ndarray, hop_ns: np.ndarray, round_trips: np.ndarray
) -> np.ndarray:
    """Return by stage the pace that waiting for gradients sets; 0 if it does not wait.

    Args:
      stage_ns: time of every stage, [S].
      hop_ns: time of every hop, both directions, [S - 1].
      round_trips: see `CutArrays.round_trips`, [S].
    """
    ways = np.cumsum((stage_ns + np.append(hop_ns, 0))[::-1])[::-1]
    return np.where(round_trips > 0, -(-ways // np.maximum(round_trips, 1)), 0)


def cut_of(
    numbers: CutArrays, stages: np.ndarray, bound_ns: int = 0, considered: int = 0
) -> StageCut:
    """Return a cut with its cost, in seconds."""
    found = price(numbers, stages)
    return StageCut(
        stages=tuple(map(int, stages)),
        step_time_s=found.step_time_ns / NS,
        bottleneck_s=found.bottleneck_ns / NS,
        stage_s=tuple(float(ns) / NS for ns in found.stage_ns),
        sent_s=tuple((float(a) / NS, float(b) / NS) for a, b in found.sent_ns),
        once_s=found.once_ns / NS,
        held_bytes=tuple(map(int, found.held_bytes)),
        bound_s=bound_ns / NS,
        considered=considered or numbers.count,
    )
