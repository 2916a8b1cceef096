"""Choose which sums to defer, and how far: a minimum cut for each set of mesh axes.

Every value that can be unreduced has two nodes: that it *is* unreduced, and that all
its readers read it so. An edge between them costs the value's reduction; an op that
needs the reduced value ties the second to the sink; a linear op ties it to its result
being unreduced. The minimum cut between the ops that sum (always unreduced) and the
sink (reduced) is where the collectives go. Capacities are seconds; OR-Tools finds it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rhino_jax.ir.program import Op, Program
from rhino_jax.passes.deferred_reductions.choice import DeferredGroup, Split, can_split
from rhino_jax.passes.deferred_reductions.reach import (
    Reach,
    carried,
    inlined,
    is_sum,
    runs_of,
)
from rhino_jax.passes.microbatch.flow.accumulated import is_summed
from rhino_jax.rewrite.flat import FlatOp, FlatProgram
from rhino_jax.utils.union_find import DisjointSets


UNITS = 2**50
"""The sum of all capacities, in the units of integer flow; a flow of infinite capacity
has more."""


class FlowNetwork:
    """Nodes 0 (source), 1 (sink), 2, …, and directed edges with capacities."""

    def __init__(self) -> None:
        self._nodes = 2
        self._edges: list[tuple[int, int, float]] = []

    def node(self) -> int:
        """Add a node and return its number."""
        self._nodes += 1
        return self._nodes - 1

    def edge(self, tail: int, head: int, capacity: float = math.inf) -> None:
        self._edges.append((tail, head, capacity))

    def cut(self) -> list[bool]:
        """Return for each node whether it is on the source's side of the minimum cut.

        Of several minimum cuts, it is the one with the fewest nodes on that side.

        Raises:
          ValueError: the source reaches the sink by edges of infinite capacity.
        """
        # Needs 0.3 s: no use to who applies a saved plan.
        from ortools.graph.python.max_flow import SimpleMaxFlow

        solver = SimpleMaxFlow()
        unit = sum(c for *_, c in self._edges if math.isfinite(c)) / UNITS or 1.0
        for tail, head, c in self._edges:
            units = round(c / unit) if math.isfinite(c) else 4 * UNITS
            solver.add_arc_with_capacity(tail, head, units)
        if self._edges and solver.solve(0, 1) == solver.OPTIMAL:
            if solver.optimal_flow() > 2 * UNITS:
                raise ValueError("the source reaches the sink at no cost")
            near = {0, *solver.get_source_side_min_cut()}
            return [node in near for node in range(self._nodes)]
        return [node == 0 for node in range(self._nodes)]


Axes = tuple[int, ...]
"""Positions of mesh axes, ascending."""


@dataclass(frozen=True)
class SitePrices:
    """Sharding of a program, and costs of reductions: every sum is over all of the mesh
    axes, and costs its bytes. A planner derives those of a plan.

    Attributes:
      program: the program.
      sizes: sizes of the mesh axes.
    """

    program: Program
    sizes: Sequence[int]

    @cached_property
    def cuts(self) -> Mapping[int, tuple[tuple[int, ...], ...]]:
        """Op id → for each factor, the mesh axes that shard it, major first."""
        count, axes = math.prod(self.sizes), tuple(range(len(self.sizes)))
        found = {}
        for op in self.program.ops:
            factors = op.rule.factors if op.rule else ()
            fits = (f.reducer == "sum" and f.size % count == 0 for f in factors)
            first = next((f for f, is_cut in enumerate(fits) if is_cut), None)
            found[op.id] = tuple(
                axes if f == first else () for f in range(len(factors))
            )
        return found

    def close(self, value: int, axes: Axes) -> tuple[float, float]:
        """Return seconds, and bytes on the wire, of one reduction over mesh axes."""
        size = float(self.program.values[value].bytes)
        return size, size

    def held_s(self, op: Op, axes: Axes) -> float:
        """Return seconds by which one run of an op slows if its result is unreduced
        over mesh axes."""
        return 0.0


@dataclass(frozen=True, slots=True)
class Site:
    """Sums that linear ops connect, and how far their reductions are deferred.

    Attributes:
      axes: mesh axes that the sums are over.
      group: the values that stay unreduced.
      saved_s: estimated seconds saved per step: of collectives, less those by which
        ops slow.
      saved_bytes: estimated bytes of collectives saved per step.
      ops: ids of the ops whose sums are deferred.
      closed: ids of the values that are reduced instead.
    """

    axes: Axes
    group: DeferredGroup
    saved_s: float
    saved_bytes: float
    ops: tuple[int, ...]
    closed: tuple[int, ...]


def sites(program: Program, prices: SitePrices, least_s: float = 1e-6) -> list[Site]:
    """Return the reductions worth deferring under a plan, most seconds saved first.

    Args:
      program: the program.
      prices: its sharding, and costs of reductions.
      least_s: minimum seconds that a site must save per step.
    """
    flat = inlined(program)
    by_axes: dict[Axes, dict[int, Split]] = defaultdict(dict)
    runs = runs_of(flat)
    for op_id in runs:
        found = _partial(program.ops[op_id], prices)
        if found is not None:
            by_axes[found[0]][op_id] = found[1]
    every = [s for x in by_axes.items() for s in _sites_over(flat, runs, prices, *x)]
    return sorted((s for s in every if s.saved_s >= least_s), key=lambda s: -s.saved_s)


def _partial(op: Op, prices: SitePrices) -> tuple[Axes, Split] | None:
    """Return the mesh axes over which an op's result is partial, and its factors that
    they shard; None where it is not partial, or its sum cannot be deferred."""
    rule, cut = op.rule, prices.cuts.get(op.id)
    if not is_sum(op) or rule is None or cut is None or len(op.results) != 1:
        return None
    over = [
        (axis, f)
        for f, factor in enumerate(rule.factors)
        if factor.reducer == "sum" and rule.partial_results(f)
        for axis in cut[f]
        if prices.sizes[axis] > 1
    ]
    axes = tuple(sorted(axis for axis, _ in over))
    split = tuple((axes.index(axis), f) for axis, f in over)
    pieces = [prices.sizes[a] for a in axes]
    return (axes, split) if axes and can_split(rule, split, pieces) else None


def _sites_over(
    flat: FlatProgram,
    ops: Mapping[int, tuple[FlatOp, int]],
    prices: SitePrices,
    axes: Axes,
    splits: Mapping[int, Split],
) -> Iterator[Site]:
    """Yield the sites of one set of mesh axes, given how it divides the ops' sums."""
    reach = Reach(flat, ops, splits)
    values, runs = reach.values, {op: count for op, (_, count) in ops.items()}
    made = {flat.program.ops[op].results[0]: op for op in splits}
    close = {v: prices.close(v, axes) for v in values}
    linear = {result: item.op for _, result, item in reach.passed if item is not None}
    held_s = {v: prices.held_s(op, axes) * runs[op.id] for v, op in linear.items()}

    network = FlowNetwork()
    opened = {v: network.node() for v in values}
    read = {v: network.node() for v in values}
    for v, count in values.items():
        network.edge(opened[v], read[v], close[v][0] * count)
        if held_s.get(v, 0.0) > 0:
            network.edge(opened[v], 1, held_s[v])
        if v in made:
            network.edge(0, opened[v])
        if v in reach.ended:
            network.edge(read[v], 1)
    for v, result, _ in reach.passed:
        network.edge(read[v], opened[result])
    for needed, v in reach.together:
        network.edge(opened[v], opened[needed])
    side = network.cut()

    links = [(a, b) for a, b, _ in reach.passed] + reach.together
    for group in _connected([v for v in values if side[opened[v]]], links):
        summed = tuple(made[v] for v in group if v in made)
        closed = tuple(v for v in group if not side[read[v]])
        seconds, sent = (
            sum(close[flat.program.ops[op].results[0]][i] * runs[op] for op in summed)
            - sum(close[v][i] * values[v] for v in closed)
            for i in (0, 1)
        )
        seconds -= sum(held_s.get(v, 0.0) for v in group)
        if len(group) > 1:
            sizes = tuple(prices.sizes[a] for a in axes)
            left = DeferredGroup(
                sizes, {op: splits[op] for op in summed}, frozenset(group)
            )
            yield Site(axes, left, seconds, sent, summed, closed)


