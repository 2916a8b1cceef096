"""Retrace a program with deferred reductions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from rhino_jax._compat import (
    bind_eqn,
    is_literal,
    jaxpr_consts,
    like_jaxpr,
    open_jaxpr,
    retrace,
    without_dead_code,
)
from rhino_jax.errors import InternalError
from rhino_jax.frontend.regions import (
    PLAIN_CALLS,
    REMATS,
    call_scope,
    closed_region_jaxprs,
    evaluate_ops,
    with_jaxprs,
)
from rhino_jax.ir.program import Op, Program, Region, RegionKind
from rhino_jax.ir.traits import OpKind
from rhino_jax.passes.deferred_reductions import loops
from rhino_jax.passes.deferred_reductions.loops import UnreducedValue, zeros
from rhino_jax.passes.deferred_reductions.pieces import (
    DeferredGroup,
    batched,
    can_split,
    from_text,
    in_pieces,
    unsaid,
)
from rhino_jax.passes.deferred_reductions.reach import linear_ways
from rhino_jax.rewrite.retraced import retraced


def defer_reductions(closed: Any, program: Program, choice: str) -> Any:
    """Rewrite a program with the deferred reductions of a choice.

    A value that is unreduced over a mesh axis of size p is an array with a leading dim
    of size p, which is meant to be sharded over that axis: partial sums then stay on
    their devices until the dim is summed.

    Args:
      closed: a closed jaxpr.
      program: the program imported from it.
      choice: see `choice.as_text`.
    Returns:
      A closed jaxpr of the same arguments, constants and results.
    Raises:
      InternalError: shapes or dtypes of results changed.
    """
    emitter = DeferredEmitter(program, tuple(from_text(choice)))
    opened = open_jaxpr(closed)
    count = len(opened.invars)

    def run(*arrays: Any) -> list[Any]:
        values = [_plain(x, v) for x, v in zip(arrays, opened.invars, strict=False)]
        outs = emitter.region(program.body, opened, arrays[count:], values)
        return [v.closed() for v in outs]

    found = without_dead_code(retraced(closed, run))
    old, new = ([v.aval for v in open_jaxpr(j).outvars] for j in (closed, found))
    if [(a.shape, a.dtype) for a in old] != [(a.shape, a.dtype) for a in new]:
        raise InternalError(
            f"Deferred reductions changed the results of `{program.name}`.",
            where=f"choice {choice}",
            numbers=f"results were {old}, are {new}",
        )
    return found


def _plain(array: Any, atom: Any) -> UnreducedValue:
    """Wrap an array as a reduced value."""
    is_zero = is_literal(atom) and bool(np.all(array == 0))
    return UnreducedValue(atom.aval, array, is_zero=is_zero)


@dataclass(slots=True)
class DeferredEmitter:
    """Emitter of a program's equations with unreduced values.

    Attributes:
      program: the program that ids in the groups refer to.
      groups: the deferred reductions.
    """

    program: Program
    groups: Sequence[DeferredGroup]
    _made: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        # An op that two groups name is unreduced in the first, reduced for the other.
        groups = reversed([*enumerate(self.groups)])
        self._made = {op: g for g, group in groups for op in group.made}

    def held_open(self, value: int) -> list[int]:
        """Return the indices of the groups in which a value stays unreduced."""
        return [g for g, group in enumerate(self.groups) if value in group.open]

    def region(
        self,
        region: Region,
        jaxpr: Any,
        consts: Sequence[Any],
        inputs: Sequence[UnreducedValue],
    ) -> list[UnreducedValue]:
        """Run all equations of a jaxpr and return its outputs.

        Args:
          region: the region of the program.
          jaxpr: the open jaxpr that the region was imported from.
          consts: arrays of its constants.
          inputs: values of its inputs.
        """
        return evaluate_ops(
            self.program, region, jaxpr, consts, inputs, self.op, _plain
        )

    def op(
        self, op: Op, eqn: Any, operands: list[UnreducedValue]
    ) -> list[UnreducedValue]:
        """Run one equation."""
        if op.call is None:
            if op.id in self._made:
                return [self.source(op, eqn, operands)]
            found = self.linear(op, eqn, operands)
            return self.as_it_was(op, eqn, operands) if found is None else [found]
        if not self.changes(op):
            return self.as_it_was(op, eqn, operands)
        name = eqn.primitive.name
        if name in PLAIN_CALLS:
            (body,) = closed_region_jaxprs(eqn)
            inner, consts = open_jaxpr(body), jaxpr_consts(body)
            with call_scope(eqn):
                return self.region(op.call.regions[0], inner, consts, operands)
        if name in REMATS:
            return self.remat(op, eqn, operands)
        if op.call.kind is RegionKind.SCAN:
            (body,) = closed_region_jaxprs(eqn)
            inside = partial(
                self.region, op.call.regions[0], open_jaxpr(body), jaxpr_consts(body)
            )
            pieces = [group.pieces for group in self.groups]
            return loops.run(eqn, op.call, operands, inside, self.held_open, pieces)
        return self.as_it_was(op, eqn, operands)

    def remat(
        self, op: Op, eqn: Any, operands: Sequence[UnreducedValue]
    ) -> list[UnreducedValue]:
        """Run a recomputed region (`jax.checkpoint`) on reduced values.

        Its results may be unreduced.
        """
        (body,) = closed_region_jaxprs(eqn)
        inner, consts = open_jaxpr(body), jaxpr_consts(body)
        assert op.call is not None
        (region,) = op.call.regions
        kept = [self.held_open(v) for v in op.results]
        found: list[tuple[bool, list[int]]] = []

        def inside(*arrays: Any) -> list[Any]:
            values = [
                UnreducedValue(v.aval, x)
                for v, x in zip(inner.invars, arrays, strict=True)
            ]
            outs = self.region(region, inner, consts, values)
            found.clear()
            leaving: list[Any] = []
            for value, groups in zip(outs, kept, strict=True):
                if not value.open or not set(value.open) <= set(groups):
                    found.append((True, []))
                    leaving.append(value.closed())
                    continue
                found.append((value.plain is not None, list(value.open)))
                leaving += [] if value.plain is None else [value.plain]
                leaving += value.open.values()
            return leaving

        traced = SimpleNamespace(
            invars=inner.invars, debug_info=inner.debug_info.with_unknown_names()
        )
        new, new_consts = retrace(inside, traced)
        params = with_jaxprs(eqn, [like_jaxpr(body, new, new_consts)])
        arrays = iter(bind_eqn(eqn, [v.closed() for v in operands], params))
        results: list[UnreducedValue] = []
        for var, (has_plain, groups) in zip(eqn.outvars, found, strict=True):
            plain = next(arrays) if has_plain else None
            opened = {g: next(arrays) for g in groups}
            results.append(UnreducedValue(var.aval, plain, opened, maker=eqn))
        return results

    def changes(self, op: Op) -> bool:
        """Whether an op with regions has an unreduced result, or defers a sum
        inside."""
        assert op.call is not None
        return any(self.held_open(v) for v in op.results) or any(
            inner in self._made
            or (self.program.ops[inner].call and self.changes(self.program.ops[inner]))
            for region in op.call.regions
            for inner in region.ops
        )

    def as_it_was(
        self, op: Op, eqn: Any, operands: Sequence[UnreducedValue]
    ) -> list[UnreducedValue]:
        """Bind an equation to reduced operands."""
        results = bind_eqn(eqn, [v.closed() for v in operands], eqn.params)
        is_zero = op.traits.keeps_zeros([v.is_zero for v in operands])
        return [
            UnreducedValue(var.aval, x, is_zero=is_zero)
            for x, var in zip(results, eqn.outvars, strict=True)
        ]

    def source(
        self, op: Op, eqn: Any, operands: Sequence[UnreducedValue]
    ) -> UnreducedValue:
        """Run an op whose own sum is deferred."""
        g, (result,) = self._made[op.id], eqn.outvars
        group = self.groups[g]
        split, rule = group.made[op.id], op.rule
        assert rule is not None and can_split(rule, split, group.pieces), op.label
        if unsaid(eqn.params) is None:
            return self.as_it_was(op, eqn, operands)[0]
        arrays = [v.closed() for v in operands]
        plain = None
        if op.traits.kind is OpKind.SCATTER:
            plain = None if operands[0].is_zero else arrays[0]
            arrays[0] = zeros(operands[0].aval, ())
        parts = in_pieces(eqn, rule, arrays, split, group.pieces)
        return UnreducedValue(result.aval, plain, {g: parts}, maker=eqn)

    def linear(
        self, op: Op, eqn: Any, operands: list[UnreducedValue]
    ) -> UnreducedValue | None:
        """Run an op on unreduced operands in which it is linear.

        Args:
          op: the op.
          eqn: its equation.
          operands: its operands.
        Returns:
          Its result, unreduced; None where the op has to run on reduced operands.
        """
        wanted = self.held_open(op.results[0]) if op.results else []
        way = self.way(op, operands, wanted)
        if way is None or unsaid(eqn.params) is None:
            return None
        others = [v.closed() if i not in way else None for i, v in enumerate(operands)]
        kept: list[UnreducedValue] = []
        for i, v in enumerate(operands):
            is_wanted = i in way and set(v.open) <= set(wanted)
            kept.append(
                v
                if is_wanted
                else UnreducedValue(v.aval, v.closed(), is_zero=v.is_zero)
            )
        opened = {}
        for g in wanted:
            if any(g in kept[i].open for i in way):
                arrays = [
                    kept[i].open.get(g) if i in way else x for i, x in enumerate(others)
                ]
                opened[g] = self.part(op, eqn, kept, arrays, way, self.groups[g].pieces)
        plain = None
        if any(kept[i].plain is not None and not kept[i].is_zero for i in way):
            arrays = [kept[i].plain if i in way else x for i, x in enumerate(others)]
            plain = self.part(op, eqn, kept, arrays, way, ())
        return UnreducedValue(eqn.outvars[0].aval, plain, opened, maker=eqn)

    def way(
        self, op: Op, operands: Sequence[UnreducedValue], wanted: Sequence[int]
    ) -> tuple[int, ...] | None:
        """Return the operands in which an op is linear, if one of them is unreduced.

        Args:
          op: the op.
          operands: its operands.
          wanted: indices of the groups in which its result stays unreduced.
        Returns:
          Positions of the operands; None where no such operand is unreduced.
        """
        for way in linear_ways(self.program, op):
            if any(g in operands[i].open for i in way for g in wanted):
                return way
        return None

    def part(
        self,
        op: Op,
        eqn: Any,
        operands: Sequence[UnreducedValue],
        arrays: list[Any],
        way: Sequence[int],
        pieces: Sequence[int],
    ) -> Any:
        """Compute the reduced part of a linear op's result, or that of one group.

        Args:
          op: the op.
          eqn: its equation.
          operands: its operands.
          arrays: that part of each operand in `way`, None for zero; other operands
            reduced.
          way: positions of the operands in which the op is linear.
          pieces: sizes of the leading dims; empty for the reduced part.
        """
        present = [i for i in way if arrays[i] is not None]
        if len(present) == 1 and self.is_added_to(op, present[0]):
            return arrays[present[0]]
        is_open = [i in present and bool(pieces) for i in range(len(arrays))]
        for i in way:
            if arrays[i] is None:
                arrays[i] = zeros(operands[i].aval, ())
        if not pieces:
            return bind_eqn(eqn, arrays, eqn.params)[0]
        place = [0 if opened else None for opened in is_open]
        return batched(eqn, arrays, [place] * len(pieces))

    def is_added_to(self, op: Op, operand: int) -> bool:
        """Whether an op adds all else to an operand, element by element."""
        traits = op.traits
        is_sum = traits.is_elementwise and traits.reducer == "sum"
        return is_sum and operand in traits.accumulates
