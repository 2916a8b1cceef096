"""Choose which sums to defer, and how far: a minimum cut for each set of mesh axes. The
choice is the values that stay unreduced, as records and as text.

Values can stay unreduced that linear ops compute from unreduced ones. Ops are linear up
to rounding, as for any other order of addition. Recomputed regions and scans are looked
into; loops of unknown trip count and conditionals are not.

Every value that can be unreduced has two nodes: that it *is* unreduced, and that all
its readers read it so. An edge between them costs the value's reduction; an op that
needs the reduced value ties the second to the sink; a linear op ties it to its result
being unreduced. The minimum cut between the ops that sum (always unreduced) and the
sink (reduced) is where the collectives go. Capacities are seconds; OR-Tools finds it.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rhino_jax.frontend.regions import PLAIN_CALLS, REMATS
from rhino_jax.ir.factor import FactorKind, Rule
from rhino_jax.ir.program import Op, Program
from rhino_jax.ir.traits import FROM_ALL, OpKind
from rhino_jax.passes.microbatch.flow.regions import is_summed
from rhino_jax.rewrite.flat import FlatOp, FlatProgram, FlatRegion
from rhino_jax.rewrite.flatten import flatten
from rhino_jax.utils.codec import from_json, to_json
from rhino_jax.utils.union_find import DisjointSets


Split = tuple[tuple[int, int], ...]
"""How an op's unreduced sum is divided: (index of a mesh axis of the group, factor that
it shards); per factor, major axis first."""


@dataclass(frozen=True, slots=True)
class DeferredGroup:
    """Values that are unreduced over the same mesh axes.

    Attributes:
      pieces: sizes of the leading dims of unreduced values, one per mesh axis.
      made: op id → how its summed factors are divided; its result is unreduced.
      open: ids of the values that stay unreduced; any other value is reduced when it is
        read.
    """

    pieces: tuple[int, ...]
    made: Mapping[int, Split]
    open: frozenset[int]


def as_text(groups: Iterable[DeferredGroup]) -> str:
    """Return groups as the choice of `defer_reductions`; empty for no groups."""
    found = to_json(tuple(groups))
    return json.dumps(found, sort_keys=True, separators=(",", ":")) if found else ""


def from_text(choice: str) -> Sequence[DeferredGroup]:
    """Parse the groups that `as_text` wrote."""
    return from_json(tuple[DeferredGroup, ...], json.loads(choice or "[]"))


def can_split(rule: Rule, split: Split, pieces: Sequence[int]) -> bool:
    """Whether mesh axes divide factors evenly, and these are dims of their own.

    Partial sums over factors that a window slides over would need a halo.
    """
    left = {f: rule.factors[f].size for _, f in split}
    for piece, f in split:
        if rule.factors[f].kind is FactorKind.HALO or left[f] % pieces[piece]:
            return False
        left[f] //= pieces[piece]
    dims = {dim for layout in rule.operands for dim in layout}
    return sorted(p for p, _ in split) == list(range(len(pieces))) and all(
        (f,) in dims and all(dim == (f,) or f not in dim for dim in dims) for f in left
    )


def inlined(program: Program, closed: object = None) -> FlatProgram:
    """Return the program as this pass looks at it: all plain calls are inlined."""
    return flatten(program, closed, lambda op: bool(op.call and op.name in PLAIN_CALLS))


def is_entered(item: FlatOp) -> bool:
    """Whether values may be unreduced inside of an op's regions."""
    return bool(item.regions) and (item.op.name in REMATS or item.is_scan)


def is_sum(op: Op) -> bool:
    """Whether an op's own sums can be deferred."""
    if op.traits.kind in (OpKind.REDUCTION, OpKind.SCATTER):
        return op.traits.reducer == "sum"
    return op.traits.is_contraction and not op.traits.masked


def linear_ways(program: Program, op: Op) -> tuple[tuple[int, ...], ...]:
    """Return the sets of operand positions in which an op is jointly linear, if any.

    Convolutions and grouped matmuls are left out: over one more batch dim, they are
    other ops.
    """
    traits = op.traits
    if op.call or len(op.results) != 1 or traits.states_placement or traits.masked:
        return ()

    def is_float(value: int) -> bool:
        return program.values[value].dtype.startswith(("float", "bfloat", "complex"))

    if traits.kind is OpKind.CONVOLUTION or not is_float(op.results[0]):
        return ()
    ways = traits.commutes_in(len(op.operands))
    return tuple(way for way in ways if all(is_float(op.operands[i]) for i in way))


def runs_of(flat: FlatProgram) -> dict[int, tuple[FlatOp, int]]:
    """Return op id → the op, and the number of times that it runs per step."""

    def walk(region: FlatRegion, count: int) -> Iterator[tuple[FlatOp, int]]:
        for item in region.ops:
            yield item, count
            if is_entered(item):
                yield from walk(item.regions[0], count * item.call.trip_count)

    return {item.op.id: (item, count) for item, count in walk(flat.top, 1)}


