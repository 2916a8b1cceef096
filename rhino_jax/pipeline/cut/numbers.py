"""A cutting problem as integers: nanoseconds and bytes, by op, value and stage.

Integers, so that dynamic programming, CP-SAT and prices agree to the last digit.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rhino_jax.pipeline.cut.ops import CutProblem, CutValue


NS = 1e9

NO_LIMIT = 2**62


@dataclass(frozen=True)
class CutArrays:
    """Of n ops, V values, P parameters that several ops read, S stages.

    Attributes:
      op_ns: forward and backward, [n, S].
      activation_bytes: [n].
      own_bytes: of parameters that one op alone reads, [n].
      sources: of values, [V].
      readers: of values, each sorted and once.
      value_bytes: forward and backward, [V, 2].
      value_ns: forward and backward over every hop, [V, S - 1, 2].
      shared: readers of parameters that several ops read.
      shared_bytes: [P].
      shared_ns: over every hop, once a step, there and back, [P, S - 1].
      latency_ns: of every hop, one way, [S - 1].
      in_flight: [S].
      round_trips: micro-batches in flight, of whose gradients the next one has to wait;
        0 where it does not, [S].
      limit_bytes: [S].
      micro_batches: m.
      pins: stage of every op, or -1, [n].
      chains: as of the problem.
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

    @property
    def linked(self) -> np.ndarray:
        """Whether an op is in a chain, [n]."""
        found = np.zeros(self.count, bool)
        found[[op for chain in self.chains for link in chain for op in link]] = True
        return found

    @property
    def count(self) -> int:
        return len(self.op_ns)

    @property
    def stages(self) -> int:
        return self.op_ns.shape[1]

    @property
    def least_work_ns(self) -> int:
        """What all stages take together at least."""
        return int(self.op_ns.min(axis=1).sum())

    @property
    def least_bottleneck_ns(self) -> int:
        """What the slowest stage takes at least."""
        return -(-self.least_work_ns // self.stages)

    @property
    def most_pace_ns(self) -> int:
        """What no stage and no hop is slower than, nor all of them together."""
        work = int(self.op_ns.max(axis=1).sum()) + self.base_ns
        return work + int(self.value_ns.sum())

    @property
    def base_ns(self) -> int:
        """What hops take whatever crosses them."""
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
