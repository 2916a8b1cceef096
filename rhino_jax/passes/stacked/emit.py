"""Emit a program with isomorphic chains stacked: the pass, and the sizes of stacks that
a program allows. Chains are grown by the ops before and after, as far as fewer bytes
then enter and leave them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax

from rhino_jax._compat import with_weak_types, without_dead_code
from rhino_jax.errors import MicrobatchError
from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.program import Program
from rhino_jax.ir.transform import STACKED, Transform, chosen
from rhino_jax.passes.program_pass import (
    ChoiceLimits,
    Gain,
    ProgramPass,
    Trial,
    TrialKind,
)
from rhino_jax.passes.stacked.sites import (
    Row,
    Stackable,
    StackSite,
    in_order,
    stackable,
)
from rhino_jax.rewrite.retraced import retraced


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
        ways = _before, _after
        grown = [site, *(site := _smallest(found, site, taken, way) for way in ways)]
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
    rows: Callable[[Stackable, StackSite], Iterable[Row]],
) -> StackSite:
    """Return the site grown to where the fewest bytes enter and leave it, and of equal
    ones the largest.

    Args:
      found: the program's ops.
      site: the site.
      taken: positions of ops in other sites.
      rows: returns rows of ops next to a site; the first that can be joined is.
    """
    best, least = site, site.bytes()
    while True:
        grown = (_joined(found, site, row, taken) for row in rows(found, site))
        larger = next((each for each in grown if each is not None), None)
        if larger is None:
            return best
        site = larger
        if (now := site.bytes()) <= least:
            best, least = site, now


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


def _before(found: Stackable, site: StackSite) -> Iterator[Row]:
    """Yield rows of ops whose results a site alone reads, the last first."""
    region, own = found.region, site.ops

    def is_alone(value: int) -> bool:
        readers = region.readers.get(value, ())
        return value not in region.outputs and own.issuperset(readers)

    makers = {tuple(region.maker.get(v, -1) for v in row) for row in site.inputs()}
    for row in sorted(makers, reverse=True):
        if -1 not in row and all(map(is_alone, region.made_by(row))):
            yield row


def _after(found: Stackable, site: StackSite) -> list[Row]:
    """Return rows of ops that read a site's results, in order."""
    own, rows = site.ops, list[Row]()
    for values in site.outputs():
        readers = [
            [i for i in found.region.readers.get(v, ()) if i not in own] for v in values
        ]
        if len({*map(len, readers)}) == 1:
            rows += zip(*readers, strict=True)
    return sorted(rows)


MAX_PADDING = 2
"""Copies of a padded stack for each one that it holds, at most: with more, most devices
would compute what is left out, and as many copies of leaves would be sent to them."""


def stack_work(closed: Any, program: Program, choice: str) -> Any:
    """Rewrite a program to compute isomorphic chains as stacks.

    Args:
      closed: a closed jaxpr.
      program: the program imported from it.
      choice: JSON, as `{"sizes": [8, 0]}`: for each stack that is found, its number of
        copies with padding; 0: it stays as it is.
    Returns:
      A closed jaxpr of the same arguments and results.
    Raises:
      MicrobatchError: the program has other stacks.
    """
    sites, sizes = find_sites(closed, program), json.loads(choice)["sizes"]
    if not sites or len(sites) != len(sizes):
        raise MicrobatchError(
            f"`{program.name}` has {len(sites)} sets of isomorphic work.",
            where=f"`{program.name}`",
            numbers=choice,
            fix="plan again.",
        )
    pairs = zip(sites, sizes, strict=True)
    size_of = {site: size for site, size in pairs if size}
    region = sites[0].region
    order = in_order(program, region, size_of)
    assert order is not None, "some sites depend on each other, though all do not"

    def run(*arrays: Any) -> list[Any]:
        env = dict(zip(region.inputs, arrays, strict=True))
        for each in order:
            if isinstance(each, StackSite):
                env.update(_run(each, size_of[each], env))
            else:
                region.run([each], env)
        return [region.result(v, env) for v in region.outputs]

    return without_dead_code(retraced(closed, run))


def _run(site: StackSite, size: int, env: dict[int, Any]) -> Iterator[tuple[int, Any]]:
    """Run a stack of chains, and yield the value ids and arrays of all their results.

    Copies that pad it are the last one again, so that a loop until convergence ends for
    them as for others.
    """
    region, inputs, outputs = site.region, site.inputs(), site.outputs()
    first = [i for i, *_ in site.rows]

    def chain(*arrays: Any) -> list[Any]:
        own = dict(zip((v for v, *_ in inputs), arrays, strict=True))
        region.run(first, own)
        return [own[v] for v, *_ in outputs]

    shared = [len({*values}) == 1 for values in inputs]
    arrays = [
        env[values[0]] if is_shared else _stack([env[v] for v in values], size)
        for values, is_shared in zip(inputs, shared, strict=True)
    ]
    axes = [None if is_shared else 0 for is_shared in shared]
    made = jax.vmap(chain, axes, axis_size=size)(*arrays)
    for values, stack in zip(outputs, made, strict=True):
        slices = [
            lax.index_in_dim(stack, k, 0, keepdims=False) for k in range(len(values))
        ]
        types = [region.avals[v] for v in values]
        yield from zip(values, with_weak_types(slices, types), strict=True)


def _stack(arrays: Sequence[Any], size: int) -> Any:
    padded = [*arrays, *[arrays[-1]] * (size - len(arrays))]
    stack = lax.concatenate([lax.expand_dims(x, [0]) for x in padded], 0)
    return with_weak_types([stack], [jax.typeof(arrays[0])])[0]


def _choices(traced: Traced, limits: ChoiceLimits) -> Iterator[Transform]:
    """Yield stacks padded to a multiple of the number of devices along some mesh axes,
    as many as `MAX_PADDING` allows; none of values that the user pinned."""
    counts, sizes = sorted(limits.counts), list[int]()
    for site in find_sites(traced.closed_jaxpr, traced.program) if counts else ():
        pinned = map(site.region.named, limits.pinned)
        is_free = site.region.made_by(site.ops).isdisjoint(pinned)
        sizes.append(_padded(site.copies, counts) if is_free else 0)
    if any(sizes):
        yield chosen(STACKED, {"sizes": sizes})


def _padded(copies: int, counts: Iterable[int]) -> int:
    """Return the number of copies with padding; 0 where it were too much of them."""
    few = [n for n in counts if n <= MAX_PADDING * copies]
    return -(-copies // few[-1]) * few[-1] if few else 0


PASS = ProgramPass(
    STACKED,
    stack_work,
    _choices,
    Trial(TrialKind.WHILE_BETTER, lambda choice: STACKED, "stacks", STACKED, Gain.TIME),
)
