"""A cut problem as integers, nanoseconds and bytes, and the cost of a cut of it.

With integers, dynamic programming, CP-SAT and cost functions agree exactly.

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

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from rhino_jax.pipeline.cut.ops import CutProblem, CutValue, StageCut


NS = 1e9

NO_LIMIT = 2**62


@dataclass(frozen=True)
class CutArrays:
    """Arrays for n ops, V values, P parameters with several readers, S stages.

    Attributes:
      op_ns: forward and backward time of ops by stage, [n, S].
      activation_bytes: residuals of ops for one micro-batch, [n].
      own_bytes: bytes of the parameters that one op alone reads, [n].
      sources: op that computes each value, [V].
      readers: sorted, distinct readers of each value.
      value_bytes: bytes of values, forward and backward, [V, 2].
      value_ns: time of values over every hop, forward and backward, [V, S - 1, 2].
      shared: readers of each parameter with several.
      shared_bytes: bytes of these parameters, [P].
      shared_ns: time of their gradients over every hop, once a step, both directions,
        [P, S - 1].
      latency_ns: latency of every hop, one way, [S - 1].
      in_flight: micro-batches in flight at every stage, [S].
      round_trips: micro-batches in flight, if the next one has to wait for their
        gradients; 0 if it does not, [S].
      limit_bytes: memory limit of every stage's devices, [S].
      micro_batches: number of micro-batches, m.
      pins: pinned stage of every op, or -1, [n].
      chains: see `CutProblem.chains`.
    """

    op_ns: np.ndarray
    activation_bytes: np.ndarray
    own_bytes: np.ndarray
    sources: np.ndarray
    readers: tuple[tuple[int, ...], ...]
    value_bytes: np.ndarray
    value_ns: np.ndarray
    shared: tuple[tuple[int, ...], ...]
    shared_bytes: np.ndarray
    shared_ns: np.ndarray
    latency_ns: np.ndarray
    in_flight: np.ndarray
    round_trips: np.ndarray
    limit_bytes: np.ndarray
    micro_batches: int
    pins: np.ndarray
    chains: tuple[tuple[tuple[int, ...], ...], ...] = ()

    @cached_property
    def ends(self) -> tuple[list[list[int]], list[list[int]]]:
        """By op the values that it computes, and those that it reads."""
        made: list[list[int]] = [[] for _ in range(self.count)]
        read: list[list[int]] = [[] for _ in range(self.count)]
        for v, readers in enumerate(self.readers):
            made[self.sources[v]].append(v)
            for reader in readers:
                read[reader].append(v)
        return made, read

    @property
    def is_movable(self) -> np.ndarray:
        """Boolean array, [n]: ops that share no parameter and are neither pinned nor in
        chains."""
        found = self.pins < 0
        found[[op for chain in self.chains for link in chain for op in link]] = False
        found[[op for readers in self.shared for op in readers]] = False
        return found

    @property
    def count(self) -> int:
        return len(self.op_ns)

    @property
    def stages(self) -> int:
        return self.op_ns.shape[1]

    @property
    def least_work_ns(self) -> int:
        """Lower bound on the total time of all stages."""
        return int(self.op_ns.min(axis=1).sum())

    @property
    def least_bottleneck_ns(self) -> int:
        """Lower bound on the time of the slowest stage."""
        return -(-self.least_work_ns // self.stages)

    @property
    def most_pace_ns(self) -> int:
        """Upper bound on the time of any stage or hop, and of all together."""
        work = int(self.op_ns.max(axis=1).sum()) + self.base_ns
        return work + int(self.value_ns.sum())

    @property
    def base_ns(self) -> int:
        """Latency of all hops, whatever is sent."""
        return 2 * int(self.latency_ns.sum())


def numbers_of(problem: CutProblem) -> CutArrays:
    ops, hops = problem.ops, problem.hops
    seconds = np.array([o.forward_s + o.backward_s for o in ops.ops])
    speeds = np.array([g.speed for g in problem.groups])
    own = np.zeros(len(ops.ops), np.int64)
    shared = []
    for parameter in ops.parameters:
        readers = tuple(sorted(set(parameter.readers)))
        if len(readers) == 1:
            own[readers[0]] += parameter.held_bytes
        elif readers:
            shared.append((readers, parameter))
    values = [v for v in ops.values if v.readers]
    for before, after in (pair for chain in problem.chains for pair in pairwise(chain)):
        values.append(CutValue(max(before), tuple(after), 0))
    sizes = _ints([(v.forward_bytes, v.backward_bytes) for v in values], (-1, 2))
    gradients = _ints([p.gradient_bytes for _, p in shared], (-1,))
    rates = np.array([h.bytes_per_s for h in hops])
    pins = np.full(len(ops.ops), -1)
    for op, stage in problem.pins.items():
        pins[op] = stage
    in_flight = _ints(problem.in_flight, (-1,))
    has_backward = any(op.backward_s for op in ops.ops)
    waits = has_backward & (in_flight < problem.micro_batches)
    return CutArrays(
        op_ns=_ns(seconds[:, None] / speeds),
        activation_bytes=_ints([o.activation_bytes for o in ops.ops], (-1,)),
        own_bytes=own,
        sources=_ints([v.source for v in values], (-1,)),
        readers=tuple(tuple(sorted(set(v.readers))) for v in values),
        value_bytes=sizes,
        value_ns=_ns(sizes[:, None, :] / rates[None, :, None]),
        shared=tuple(readers for readers, _ in shared),
        shared_bytes=_ints([p.held_bytes for _, p in shared], (-1,)),
        shared_ns=_ns(2 * gradients[:, None] / rates[None, :]),
        latency_ns=_ns(np.array([h.latency_s for h in hops])),
        in_flight=in_flight,
        round_trips=np.where(waits, in_flight, 0),
        limit_bytes=_ints(
            [
                NO_LIMIT if g.limit_bytes is None else g.limit_bytes
                for g in problem.groups
            ],
            (-1,),
        ),
        micro_batches=problem.micro_batches,
        pins=pins,
        chains=problem.chains,
    )


def _ns(seconds: np.ndarray) -> np.ndarray:
    return np.rint(seconds * NS).astype(np.int64)


def _ints(values: object, shape: tuple[int, ...]) -> np.ndarray:
    return np.array(values, np.int64).reshape(shape)


@dataclass(frozen=True, slots=True)
class ReadGraph:
    """Dependencies between nodes.

    Attributes:
      before: by node, the nodes that it reads.
      after: by node, the nodes that read it.
    """

    before: tuple[frozenset[int], ...]
    after: tuple[frozenset[int], ...]

    @classmethod
    def of_edges(cls, count: int, edges: Iterable[tuple[int, int]]) -> ReadGraph:
        before: list[set[int]] = [set() for _ in range(count)]
        after: list[set[int]] = [set() for _ in range(count)]
        for source, reader in edges:
            after[source].add(reader)
            before[reader].add(source)
        return cls(tuple(map(frozenset, before)), tuple(map(frozenset, after)))

    @classmethod
    def of(cls, numbers: CutArrays) -> ReadGraph:
        pairs = zip(numbers.sources, numbers.readers, strict=True)
        edges = ((int(s), reader) for s, readers in pairs for reader in readers)
        return cls.of_edges(numbers.count, edges)

    def by_key(self, key: Sequence[float]) -> tuple[int, ...]:
        """Return the topological order that always takes the ready node of smallest
        key."""
        missing = [len(b) for b in self.before]
        ready = [(key[op], op) for op, count in enumerate(missing) if not count]
        heapq.heapify(ready)
        order = []
        while ready:
            _, op = heapq.heappop(ready)
            order.append(op)
            for reader in self.after[op]:
                missing[reader] -= 1
                if not missing[reader]:
                    heapq.heappush(ready, (key[reader], reader))
        return tuple(order)

    def orders(self) -> list[tuple[int, ...]]:
        """Return distinct topological orders: as numbered, early, late, depth-first.

        Nodes are numbered in a topological order.
        """
        count = len(self.before)
        rise, fall = [0] * count, [0] * count
        for op in range(count):
            rise[op] = 1 + max((rise[b] for b in self.before[op]), default=-1)
        for op in reversed(range(count)):
            fall[op] = min((fall[a] - 1 for a in self.after[op]), default=0)
        numbered = tuple(range(count))
        found = (numbered, self.by_key(rise), self.by_key(fall), self._depth_first())
        return list(dict.fromkeys(found))

    def _depth_first(self) -> tuple[int, ...]:
        """Return the order in which each node's dependencies come right before it."""
        order: list[int] = []
        seen = [False] * len(self.before)
        todo = [(op, False) for op in range(len(self.before))]
        while todo:
            op, is_done = todo.pop()
            if is_done:
                order.append(op)
            elif not seen[op]:
                seen[op] = True
                todo.append((op, True))
                todo += [(b, False) for b in sorted(self.before[op], reverse=True)]
        return tuple(order)


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


def cut_of(numbers: CutArrays, stages: np.ndarray, bound_ns: int = 0) -> StageCut:
    """Return a cut with its cost, in seconds."""
    found = price(numbers, stages)
    return StageCut(
        stages=tuple(map(int, stages)),
        step_time_s=found.step_time_ns / NS,
        held_bytes=tuple(map(int, found.held_bytes)),
        bound_s=bound_ns / NS,
    )
