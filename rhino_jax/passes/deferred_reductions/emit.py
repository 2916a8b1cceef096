"""Retrace a program with deferred reductions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rhino_jax._compat import bind_eqn, open_jaxpr, without_dead_code
from rhino_jax.errors import InternalError
from rhino_jax.ir.factor import Rule
from rhino_jax.ir.program import Program
from rhino_jax.ir.traits import OpKind
from rhino_jax.passes.deferred_reductions.sites import (
    DeferredGroup,
    Split,
    can_split,
    from_text,
    inlined,
    is_entered,
    linear_ways,
)
from rhino_jax.passes.region_walk import run_region, run_regions
from rhino_jax.rewrite.flat import FlatOp, FlatProgram, FlatRegion
from rhino_jax.rewrite.retraced import retraced


REDUCED = -1
"""Key of the part of a value that is reduced: it has no leading dims."""

Parts = Mapping[int, Any]
"""`REDUCED` or index of a group → array of shape (*pieces of the group, *shape)."""


@dataclass(eq=False)
class UnreducedValue:
    """A value of the program: the sum of its parts, each summed over leading dims.

    Attributes:
      aval: abstract value of JAX: shape and dtype.
      parts: the parts; one that is not there is zero.
      maker: the op whose name and source line the sum gets; None: those in context.
      is_zero: whether it is known to be zero everywhere.
    """

    aval: Any
    parts: Parts
    maker: FlatOp | None = None
    is_zero: bool = False

    @property
    def groups(self) -> set[int]:
        """Indices of the groups in which it is unreduced."""
        return {*self.parts} - {REDUCED}

    @cached_property
    def whole(self) -> Any:
        """The reduced array."""
        if self.maker is None or not self.groups:
            return self._sum()
        with self.maker.context():
            return self._sum()

    def _sum(self) -> Any:
        total = self.parts.get(REDUCED)
        for g in sorted(self.groups):
            dims = range(self.parts[g].ndim - len(self.aval.shape))
            part = lax.reduce_sum(self.parts[g], tuple(dims))
            total = part if total is None else lax.add(total, part)
        return zeros(self.aval) if total is None else total


def zeros(aval: Any, pieces: Sequence[int] = ()) -> Any:
    return lax.full((*pieces, *aval.shape), 0, aval.dtype)


def defer_reductions(closed: Any, program: Program, choice: str) -> Any:
    """Rewrite a program with the deferred reductions of a choice.

    A value that is unreduced over a mesh axis of size p is an array with a leading dim
    of size p, which is meant to be sharded over that axis: partial sums then stay on
    their devices until the dim is summed.

    Args:
      closed: a closed jaxpr.
      program: the program imported from it.
      choice: see `sites.as_text`.
    Returns:
      A closed jaxpr of the same arguments, constants and results.
    Raises:
      InternalError: shapes or dtypes of results changed.
    """
    flat = inlined(program, closed)
    emitter = DeferredEmitter(flat, tuple(from_text(choice)))

    def run(*arrays: Any) -> list[Any]:
        return [v.whole for v in emitter.region(flat.top, emitter.wrapped(arrays))]

    found = without_dead_code(retraced(closed, run))
    old, new = ([v.aval for v in open_jaxpr(j).outvars] for j in (closed, found))
    if [(a.shape, a.dtype) for a in old] != [(a.shape, a.dtype) for a in new]:
        raise InternalError(
            f"Deferred reductions changed the results of `{program.name}`.",
            where=f"choice {choice}",
            numbers=f"results were {old}, are {new}",
        )
    return found


@dataclass(eq=False)
class DeferredEmitter:
    """Runs the ops of a program on unreduced values."""

    flat: FlatProgram
    groups: Sequence[DeferredGroup]

    @cached_property
    def pieces(self) -> Mapping[int, tuple[int, ...]]:
        """Leading dims of a part, by its key."""
        return {REDUCED: (), **{g: x.pieces for g, x in enumerate(self.groups)}}

    def group_of(self, op: int) -> int | None:
        """Return the first group in which an op's own sum is deferred."""
        return next((g for g, x in enumerate(self.groups) if op in x.made), None)

    def kept(self, value: int) -> set[int]:
        """Return the groups in which a value stays unreduced."""
        return {g for g, group in enumerate(self.groups) if value in group.open}

    def wrapped(self, arrays: Sequence[Any]) -> list[UnreducedValue]:
        return [UnreducedValue(jax.typeof(x), {REDUCED: x}) for x in arrays]

    def const(self, value: int) -> UnreducedValue:
        array, aval = self.flat.consts[value], self.flat.avals[value]
        is_literal = isinstance(array, np.generic | np.ndarray | float | int)
        is_zero = is_literal and np.ndim(array) == 0 and array == 0
        return UnreducedValue(aval, {REDUCED: array}, is_zero=bool(is_zero))

    def region(
        self, region: FlatRegion, inputs: Sequence[UnreducedValue]
    ) -> list[UnreducedValue]:
        """Run all ops of a region and return its outputs."""
        env: dict[int, UnreducedValue] = {}

        def read(value: int) -> UnreducedValue:
            return env[value] if value in env else self.const(value)

        def run(item: FlatOp) -> list[UnreducedValue]:
            return self.op(item, [read(v) for v in item.operands])

        run_region(region, inputs, env, run)
        return [read(v) for v in region.outputs]

    def op(
        self, item: FlatOp, operands: Sequence[UnreducedValue]
    ) -> list[UnreducedValue]:
        made: list[Parts] | None = None
        if is_entered(item) and self.changes(item):
            made = (self.scan if item.is_scan else self.remat)(item, operands)
        elif not item.regions and without_shardings(item.eqn.params) is not None:
            g = self.group_of(item.op.id)
            made = (
                self.linear(item, operands)
                if g is None
                else [self.source(item, operands, g)]
            )
        if made is not None:
            pairs = zip(item.eqn.outvars, made, strict=True)
            return [UnreducedValue(var.aval, parts, item) for var, parts in pairs]
        is_zero = item.op.traits.keeps_zeros([v.is_zero for v in operands])
        results = bind_eqn(item.eqn, [v.whole for v in operands], item.eqn.params)
        return [
            UnreducedValue(var.aval, {REDUCED: x}, is_zero=is_zero)
            for x, var in zip(results, item.eqn.outvars, strict=True)
        ]

    def changes(self, item: FlatOp) -> bool:
        """Whether an op has an unreduced result, or defers a sum in its regions."""
        return (
            any(self.kept(v) for v in item.results)
            or self.group_of(item.op.id) is not None
            or any(self.changes(x) for region in item.regions for x in region.ops)
        )

    def leaving(self, value: UnreducedValue, groups: set[int]) -> Parts:
        """Return the parts of a value that stays unreduced in some groups alone."""
        is_kept = value.groups and value.groups <= groups
        return value.parts if is_kept else {REDUCED: value.whole}

    def source(self, item: FlatOp, operands: Sequence[UnreducedValue], g: int) -> Parts:
        """Return the parts of the result of an op whose own sum is deferred."""
        op, group, parts = item.op, self.groups[g], {}
        arrays = [v.whole for v in operands]
        if op.traits.kind is OpKind.SCATTER:
            parts = {} if operands[0].is_zero else {REDUCED: arrays[0]}
            arrays[0] = zeros(operands[0].aval)
        assert op.rule and can_split(op.rule, group.made[op.id], group.pieces), op.label
        parts[g] = in_pieces(item, op.rule, arrays, group.made[op.id], group.pieces)
        return parts

    def linear(
        self, item: FlatOp, operands: Sequence[UnreducedValue]
    ) -> list[Parts] | None:
        """Return the parts of the result of an op that is linear in unreduced operands;
        None where it has to run on reduced ones."""
        ways = linear_ways(self.flat.program, item.op)
        wanted = self.kept(item.results[0]) if ways else set[int]()
        traits = item.op.traits
        is_open = (w for w in ways if any(operands[i].groups & wanted for i in w))
        way = next(is_open, None)
        if way is None:
            return None
        read: list[Parts] = [
            self.leaving(v, wanted) if i in way else {REDUCED: v.whole}
            for i, v in enumerate(operands)
        ]
        parts = {}
        for g in (REDUCED, *sorted(wanted)):
            present = [i for i in way if g in read[i]]
            if all(g == REDUCED and operands[i].is_zero for i in present):
                continue
            is_sum = traits.is_elementwise and traits.reducer == "sum"
            if len(present) == 1 and is_sum and present[0] in traits.accumulates:
                shape = *self.pieces[g], *item.eqn.outvars[0].aval.shape
                parts[g] = jnp.broadcast_to(read[present[0]][g], shape)
                continue
            arrays = [
                read[i].get(g, zeros(v.aval)) if i in way else v.whole
                for i, v in enumerate(operands)
            ]
            at = [0 if i in present else None for i in range(len(operands))]
            parts[g] = batched(item, arrays, [at] * len(self.pieces[g]))
        return [parts]

    def remat(self, item: FlatOp, operands: Sequence[UnreducedValue]) -> list[Parts]:
        """Run a recomputed region on reduced values; its results may be unreduced."""

        def inside(region: FlatRegion, arrays: Sequence[Any]) -> list[Parts]:
            outs = self.region(region, self.wrapped(arrays))
            return [*map(self.leaving, outs, map(self.kept, item.results))]

        return run_regions(item, [v.whole for v in operands], inside)

    def scan(self, item: FlatOp, operands: Sequence[UnreducedValue]) -> list[Parts]:
        """Run a scan, some of whose carries and stacked results are unreduced; the
        carries are reduced once after the loop."""
        call, (body,) = item.call, item.regions
        avals = call.carries([self.flat.avals[v] for v in body.inputs])
        wanted = [self.kept(v) for v in call.carries(body.inputs)]
        # Outside of the loop, if all iterations read them.
        consts = [
            UnreducedValue(v.aval, {REDUCED: v.whole}, is_zero=v.is_zero)
            for v in call.consts(operands)
        ]

        def carry(value: UnreducedValue, groups: set[int], also: Parts) -> Parts:
            parts = self.leaving(value, groups)
            missing = {*groups, *also} - parts.keys()
            return {**parts, **{g: zeros(value.aval, self.pieces[g]) for g in missing}}

        def inside(region: FlatRegion, inputs: Sequence[Any]) -> list[Parts]:
            carries = call.carries(inputs)
            sliced = self.wrapped(call.sliced(inputs))
            given = [*consts, *map(UnreducedValue, avals, carries), *sliced]
            outs = self.region(region, given)
            kept = map(self.kept, call.stacked(region.outputs))
            stacked = map(self.leaving, call.stacked(outs), kept)
            return [*map(carry, outs, wanted, carries), *stacked]

        init = []
        for value, groups in zip(call.carries(operands), wanted, strict=True):
            parts = carry(value, groups, {})
            is_empty = groups and value.is_zero
            init.append({g: parts[g] for g in parts if g != REDUCED or not is_empty})
        stacks = [v.whole for v in call.sliced(operands)]
        slices = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in stacks]
        while True:
            after = jax.eval_shape(
                lambda *xs: inside(body, [*consts, *xs]), *init, *slices
            )
            if all(len(a) == len(b) for a, b in zip(init, after, strict=False)):
                break
            # A reduced part of zero, for carries that the body adds one to.
            both = zip(init, after, strict=False)
            init = [{g: a[g] if g in a else zeros(b[g]) for g in b} for a, b in both]
        made = run_regions(item, [*consts, *init, *stacks], inside)
        return [
            *made[: call.num_carry],
            *(
                {g: jnp.moveaxis(x, 0, len(self.pieces[g])) for g, x in parts.items()}
                for parts in call.stacked(made)
            ),
        ]