def _connected(
    values: Sequence[int], links: Sequence[tuple[int, int]]
) -> Iterator[list[int]]:
    """Yield the connected components of some values."""
    values = sorted(values)
    place = {v: i for i, v in enumerate(values)}
    sets, found = DisjointSets(len(values)), defaultdict[int, list[int]](list)
    for a, b in links:
        if a in place and b in place:
            sets.union(place[a], place[b])
    for v, name in zip(values, sets.names(), strict=True):
        found[name].append(v)
    yield from found.values()


def accumulated(program: Program, pieces: Sequence[int]) -> list[Site]:
    """Return the sums of loops that can be deferred to the end of the loop: gradient
    accumulation.

    A plan that reduces in every iteration avoids sharding the summed dims, and so never
    shows that deferring would pay. Here every such sum is assumed to be over given mesh
    axes; by which it is sharded is the planner's choice.

    Args:
      program: the program.
      pieces: sizes of the mesh axes.
    """
    ops = runs_of(inlined(program)).values()
    runs = {v: count for item, count in ops for v in item.results}
    # The state of a recurrence: its gradient is linear, too, but read in every trip.
    state = {
        a
        for item, _ in ops
        for a, b, _ in carried(item)
        if not is_summed(item.regions[0], a, b, program)
    }
    return [
        site
        for site in sites(program, SitePrices(program, pieces), 0.0)
        if state.isdisjoint(site.group.open)
        and any(v in runs for v in site.closed)
        and max(runs[program.ops[op].results[0]] for op in site.ops)
        > min(runs[v] for v in site.closed if v in runs)
    ]
