"""Contraction of ops that stay in one stage, so that cuts of fewer nodes are searched.

Exact: some optimal cut satisfies all of these.

- An op without work, activations or parameters is in the stage of its operand, if that
  is a single value that is not smaller than all the op's results and that has no other
  reader; or if the op's results have no readers.
- Such an op is in the stage of its only reader, if its results are not smaller than its
  operands.
- A value stays in one stage, if any cut that sends it over a hop takes at least as long
  as a known cut.
- The ops of a link of a chain are in one stage.
- All ops between two ops of one stage are in that stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from rhino_jax.pipeline.cut.numbers import CutArrays, ReadGraph


@dataclass(frozen=True)
class Contracted:
    """A contracted problem.

    Attributes:
      numbers: the problem of its nodes, in a topological order.
      node_of: node of every op of the original problem.
    """

    numbers: CutArrays
    node_of: np.ndarray

    def expand(self, stages: np.ndarray) -> np.ndarray:
        """Return stages of ops from stages of nodes."""
        return stages[self.node_of]


def contract(numbers: CutArrays, known_ns: int | None = None) -> Contracted:
    """Merge ops that stay in one stage.

    Args:
      numbers: the cut problem.
      known_ns: step time of a known cut; cuts that the contraction excludes are no
        faster. None: no cut is known.
    """
    node_of = np.arange(numbers.count)
    links = [pair for chain in numbers.chains for k in chain for pair in pairwise(k)]
    heavy = [] if known_ns is None else _too_heavy(numbers, known_ns)
    pairs = links + heavy
    if _sets_pins_against(numbers, pairs):
        pairs = links
    while True:
        pairs += _idle_pairs(numbers)
        merged = _merge(numbers, pairs)
        if merged.numbers.count == numbers.count:
            return Contracted(merged.numbers, merged.node_of[node_of])
        numbers, node_of = merged.numbers, merged.node_of[node_of]
        pairs = []


def _too_heavy(numbers: CutArrays, known_ns: int) -> list[tuple[int, int]]:
    """Return (source, reader) of values that no faster cut sends over any hop."""
    if numbers.stages < 2:
        return []
    least = numbers.least_work_ns + numbers.base_ns
    steady = numbers.micro_batches - 1
    slowest = (numbers.value_ns + numbers.latency_ns[None, :, None]).max(axis=2)
    pace = np.maximum(slowest, numbers.least_bottleneck_ns)
    takes = (least + numbers.value_ns.sum(axis=2) + steady * pace).min(axis=1)
    return [
        (int(numbers.sources[v]), reader)
        for v, readers in enumerate(numbers.readers)
        if takes[v] >= known_ns
        for reader in readers
    ]


def _sets_pins_against(numbers: CutArrays, pairs: list[tuple[int, int]]) -> bool:
    """Whether merging `pairs` would contradict pins or chains.

    That is, a node would have ops that are pinned to different stages, or of different
    links of a chain.
    """
    merged = _merge(numbers, pairs)
    node_of = merged.node_of
    for chain in merged.numbers.chains:
        if len({node for link in chain for node in link}) < sum(map(len, chain)):
            return True
    is_pinned = numbers.pins >= 0
    found = np.stack([node_of[is_pinned], numbers.pins[is_pinned]])
    return len(np.unique(found, axis=1).T) > len(np.unique(found[0]))


def _idle_pairs(numbers: CutArrays) -> list[tuple[int, int]]:
    """Return (op without work, op whose stage it shares)."""
    made, read = numbers.ends
    is_idle = (numbers.op_ns == 0).all(axis=1) & numbers.is_movable
    is_idle &= (numbers.activation_bytes == 0) & (numbers.own_bytes == 0)
    # Bytes and times of values, concatenated: a value is smaller if all entries are.
    sizes = np.concatenate(
        [numbers.value_bytes, *np.moveaxis(numbers.value_ns, 1, 0)],
        axis=1,
    )
    pairs = []
    for op in map(int, np.flatnonzero(is_idle)):
        all_made = sizes[made[op]].sum(axis=0)
        readers = {r for v in made[op] for r in numbers.readers[v]}
        if (
            len(read[op]) == 1
            and (numbers.readers[read[op][0]] == (op,) or not made[op])
            and (all_made <= sizes[read[op][0]]).all()
        ):
            pairs.append((op, int(numbers.sources[read[op][0]])))
        elif len(readers) == 1 and (sizes[read[op]].sum(axis=0) <= all_made).all():
            pairs.append((op, min(readers)))
    return pairs


def _merge(numbers: CutArrays, pairs: list[tuple[int, int]]) -> Contracted:
    """Merge both ops of every pair, and all ops between them, into one node."""
    edges: list[list[int]] = [[] for _ in range(numbers.count)]
    for v, readers in enumerate(numbers.readers):
        edges[numbers.sources[v]] += readers
    for a, b in pairs:
        edges[a].append(b)
        edges[b].append(a)
    node_of = np.array(_components(edges))
    count = int(node_of.max()) + 1

    def summed(of_ops: np.ndarray) -> np.ndarray:
        total = np.zeros((count, *of_ops.shape[1:]), of_ops.dtype)
        np.add.at(total, node_of, of_ops)
        return total

    pins = np.full(count, -1)
    np.maximum.at(pins, node_of, numbers.pins)
    own = summed(numbers.own_bytes)
    shared = [tuple(sorted({int(node_of[r]) for r in rs})) for rs in numbers.shared]
    for p, nodes in enumerate(shared):
        if len(nodes) == 1:
            own[nodes[0]] += numbers.shared_bytes[p]
    still = [p for p, nodes in enumerate(shared) if len(nodes) > 1]
    # Values between nodes: source and readers → the original values.
    members: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for v, readers in enumerate(numbers.readers):
        source = int(node_of[numbers.sources[v]])
        others = tuple(sorted({int(node_of[r]) for r in readers} - {source}))
        if others:
            members.setdefault((source, others), []).append(v)

    def sums(of_values: np.ndarray) -> np.ndarray:
        rows = [of_values[of].sum(axis=0) for of in members.values()]
        return np.array(rows, np.int64).reshape(len(members), *of_values.shape[1:])

    merged = replace(
        numbers,
        op_ns=summed(numbers.op_ns),
        activation_bytes=summed(numbers.activation_bytes),
        own_bytes=own,
        sources=np.array([source for source, _ in members], np.int64),
        readers=tuple(readers for _, readers in members),
        value_bytes=sums(numbers.value_bytes),
        value_ns=sums(numbers.value_ns),
        shared=tuple(shared[p] for p in still),
        shared_bytes=numbers.shared_bytes[still],
        shared_ns=numbers.shared_ns[still],
        pins=pins,
        chains=tuple(
            tuple(tuple(sorted({int(node_of[op]) for op in link})) for link in chain)
            for chain in numbers.chains
        ),
    )
    return Contracted(merged, node_of)


def _components(edges: list[list[int]]) -> list[int]:
    """Return the strongly connected component of every op, in a topological order.

    Source: Tarjan, "Depth-first search and linear graph algorithms" (SIAM 1972), which
    finds components in reverse topological order.
    """
    count = len(edges)
    index, low, component = [-1] * count, [0] * count, [-1] * count
    stack: list[int] = []
    found = step = 0
    for root in range(count):
        work = [(root, 0)] if index[root] < 0 else []
        while work:
            op, at = work.pop()
            if index[op] < 0:
                index[op] = low[op] = step
                step += 1
                stack.append(op)
            for k in range(at, len(edges[op])):
                other = edges[op][k]
                if index[other] < 0:
                    work += [(op, k), (other, 0)]
                    break
                if component[other] < 0:
                    low[op] = min(low[op], low[other])
            else:
                if low[op] == index[op]:
                    while component[op] < 0:
                        component[stack.pop()] = found
                    found += 1
    return _renumbered([found - 1 - c for c in component], edges)


def _renumbered(component: list[int], edges: list[list[int]]) -> list[int]:
    """Renumber components so that independent ones are in their original order."""
    count = max(component) + 1
    first = [len(component)] * count
    for op, c in enumerate(component):
        first[c] = min(first[c], op)
    between = (
        (component[op], component[other])
        for op, others in enumerate(edges)
        for other in others
        if component[op] != component[other]
    )
    order = ReadGraph.of_edges(count, between).by_key(first)
    number = {c: k for k, c in enumerate(order)}
    return [number[c] for c in component]
