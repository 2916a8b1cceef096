"""Grow isomorphic chains by the ops before and after, as far as fewer bytes then enter
and leave them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from rhino_jax.ir.program import Program
from rhino_jax.passes.stacked.sites import (
    Row,
    Stackable,
    StackSite,
    in_order,
    stackable,
)


def find_sites(closed: Any, program: Program) -> list[StackSite]:
    """Return the stacks of a program, in order; no op is in two of them.

    Args:
      closed: a closed jaxpr.
      program: the program imported from it.
    """
    found = stackable(closed, program)
    if found is None:
        return []
    sites: list[StackSite] = []
    isomorphic = found.isomorphic()
    for chains in (c for each in isomorphic for c in found.independent(each)):
        rows = found.rows(chains) if len(chains) > 1 else None
        taken = {i for site in sites for i in site.ops}
        if rows is None or not taken.isdisjoint(i for row in rows for i in row):
            continue
        site = StackSite(found.region, rows)
        grown = [site, *(site := _smallest(found, site, taken, way) for way in _WAYS)]
        for each in reversed(grown):
            # The ops of the first copy stand for all: it reads no value in two roles.
            inputs = each.inputs()
            is_one = len({v for v, *_ in inputs}) == len(inputs)
            if is_one and any(len({*values}) > 1 for values in inputs):
                if in_order(program, found.region, [*sites, each]) is not None:
                    sites.append(each)
                    break
    return sites


def _smallest(
    found: Stackable,
    site: StackSite,
    taken: set[int],
    grow: Callable[[Stackable, StackSite, set[int]], StackSite | None],
) -> StackSite:
    """Return the site grown to where the fewest bytes enter and leave it, and of equal
    ones the largest.

    Args:
      found: the program's ops.
      site: the site.
      taken: positions of ops in other sites.
      grow: returns a site with another row of ops; None: there is none.
    """
    best, least = site, site.bytes()
    while (grown := grow(found, site, taken)) is not None:
        site = grown
        if (now := site.bytes()) <= least:
            best, least = site, now
    return best


def _joined(
    found: Stackable, site: StackSite, row: Row, taken: set[int]
) -> StackSite | None:
    """Return a site with another row of ops; None where they are not isomorphic."""
    is_free = len({*row}) == len(row) and (taken | site.ops).isdisjoint(row)
    if not is_free or not all(found.may[i] for i in row):
        return None
    numbers = {
        tuple(
            found.table.results(each.eqn, [found.number(v, {}) for v in each.operands])
        )
        for each in (found.region.ops[i] for i in row)
    }
    if len(numbers) > 1:
        return None
    rows = found.rows(zip(*site.rows, row, strict=True))
    return None if rows is None else replace(site, rows=rows)


def _before(found: Stackable, site: StackSite, taken: set[int]) -> StackSite | None:
    """Return a site with the last row of ops whose results it alone reads."""
    region, own = found.region, site.ops

    def is_alone(value: int) -> bool:
        readers = region.readers.get(value, ())
        return value not in region.outputs and own.issuperset(readers)

    makers = {tuple(region.maker.get(v, -1) for v in row) for row in site.inputs()}
    for row in sorted(makers, reverse=True):
        if -1 not in row and all(map(is_alone, region.made_by(row))):
            if (grown := _joined(found, site, row, taken)) is not None:
                return grown
    return None


def _after(found: Stackable, site: StackSite, taken: set[int]) -> StackSite | None:
    """Return a site with the first row of ops that read its results, and of which no
    copy depends on another one's."""
    for row in sorted(_readers(found, site)):
        if (grown := _joined(found, site, row, taken)) is not None:
            return grown
    return None


def _readers(found: Stackable, site: StackSite) -> Iterator[Row]:
    """Yield rows of ops outside of a site that read its results."""
    own = site.ops
    for values in site.outputs():
        readers = [
            [i for i in found.region.readers.get(v, ()) if i not in own] for v in values
        ]
        if len({*map(len, readers)}) == 1:
            yield from zip(*readers, strict=True)


_WAYS = (_before, _after)
"""Ways to grow a site, one after the other."""
