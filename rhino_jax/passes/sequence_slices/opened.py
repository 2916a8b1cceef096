"""A micro-batch with calls inlined: layer scans unrolled, `jax.checkpoint` removed.

Recomputed regions are inlined in the backward pass, and compute the same values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rhino_jax._compat import (
    bind_eqn,
    is_literal,
    jaxpr_consts,
    open_jaxpr,
    tagged,
    untagged,
)
from rhino_jax.attention.masks import Bounds, evaluated, exactly
from rhino_jax.frontend.importer import import_jaxpr
from rhino_jax.frontend.regions import (
    call_scope,
    closed_region_jaxprs,
    evaluate,
    inline_call,
    region_kind,
)
from rhino_jax.ir.program import Program, RegionKind
from rhino_jax.passes.staged.apart import Apart
from rhino_jax.passes.staged.sides import sides_of
from rhino_jax.rewrite.flat import FlatOp, FlatProgram
from rhino_jax.rewrite.flatten import flatten
from rhino_jax.rewrite.numbers import NumberTable, ValueNumbers
from rhino_jax.rewrite.retraced import reimported, retraced
from rhino_jax.rewrite.trips import array_of, run_trips


MAX_LAYERS = 128
"""Largest number of steps of a scan over layers.

The deepest of the models that are planned here has 118 (PaLM 540B), GPT-3 96.
"""


@dataclass(frozen=True, eq=False)
class OpenedProgram:
    """A micro-batch with calls inlined, and its equal values.

    Attributes:
      flat: the micro-batch, of the arguments and results of `Apart.piece`.
      sources: for every equation the equation of `Apart.piece` that it is a part of.
      is_backward: for every equation, whether it is in the backward pass.
      weights: positions of the inputs that depend on other arrays than the data.
      numbers: value → number, the same for equal values.
      twins: value of the backward pass → the equal value of the forward pass.
      bounds: number → bounds of the elements of values that are known before the
        forward pass; None where nothing is known.
    """

    flat: FlatProgram
    sources: tuple[int, ...]
    is_backward: tuple[bool, ...]
    weights: frozenset[int]
    numbers: dict[int, int] = field(default_factory=dict)
    twins: dict[int, int] = field(default_factory=dict)
    bounds: dict[int, Bounds | None] = field(default_factory=dict)

    @property
    def ops(self) -> tuple[FlatOp, ...]:
        """The ops, with their equations."""
        return self.flat.top.ops

    @property
    def program(self) -> Program:
        """The program that ids refer to."""
        return self.flat.program

    def bounds_of(self, value: int) -> Bounds | None:
        """Return the bounds of a value."""
        return self.bounds.get(self.numbers[value])

    def evaluate(self, each: FlatOp, number: Callable[[int], int]) -> None:
        """Find the bounds of an op's results, given the numbers of values; of equal
        ones once."""
        made = {*map(number, each.results)}
        if not self.bounds.keys() >= made:
            operands = [self.bounds.get(number(v)) for v in each.operands]
            self.bounds.update(dict.fromkeys(made, evaluated(each.eqn, operands)))


def opened(apart: Apart, lengths: Collection[int]) -> OpenedProgram:
    """Inline a micro-batch's calls and unroll its layer scans.

    Args:
      apart: the step.
      lengths: scans with so many steps may be over the sequence, and are not unrolled.
    """
    sides, jaxpr = sides_of(apart), open_jaxpr(apart.piece)
    count, at = len(jaxpr.invars), itertools.count()
    maker = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}

    def run(eqn: Any, operands: list[Any]) -> list[Any]:
        kind = region_kind(eqn) if _is_open(eqn, lengths) else None
        if kind is RegionKind.SCAN:
            with call_scope(eqn):
                return run_trips(eqn, operands, run)
        arrays = [*map(array_of, operands)]
        if kind is RegionKind.CALL:
            return inline_call(eqn, arrays, run)
        return bind_eqn(eqn, arrays, eqn.params)

    def of_source(eqn: Any, operands: list[Any]) -> list[Any]:
        with tagged(str(next(at))):
            return run(eqn, operands)

    def all_of(*arrays: Any) -> list[Any]:
        found = evaluate(jaxpr, arrays[count:], arrays[:count], of_source)
        results = []
        for v, x in zip(jaxpr.outvars, found, strict=True):
            with tagged(str(None if is_literal(v) else maker.get(v))):
                results.append(array_of(x))
        return results

    closed, tags = untagged(retraced(apart.piece, all_of))
    sources = tuple(int(str(tag)) for tag in tags)
    program = reimported(closed, sides.program)
    inputs = enumerate(sides.region.inputs)
    found = OpenedProgram(
        flatten(program, closed, lambda op: False),
        sources,
        tuple(sides.is_backward[i] for i in sources),
        frozenset(i for i, v in inputs if v in sides.parameters),
    )
    _find_equal(apart, found)
    return found


def _is_open(eqn: Any, lengths: Collection[int]) -> bool:
    bodies = closed_region_jaxprs(eqn)
    if any(np.ndim(c) for body in bodies for c in jaxpr_consts(body)):
        return False  # arrays would become constants of the program
    if region_kind(eqn) is RegionKind.SCAN:
        length = eqn.params["length"]
        return length <= MAX_LAYERS and length not in lengths
    return region_kind(eqn) is RegionKind.CALL


def _find_equal(apart: Apart, found: OpenedProgram) -> None:
    """Number the values of a micro-batch, and evaluate what it reads.

    Args:
      apart: the step; what it computes before the micro-batches is numbered, too.
      found: its micro-batch, calls inlined.
    """
    table = NumberTable()

    def numbered(
        flat: FlatProgram, given: dict[int, int], arrays: Sequence[Any]
    ) -> ValueNumbers:
        """Number the values of a program, of which `arrays` are the last inputs."""
        values = ValueNumbers(flat, given, table, is_deep=False)
        last = zip(reversed(flat.top.inputs), reversed(arrays), strict=False)
        for v, array in (*last, *flat.consts.items()):
            found.bounds[values.number(v)] = exactly(array)
        return values

    once = flatten(import_jaxpr(apart.once, name=""), apart.once, is_top_entered=False)
    top, consts = once.top, jaxpr_consts(apart.once)
    entering = top.outputs[: len(apart.entering)]
    # What leaves micro-batches is not known.
    arrays = [*apart.captured, *(None for _ in apart.leaving), *consts]
    number = numbered(once, {}, arrays).number
    for i in sorted(top.needed(entering)[0]):
        found.evaluate(top.ops[i], number)
    given = dict(zip(found.flat.top.inputs[1:], map(number, entering), strict=False))
    found.numbers.update(numbered(found.flat, given, jaxpr_consts(apart.piece)).of)
    forward: dict[int, int] = {}
    for each, is_backward in zip(found.ops, found.is_backward, strict=True):
        for value in each.results:
            own = found.numbers[value]
            if not is_backward:
                forward.setdefault(own, value)
            elif own in forward:
                found.twins[value] = forward[own]
