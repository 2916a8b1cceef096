"""Choose which sums to defer, and how far: a minimum cut for each set of mesh axes.

Every value that can be unreduced has two nodes: that it *is* unreduced, and that all
its readers read it so. An edge between them costs the value's reduction; an op that
needs the reduced value ties the second to the sink; a linear op ties it to its result
being unreduced. The minimum cut between the ops that sum (always unreduced) and the
sink (reduced) is where the collectives go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rhino_jax.ir.program import Op, Program
from rhino_jax.passes.deferred_reductions.flow import FlowNetwork
from rhino_jax.passes.deferred_reductions.pieces import DeferredGroup, Split, can_split
from rhino_jax.passes.deferred_reductions.reach import Reach, reach, sums, visible


Axes = tuple[int, ...]
"""Positions of mesh axes, ascending."""


class SitePrices(Protocol):
    """Sharding of a program under a plan, and costs of reductions."""

    @property
    def cuts(self) -> Mapping[int, tuple[tuple[int, ...], ...]]:
        """Op id → for each factor, the mesh axes that shard it, major first."""
        ...

    @property
    def sizes(self) -> Sequence[int]:
        """Sizes of the mesh axes."""
        ...

    def close(self, value: int, axes: Axes) -> tuple[float, float]:
        """Return seconds, and bytes on the wire, of one reduction over mesh axes."""
        ...

    def held_s(self, op: Op, axes: Axes) -> float:
        """Return seconds by which one run of an op slows if its result is unreduced.

        Args:
          op: the op.
          axes: mesh axes over which the result is unreduced.
        """
        ...


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
    runs = visible(program)
    by_axes: dict[Axes, dict[int, Split]] = {}
    for op_id in runs:
        found = _split(program.ops[op_id], prices)
        if found is not None:
            axes, split = found
            by_axes.setdefault(axes, {})[op_id] = split
    every = [
        site
        for axes, splits in by_axes.items()
        for site in _sites_over(program, prices, runs, axes, splits)
    ]
    return sorted((s for s in every if s.saved_s >= least_s), key=lambda s: -s.saved_s)


def _split(op: Op, prices: SitePrices) -> tuple[Axes, Split] | None:
    """Return the mesh axes over which an op's result is partial, and their factors.

    Args:
      op: the op.
      prices: the program's sharding.
    Returns:
      The mesh axes, and how they divide the op's summed factors; None where the result
      is not partial, or its sum cannot be deferred.
    """
    rule, cut = op.rule, prices.cuts.get(op.id)
    if not sums(op) or rule is None or cut is None or len(op.results) != 1:
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
    program: Program,
    prices: SitePrices,
    runs: Mapping[int, int],
    axes: Axes,
    splits: Mapping[int, Split],
) -> Iterator[Site]:
    """Yield the sites of one set of mesh axes.

    Args:
      program: the program.
      prices: its sharding, and costs of reductions.
      runs: number of times that each op runs per step.
      axes: the mesh axes.
      splits: id of each op with partial sums over them → how its factors are divided.
    """
    found = reach(program, splits, runs)
    made = {program.ops[op].results[0]: op for op in splits}
    costs = {v: prices.close(v, axes) for v in found.values}
    is_open, is_summed = _cut(found, made, prices, axes, costs, runs)
    pieces = tuple(prices.sizes[a] for a in axes)
    linear = {result: op for _, result, op in found.passed if op}
    for values in _flows(found, is_open):
        ops = [made[v] for v in values if v in made]
        closed = [v for v in values if is_summed[v]]
        saved = [
            sum(costs[program.ops[op].results[0]][i] * runs[op] for op in ops)
            - sum(costs[v][i] * found.values[v] for v in closed)
            for i in (0, 1)
        ]
        held = [linear[v] for v in values if v in linear]
        saved[0] -= sum(prices.held_s(op, axes) * runs[op.id] for op in held)
        if len(values) > 1:
            group = DeferredGroup(
                pieces, {op: splits[op] for op in ops}, frozenset(values)
            )
            yield Site(axes, group, saved[0], saved[1], tuple(ops), tuple(closed))


def _cut(
    found: Reach,
    made: Mapping[int, int],
    prices: SitePrices,
    axes: Axes,
    costs: Mapping[int, tuple[float, float]],
    runs: Mapping[int, int],
) -> tuple[dict[int, bool], dict[int, bool]]:
    """Compute a minimum cut of unreduced values.

    Args:
      found: values that can be unreduced, and how ops read them.
      made: id of each unreduced result → id of the op that sums.
      prices: costs of reductions.
      axes: the mesh axes.
      costs: value id → seconds and bytes of its reduction.
      runs: number of times that each op runs per step.
    Returns:
      For each value, whether it is unreduced, and whether it then has to be reduced for
      a reader.
    """
    network = FlowNetwork()
    opened = {v: network.node() for v in found.values}
    passed = {v: network.node() for v in found.values}
    for v, count in found.values.items():
        network.edge(opened[v], passed[v], costs[v][0] * count)
        if v in made:
            network.edge(0, opened[v])
        if v in found.ended:
            network.edge(passed[v], 1)
    for op_id, op in {op.id: op for _, _, op in found.passed if op}.items():
        held_s = prices.held_s(op, axes) * runs[op_id]
        if held_s > 0:
            network.edge(opened[op.results[0]], 1, held_s)
    for v, result, _ in found.passed:
        network.edge(passed[v], opened[result])
    for needed, v in found.together:
        network.edge(opened[v], opened[needed])
    side = network.cut()
    is_open = {v: side[opened[v]] for v in found.values}
    return is_open, {v: is_open[v] and not side[passed[v]] for v in found.values}


def _flows(found: Reach, is_open: Mapping[int, bool]) -> list[list[int]]:
    """Return the connected components of unreduced values."""
    near: dict[int, set[int]] = {v: set() for v, yes in is_open.items() if yes}
    pairs = [(a, b) for a, b, _ in found.passed] + found.together
    for a, b in pairs:
        if a in near and b in near:
            near[a].add(b)
            near[b].add(a)
    flows: list[list[int]] = []
    left = set(near)
    while left:
        flow, stack = [], [left.pop()]
        while stack:
            flow.append(stack.pop())
            more = near[flow[-1]] & left
            left -= more
            stack += more
        flows.append(sorted(flow))
    return flows
