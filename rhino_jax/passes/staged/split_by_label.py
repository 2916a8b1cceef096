"""Backward scans split in two (what is waited for, and gradients of weights), and sums
over micro-batches of terms of two submeshes: each accumulates its own.

A scan over layers, differentiated, computes in each step the gradient that the next one
reads, and those of the layer's weights, which nothing reads. As one op both would be
waited for. Split in two, the first scan computes the gradient that is passed along, and
stacks what the second one reads of it.

The gradient of a weight that is read in two places is a sum of two. Where these are on
different submeshes, one of them would be sent for every micro-batch; as two sums, it is
sent once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import jax

from rhino_jax._compat import (
    bind_eqn,
    jaxpr_consts,
    open_jaxpr,
    untagged,
    without_dead_code,
)
from rhino_jax.frontend.regions import REMATS
from rhino_jax.ir.traits import OpKind
from rhino_jax.passes.microbatch.cut import LoopCrossing
from rhino_jax.passes.region_walk import run_region
from rhino_jax.passes.split_scan import scan_body, scan_in_two
from rhino_jax.passes.staged.apart import Apart
from rhino_jax.passes.staged.labels import Labels
from rhino_jax.rewrite.flat import FlatOp, FlatRegion
from rhino_jax.rewrite.retraced import traced_on


def apart_loops(apart: Apart, labels: Labels) -> Apart:
    """Return the step with backward scans split in two, or itself where it has none.

    Args:
      apart: the step.
      labels: of its micro-batches, with backward passes whole.
    """
    region, waited_for = labels.region, labels.waited_for[1]
    loops: dict[FlatOp, Callable[[Sequence[Any]], list[Any]]] = {}
    for each, label in zip(region.ops, labels.of, strict=True):
        wanted = [k for k, v in enumerate(each.results) if v in waited_for]
        is_back = label is not None and labels.turn(label) == 1
        if is_back and wanted and each.is_scan:
            # Recomputation in a layer under `jax.checkpoint` runs in the first scan
            # alone: the second reads what it needs of it from stacks.
            body = scan_body(
                each.eqn,
                lambda eqn: eqn.primitive.name in ("jit", "pjit", *REMATS),
            )
            run_both, second = scan_in_two(each, body, wanted)
            if any(body.ops[k].op.traits.is_contraction for k in second):
                loops[each] = run_both
    if not loops:
        return apart

    def run(*arrays: Any) -> list[Any]:
        env = dict[int, Any]()

        def op(each: FlatOp) -> list[Any]:
            operands = [region.read(v, env) for v in each.operands]
            if each in loops:
                return loops[each](operands)
            return bind_eqn(each.eqn, operands, each.eqn.params)

        run_region(region, arrays, env, op)
        return [region.result(v, env) for v in region.outputs]

    types = [region.avals[v] for v in region.inputs]
    return replace(apart, piece=without_dead_code(traced_on(run, types)))


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
        once=_once(apart, places),
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
        # An op that is linear where all else that it reads is the same in all
        # micro-batches, or free, is done to each term; a contraction would be twice.
        is_linear = tuple(varying) in traits.commutes_in(len(operands))
        is_linear = is_linear or traits.kind is OpKind.CONVERSION
        if len(varying) != 1 or traits.is_contraction or not is_linear:
            return None
        chain.append((at, varying[0]))
        value = operands[varying[0]]
    return None


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


def _once(apart: Apart, terms: Sequence[range]) -> Any:
    """Return the program outside of the loop, with terms as inputs in place of sums."""
    opened, consts = open_jaxpr(apart.once), jaxpr_consts(apart.once)
    count = len(opened.invars) - len(terms)
    inputs, sums = opened.invars[:count], opened.invars[count:]

    def run(*arrays: Any) -> list[Any]:
        left = arrays[count:]
        whole = [reduce(add, left[of.start : of.stop]) for of in terms]
        return jax.core.eval_jaxpr(opened, consts, *arrays[:count], *whole)

    types = [v.aval for v in inputs]
    types += [v.aval for v, places in zip(sums, terms, strict=True) for _ in places]
    return without_dead_code(traced_on(run, types))
