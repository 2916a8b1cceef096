"""Sums over micro-batches of terms of two submeshes: each accumulates its own.

The gradient of a weight that is read in two places is a sum of two. Where these are on
different submeshes, one of them would be sent for every micro-batch; as two sums, it is
sent once a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from rhino_jax._compat import (
    jaxpr_consts,
    open_jaxpr,
    untagged,
    without_dead_code,
)
from rhino_jax.ir.traits import OpKind, Traits
from rhino_jax.passes.microbatch.cut import LoopCrossing
from rhino_jax.passes.staged.apart import Apart
from rhino_jax.passes.staged.labels import Labels
from rhino_jax.rewrite.flat import FlatRegion
from rhino_jax.rewrite.retraced import traced_on


@dataclass(frozen=True, slots=True)
class _Shared:
    """A sum of two terms, and the linear ops on it.

    Attributes:
      terms: value ids.
      chain: (equation, index of its operand), from the add on.
    """

    terms: tuple[int, ...]
    chain: tuple[tuple[int, int], ...]


def apart_sums(apart: Apart, labels: Labels) -> Apart | None:
    """Return the step with shared sums split by submesh; None where there are none.

    Args:
      apart: the step.
      labels: of its micro-batches.
    """
    found = {
        k: shared
        for k, crossing in enumerate(apart.leaving)
        if crossing.how == "sum"
        and k >= apart.early
        and (shared := _shared(labels, k)) is not None
    }
    if not found:
        return None
    leaving: list[LoopCrossing] = []
    places: list[range] = []
    for k, crossing in enumerate(apart.leaving):
        count = len(found[k].terms) if k in found else 1
        places.append(range(len(leaving), len(leaving) + count))
        leaving += [crossing] * count
    piece, at = _piece(apart, labels.region, found)
    return replace(
        apart,
        piece=piece,
        at=at,
        after=_after(apart, places),
        leaving=tuple(leaving),
    )


def _shared(labels: Labels, position: int) -> _Shared | None:
    """Find the add of terms of two submeshes behind a sum over micro-batches."""
    region, sides = labels.region, labels.sides
    value = region.outputs[position]
    chain: list[tuple[int, int]] = []
    while value in region.maker:
        at = region.maker[value]
        readers = sides.readers.get(value, ())
        wanted = region.outputs.count(value)
        # A value that is read elsewhere as well is needed whole in any case.
        if len(readers) + wanted > 1 or at in (i for i, _ in chain):
            return None
        # The number of forward ops must not change: stages were chosen for them.
        if not sides.is_backward[at]:
            return None
        traits, operands = region.ops[at].op.traits, region.ops[at].operands
        if traits.reducer == "sum" and traits.accumulates == (0, 1):
            made = [labels.made_at.get(v) for v in operands]
            groups = {labels.group(m) for m in made if m is not None}
            is_alike = len({region.avals[v].shape for v in operands}) == 1
            if None in made or len(groups) < 2 or not is_alike:
                return None
            return _Shared(operands, tuple(reversed(chain)))
        varying = [i for i, v in enumerate(operands) if v in labels.made_at]
        if len(varying) != 1 or not _may_split(traits, varying[0], len(operands)):
            return None
        chain.append((at, varying[0]))
        value = operands[varying[0]]
    return None


def _may_split(traits: Traits, operand: int, operands: int) -> bool:
    """Whether a sum may be split into terms before an op that reads it.

    It is linear where all else that it reads is the same in all micro-batches, or free.
    """
    if traits.is_contraction:
        return False  # it would be computed twice
    is_linear = (operand,) in traits.commutes_in(operands)
    return is_linear or traits.kind is OpKind.CONVERSION


def _piece(
    apart: Apart, region: FlatRegion, found: Mapping[int, _Shared]
) -> tuple[Any, tuple[int | None, ...]]:
    """Return a micro-batch that outputs the terms, and chunks of its equations.

    Chunks are as of `Apart.at`: equations on a term run where the term is computed.
    """

    def term(value: int, chain: Sequence[tuple[int, int]], env: dict[int, Any]) -> Any:
        x = env[value]
        for at, place in chain:
            args = region.arguments(at, env)
            args[place] = x
            (x,) = region.ops[at].bind(args)
        return x

    def run(*arrays: Any) -> list[Any]:
        env = dict(zip(region.inputs, arrays, strict=True))
        every = range(len(region.ops))
        region.run(every, env, {i: str(i) for i in every})
        left: list[Any] = []
        for k, value in enumerate(region.outputs):
            if k in found:
                left += [term(v, found[k].chain, env) for v in found[k].terms]
            else:
                left.append(region.result(value, env))
        return left

    types = [region.avals[v] for v in region.inputs]
    piece, tags = untagged(without_dead_code(traced_on(run, types)))
    if not apart.at:
        return piece, ()
    return piece, tuple(None if tag is None else apart.at[int(tag)] for tag in tags)


def _after(apart: Apart, terms: Sequence[range]) -> Any:
    """Return the program after the loop, with terms as inputs in place of sums."""
    opened, consts = open_jaxpr(apart.after), jaxpr_consts(apart.after)
    count = len(opened.invars) - len(terms)
    inputs, sums = opened.invars[:count], opened.invars[count:]

    def run(*arrays: Any) -> list[Any]:
        left = arrays[count:]
        whole = []
        for places in terms:
            total = left[places[0]]
            for p in places[1:]:
                total = total + left[p]
            whole.append(total)
        return jax.core.eval_jaxpr(opened, consts, *arrays[:count], *whole)

    types = [v.aval for v in inputs]
    types += [v.aval for v, places in zip(sums, terms, strict=True) for _ in places]
    return without_dead_code(traced_on(run, types))
