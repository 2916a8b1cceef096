"""Find isomorphic chains of matrix products or factorizations that do not depend on
each other.

A chain is a connected set of ops on values without a batch dim, from the first product
to the last. Chains of equal value numbers are isomorphic, where a value from outside
counts by its type alone.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

from rhino_jax.analysis.dim_classes import find_dim_classes
from rhino_jax.analysis.inline_regions import inline_regions
from rhino_jax.analysis.roles import find_roles
from rhino_jax.ir.program import Op, Program
from rhino_jax.ir.traits import OpKind
from rhino_jax.rewrite.flat import FlatRegion, may_run_again
from rhino_jax.rewrite.flatten import flatten
from rhino_jax.rewrite.numbers import NumberTable
from rhino_jax.utils.union_find import DisjointSets


SAME_ELEMENTS = (OpKind.MOVEMENT, OpKind.CONVERSION)
"""Kinds of ops of one operand between a matrix and its product with itself."""

Row = tuple[int, ...]
"""Positions of isomorphic ops in a region, or ids of their values: one of each copy."""


@dataclass(frozen=True, slots=True, eq=False)
class StackSite:
    """Isomorphic ops of several copies, which do not depend on each other.

    Attributes:
      region: the region of the ops.
      rows: the ops of the first copy in order, each with those of the other copies.
    """

    region: FlatRegion
    rows: tuple[Row, ...]

    @property
    def copies(self) -> int:
        """The number of copies."""
        return len(self.rows[0])

    @property
    def ops(self) -> set[int]:
        """Positions of all ops."""
        return {i for row in self.rows for i in row}

    def inputs(self) -> list[Row]:
        """Return the values that the ops read from outside, but for constants, which
        are equal."""
        region = self.region
        inside = region.made_by(self.ops) | region.consts.keys()
        read = (values for row in self.rows for values in read_by(region, row))
        return [*dict.fromkeys(values for values in read if values[0] not in inside)]

    def outputs(self) -> list[Row]:
        """Return the results that are read outside, of any copy."""
        own, region = self.ops, self.region

        def leaves(value: int) -> bool:
            readers = region.readers.get(value, ())
            return value in region.outputs or not own.issuperset(readers)

        made = (
            values
            for row in self.rows
            for values in zip(*(region.makes[i] for i in row), strict=True)
        )
        return [values for values in made if any(map(leaves, values))]

    def bytes(self) -> int:
        """Return the size of all values that enter or leave."""
        every = {v for row in (*self.inputs(), *self.outputs()) for v in row}
        return sum(map(self.region.bytes, every))


def read_by(region: FlatRegion, row: Row) -> Iterator[Row]:
    """Yield the operands of a row of ops, position by position."""
    return zip(*(region.ops[i].operands for i in row), strict=True)


@dataclass(slots=True, eq=False)
class Stackable:
    """The ops of a program that may run stacked.

    Attributes:
      program, region: the program and its flattened body.
      may: [ops], whether each is pure, of known dims, and computes no values with a
        batch dim.
      table: value numbers of constants and chains.
    """

    program: Program
    region: FlatRegion
    may: list[bool]
    table: NumberTable = field(default_factory=NumberTable)

    def number(self, value: int, of: dict[int, int]) -> int:
        """Return the number of an operand: of a chain, of a constant, or of its type
        alone."""
        if value in of:
            return of[value]
        aval = self.region.avals[value]
        if value in self.region.consts:
            return self.table.constant(self.region.consts[value], aval.dtype)
        return self.table.same(("outside", aval))

    def sources(self, i: int) -> Iterator[int]:
        """Yield the ops whose results an op reads, of those that may be stacked."""
        for v in self.region.reads[i]:
            maker = self.region.maker.get(v)
            if maker is not None and self.may[maker]:
                yield maker

    def chains(self) -> Iterator[list[int]]:
        """Yield the ops of every chain in which a product reads what another one
        computes, or which factorizes a matrix, in order."""
        count = len(self.region.ops)
        work = [_products(self.program, each.op) for each in self.region.ops]
        depth = [n if may else 0 for n, may in zip(work, self.may, strict=True)]
        below = [*map(bool, depth)]
        for i in range(count):
            if self.may[i]:
                depth[i] += max((depth[s] for s in self.sources(i)), default=0)
        for i in reversed(range(count)):
            if below[i]:
                for s in self.sources(i):
                    below[s] = True
        core = [i for i in range(count) if depth[i] and below[i]]
        sets = DisjointSets(count)
        for i in core:
            for s in self.sources(i):
                if depth[s]:
                    sets.union(i, s)
        found = defaultdict[int, list[int]](list)
        for i in core:
            found[sets.find(i)].append(i)
        yield from (ops for ops in found.values() if max(depth[i] for i in ops) > 1)

    def isomorphic(self) -> Iterator[list[list[int]]]:
        """Yield chains of equal value numbers, two or more, their ops in the same
        order."""
        found = defaultdict[Hashable, list[list[int]]](list)
        for ops in self.chains():
            of, keys = dict[int, int](), dict[int, int]()
            for i in ops:
                each = self.region.ops[i]
                operands = [self.number(v, of) for v in each.operands]
                numbers = self.table.results(each.eqn, operands)
                of.update(zip(each.results, numbers, strict=True))
                keys[i] = numbers[0]
            ops.sort(key=lambda i: (keys[i], i))
            found[tuple(keys[i] for i in ops)].append(ops)
        yield from (chains for chains in found.values() if len(chains) > 1)

    def independent(self, chains: Sequence[list[int]]) -> list[list[list[int]]]:
        """Return chains in sets that do not depend on each other: by the number of
        others that each comes after."""
        own = {i: k for k, ops in enumerate(chains) for i in ops}
        after, level = dict[int, int](), [0] * len(chains)
        for i, each in enumerate(self.region.ops):
            mask = 0
            for v in self.region.reads[i]:
                mask |= after.get(v, 0)
            if i in own:
                others = mask & ~(1 << own[i])
                seen = (level[k] for k in range(len(chains)) if others >> k & 1)
                level[own[i]] = max(level[own[i]], 1 + max(seen, default=-1))
                mask |= 1 << own[i]
            if mask:
                after.update(dict.fromkeys(each.results, mask))
        found = defaultdict[int, list[list[int]]](list)
        for k, ops in enumerate(chains):
            found[level[k]].append(ops)
        return [*found.values()]

    def rows(self, chains: Iterable[Sequence[int]]) -> tuple[Row, ...] | None:
        """Return the ops of isomorphic chains row by row; None where they read each
        other's results in another way."""
        rows, region = tuple(sorted(zip(*chains, strict=True))), self.region
        own, known = {i for row in rows for i in row}, {*rows}
        for row in rows:
            for values in read_by(region, row):
                made = tuple(region.maker.get(v, -1) for v in values)
                if own.isdisjoint(made):
                    continue
                if made not in known:
                    return None
                pairs = zip(made, values, strict=True)
                if len({region.makes[m].index(v) for m, v in pairs}) > 1:
                    return None
        return rows