def without_shardings(params: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return an equation's parameters without output shardings; None where one of these
    partitions a dim."""
    found = {k: params[k] for k in ("sharding", "out_sharding") if params.get(k)}
    if any(any(s.spec) for s in found.values()):
        return None
    return {**params, **dict.fromkeys(found)}


def batched(
    item: FlatOp, arrays: Sequence[Any], places: Sequence[Sequence[int | None]]
) -> Any:
    """Run an op of one result, batched over additional dims of its operands.

    Args:
      item: the op.
      arrays: its operands.
      places: for each batched dim, outermost first, its position in each operand, or
        None; positions do not count the batched dims before it.
    Returns:
      The result, with the batched dims leading.
    """
    params = without_shardings(item.eqn.params)
    assert params is not None

    def run(*xs: Any) -> Any:
        return bind_eqn(item.eqn, xs, params)[0]

    for axes in reversed(places):
        run = jax.vmap(run, in_axes=tuple(axes), out_axes=0)
    return run(*arrays)


def in_pieces(
    item: FlatOp,
    rule: Rule,
    arrays: Sequence[Any],
    split: Split,
    pieces: Sequence[int],
) -> Any:
    """Run an op that sums, and return its partial sums, of shape (*pieces, *shape);
    `split` and `pieces` are those of its `DeferredGroup`."""
    cut: dict[int, list[int]] = {}
    for piece, factor in split:
        cut.setdefault(factor, []).append(piece)
    read, marks = [], []
    for array, layout in zip(arrays, rule.operands, strict=True):
        shape: list[int] = []
        mark: list[int | None] = []
        for size, dim in zip(array.shape, layout, strict=True):
            own = cut.get(dim[0], []) if len(dim) == 1 else []
            sizes = [pieces[piece] for piece in own]
            shape += [*sizes, size // math.prod(sizes)]
            mark += [*own, None]
        read.append(array if len(shape) == array.ndim else lax.reshape(array, shape))
        marks.append(mark)
    places: list[list[int | None]] = []
    for piece in range(len(pieces)):
        places.append([m.index(piece) if piece in m else None for m in marks])
        marks = [[x for x in m if x != piece] for m in marks]
    return batched(item, read, places)
