"""Emit a program with isomorphic chains stacked: the pass, and the sizes of stacks that
a program allows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
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
from rhino_jax.passes.stacked.grown import find_sites
from rhino_jax.passes.stacked.sites import StackSite, in_order
from rhino_jax.rewrite.retraced import retraced


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