def _products(program: Program, op: Op) -> int:
    """Return the number of products of matrices that an op runs; a factorization counts
    as two."""
    return sum(
        2 if inner.traits.library.name == "factoring" else count
        for inner, count in program.within(op)
        if inner.traits.library.name == "factoring"
        or inner.traits.kind is OpKind.CONTRACTION
    )


def stackable(closed: Any, program: Program) -> Stackable | None:
    """Return the ops of a program that may run stacked; None of one that is seen at a
    glance to have no chains, as most have none.

    Args:
      closed: a closed jaxpr.
      program: the program imported from it.
    """
    if not any(_is_of_leaves(program)):
        return None
    batch = _on_batch(program)

    def is_fixed(op: Op) -> bool:
        """Whether an op is on the batch, where its user put it, or not known well."""
        kind, is_placed = op.traits.kind, op.traits.states_placement
        return (
            op.id in batch
            or is_placed
            or not (op.pin is None and op.manual is None and op.is_known)
            or kind is OpKind.KERNEL
            or (kind is OpKind.GENERATOR and bool(op.operands))
        )

    region = flatten(program, closed).top
    may = [
        may_run_again(program, each.op)
        and not any(is_fixed(inner) for inner, _ in program.within(each.op))
        for each in region.ops
    ]
    return Stackable(program, region, may)


def _is_of_leaves(program: Program) -> Iterator[bool]:
    """Yield of every product and factorization of a program whether it may be of leaves
    alone: it comes after gradients, multiplies a matrix with itself, or factorizes."""
    maker = {v: op for op in program.ops for v in op.results}
    last = max((op.id for op in program.ops if op.source.is_backward), default=math.inf)

    def origin(value: int) -> int:
        while (op := maker.get(value)) and op.traits.kind in SAME_ELEMENTS:
            if len(op.operands) > 1:
                break
            (value,) = op.operands
        return value

    for op in program.ops:
        if op.traits.kind is OpKind.CONTRACTION:
            yield op.id > last or len({*map(origin, op.operands)}) == 1
        elif op.traits.library.name == "factoring":
            yield True


def _on_batch(program: Program) -> set[int]:
    """Return the ids of ops that read or compute values with a batch dim; none of a
    program without gradients, in which what is data is less certain."""
    if not any(op.source.is_backward for op in program.ops):
        return set()
    graph = inline_regions(program)
    classes = find_dim_classes(graph)
    touches = classes.have(find_roles(graph, classes).batch)
    return {n.op.id for n in graph.nodes if n.op is not None and touches[n.id]}


def in_order(
    program: Program, region: FlatRegion, sites: Iterable[StackSite]
) -> list[int | StackSite] | None:
    """Return the ops of a region, and sites in place of theirs, in an order in which
    they may run, impure ones as before; None where sites depend on each other.

    Args:
      program: the program.
      region: its flattened body.
      sites: the sites, no op in two of them.
    """
    site_of = {i: site for site in sites for i in site.ops}
    first = {id(site): min(site.ops) for site in site_of.values()}
    unit = [
        first[id(site_of[i])] if i in site_of else i for i in range(len(region.ops))
    ]
    waits, last = defaultdict[int, set[int]](set), set[int]()
    for i, each in enumerate(region.ops):
        makers = (region.maker[v] for v in region.reads[i] if v in region.maker)
        waits[unit[i]].update(unit[m] for m in makers)
        if not may_run_again(program, each.op):
            waits[i] |= last
            last = {i}
    sorter = TopologicalSorter({i: before - {i} for i, before in waits.items()})
    try:
        sorter.prepare()
    except CycleError:
        return None
    ready, order = list[int](), list[int | StackSite]()
    while sorter.is_active():
        for i in sorter.get_ready():
            heapq.heappush(ready, i)
        i = heapq.heappop(ready)
        order.append(site_of.get(i, i))
        sorter.done(i)
    return order