@dataclass
class Reach:
    """The values that can be unreduced if the sums of some ops are.

    Attributes:
      flat: the program.
      runs: its ops, as `runs_of` returns them.
      sources: ids of the ops that sum.
      values: value id → number of times that it is computed per step.
      passed: (value id, id of the value that is unreduced if the first is read so, op
        that computes the second, or None where it is the first in another region).
      together: (value id, value id): the first must be unreduced if the second is.
      ended: ids of values that some op reads reduced.
    """

    flat: FlatProgram
    runs: Mapping[int, tuple[FlatOp, int]]
    sources: Collection[int]
    values: dict[int, int] = field(default_factory=dict)
    passed: list[tuple[int, int, FlatOp | None]] = field(default_factory=list)
    together: list[tuple[int, int]] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Propagate to a fixed point; its last round records how values are read."""
        before = -1
        while before < len(self.values):
            before = len(self.values)
            self.passed, self.together = [], []
            self.ended = self.values.keys() & self.flat.top.outputs
            for item, count in self.runs.values():
                if item.regions:
                    self._through_regions(item, count)
                else:
                    self._through(item, count)

    def _through(self, item: FlatOp, count: int) -> None:
        op, values = item.op, self.values
        is_source = op.id in self.sources
        if not is_source and values.keys().isdisjoint(item.operands):
            return
        # Reduced operands of such ops would have to be padded with zeros.
        needs_all = op.traits.kind is OpKind.MOVEMENT and op.traits.moves == FROM_ALL
        enough = all if needs_all else any
        ways = () if is_source else linear_ways(self.flat.program, op)
        found = (w for w in ways if enough(item.operands[i] in values for i in w))
        way = next(found, ())
        if way or is_source:
            values[item.results[0]] = count
        for i, v in enumerate(item.operands):
            if v not in values:
                continue
            if i not in way:
                self.ended.add(v)
                continue
            self.passed.append((v, item.results[0], item))
            if needs_all:
                self.together.append((v, item.results[0]))

    def _through_regions(self, item: FlatOp, count: int) -> None:
        values, entering = self.values, set[int]()
        if is_entered(item):
            call, (inside,) = item.call, item.regions
            times = count * call.trip_count
            links = [
                (out, result, count)
                for out, result in zip(inside.outputs, item.results, strict=True)
            ]
            if item.is_scan:
                entering = {*call.carries(item.operands)}
                into = call.carries(inside.inputs)
                pairs = zip(call.carries(item.operands), into, strict=True)
                links = [(a, b, times) for a, b in pairs] + [*call.stacked(links)]
            for a, b, runs in links:
                if a in values:
                    values.setdefault(b, runs)
                    self.passed.append((a, b, None))
            for inner, out, result in carried(item):
                if not values.keys().isdisjoint((inner, out, result)):
                    values.setdefault(inner, times)
                    values.setdefault(result, count)
                    self.together += [(inner, result), (result, inner)]
                    if out in values:
                        self.passed.append((out, result, None))
        self.ended |= values.keys() & (set(item.operands) - entering)


def carried(item: FlatOp) -> Iterator[tuple[int, int, int]]:
    """Yield a scan's carries as (body's input, body's output, result of the scan)."""
    if item.is_scan:
        (inside,) = item.regions
        entering = item.call.carries(inside.inputs)
        yield from zip(entering, inside.outputs, item.results, strict=False)


UNITS = 2**50
"""The sum of all capacities, in the units of integer flow; a flow of infinite capacity
has more."""


def minimum_cut(edges: Sequence[tuple[int, int, float]]) -> set[int]:
    """Return the nodes on the source's side of a minimum cut.

    Of several minimum cuts, it is the one with the fewest nodes on that side.

    Args:
      edges: (tail, head, capacity) of directed edges; node 0 is the source, 1 the sink.
    Raises:
      ValueError: the source reaches the sink by edges of infinite capacity.
    """
    # Needs 0.3 s: no use to who applies a saved plan.
    from ortools.graph.python.max_flow import SimpleMaxFlow

    solver = SimpleMaxFlow()
    unit = sum(c for *_, c in edges if math.isfinite(c)) / UNITS or 1.0
    for tail, head, c in edges:
        units = round(c / unit) if math.isfinite(c) else 4 * UNITS
        solver.add_arc_with_capacity(tail, head, units)
    if not edges or solver.solve(0, 1) != solver.OPTIMAL:
        return {0}
    if solver.optimal_flow() > 2 * UNITS:
        raise ValueError("the source reaches the sink at no cost")
    return {0, *solver.get_source_side_min_cut()}


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
    values = reach.values
    made = {flat.program.ops[op].results[0]: op for op in splits}
    # Seconds, and bytes, of all reductions of a value in a step.
    costs = {v: [x * n for x in prices.close(v, axes)] for v, n in values.items()}
    linear = {result: item.op for _, result, item in reach.passed if item is not None}
    held_s = {v: prices.held_s(op, axes) * values[v] for v, op in linear.items()}

    opened = {v: 2 + i for i, v in enumerate(values)}
    read = {v: len(values) + node for v, node in opened.items()}
    edges = [(opened[v], read[v], costs[v][0]) for v in values]
    edges += [(opened[v], 1, s) for v, s in held_s.items() if s > 0]
    edges += [(0, opened[v], math.inf) for v in made]
    edges += [(read[v], 1, math.inf) for v in reach.ended]
    edges += [(read[v], opened[result], math.inf) for v, result, _ in reach.passed]
    edges += [(opened[v], opened[needed], math.inf) for needed, v in reach.together]
    near = minimum_cut(edges)

    links = [(a, b) for a, b, _ in reach.passed] + reach.together
    for group in _connected([v for v in values if opened[v] in near], links):
        summed = tuple(made[v] for v in group if v in made)
        closed = tuple(v for v in group if read[v] not in near)
        seconds, sent = (
            sum(costs[v][i] for v in group if v in made)
            - sum(costs[v][i] for v in closed)
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
