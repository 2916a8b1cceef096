"""Run a jaxpr with some of its values split into parts along a dim."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import jax
from jax import lax

from rhino_jax._compat import (
    bind_eqn,
    eqn_context,
    jaxpr_consts,
    open_jaxpr,
)
from rhino_jax.frontend.regions import REMATS, closed_region_jaxprs, evaluate_ops
from rhino_jax.frontend.rules.reduce import COMBINE
from rhino_jax.ir.factor import FactorKind, dim_of
from rhino_jax.ir.program import Op, Program, Region, RegionKind
from rhino_jax.ir.traits import OpKind
from rhino_jax.passes.ops_along import along
from rhino_jax.rewrite.emit import bind_part


PARALLEL = FactorKind.PARALLEL


@dataclass(frozen=True, slots=True)
class ValueParts:
    """A value split into arrays along a dim."""

    dim: int
    arrays: tuple[Any, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the parts along the dim."""
        return tuple(jax.numpy.shape(x)[self.dim] for x in self.arrays)


@dataclass(frozen=True, slots=True)
class Uniform:
    """An op whose result is the same at every index of some dims, as a broadcast is.

    A part of it along these is computed at its own size, and never sliced from the
    whole.

    Attributes:
      op, eqn: the op.
      args: operands, of which some may be uniform.
      dims: dims along which it is uniform.
      array: the result.
    """

    op: Op
    eqn: Any
    args: tuple[Any, ...]
    dims: frozenset[int]
    array: Any


@dataclass(frozen=True, eq=False)
class InParts:
    """Runs a jaxpr with some of its values split into parts.

    Attributes:
      program: imported from the jaxpr.
    """

    program: Program

    def whole(self, x: Any) -> Any:
        x = x.array if isinstance(x, Uniform) else x
        return lax.concatenate(x.arrays, x.dim) if isinstance(x, ValueParts) else x

    def parts(self, x: Any, dim: int, sizes: Sequence[int]) -> ValueParts:
        """Split a value into parts of some sizes along a dim."""
        if isinstance(x, ValueParts) and x.dim == dim and x.sizes == tuple(sizes):
            return x
        if isinstance(x, Uniform) and dim in x.dims:
            return ValueParts(dim, tuple(self._of_size(x, dim, size) for size in sizes))
        x = self.whole(x)
        bounds = pairwise(accumulate(sizes, initial=0))
        return ValueParts(
            dim, tuple(lax.slice_in_dim(x, a, b, axis=dim) for a, b in bounds)
        )

    def block(
        self, region: Region, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]
    ) -> list[Any]:
        return evaluate_ops(self.program, region, jaxpr, consts, args, self.op)

    def _uniform(self, op: Op, args: Sequence[Any]) -> frozenset[int]:
        """Return the dims along which an op's result is uniform.

        It is where all operands with that factor are, or that is broadcast.
        """
        rule, found = op.rule, set[int]()
        if rule is None or op.call is not None or len(rule.results) != 1:
            return frozenset()
        for dim, factors in enumerate(rule.results[0]):
            if len(factors) != 1 or rule.factors[factors[0]].kind is not PARALLEL:
                continue
            places = [dim_of(layout, factors[0]) for layout in rule.operands]
            at = [pair for pair in zip(args, places, strict=True) if pair[1] != -1]
            is_same = all(isinstance(x, Uniform) and d in x.dims for x, d in at)
            if is_same and (at or op.traits.kind is OpKind.BROADCAST):
                found.add(dim)
        return frozenset(found)

    def _of_size(self, x: Uniform, dim: int, size: int) -> Any:
        """Compute a uniform value with another size of one of its dims."""
        assert x.op.rule is not None  # see `_uniform`
        rule = x.op.rule
        (factor,) = rule.results[0][dim]
        given = []
        for arg, layout in zip(x.args, rule.operands, strict=True):
            place = dim_of(layout, factor)
            is_part = place is not None and place != -1
            given.append(
                self._of_size(arg, int(place or 0), size)
                if is_part
                else self.whole(arg)
            )
        with eqn_context(x.eqn):
            (found,) = bind_part(x.eqn, given, [dim], size)
        return found

    def op(self, op: Op, eqn: Any, args: Sequence[Any]) -> list[Any]:
        if any(isinstance(x, ValueParts) for x in args):
            for way in (self._call, self._scan, self._by_factor):
                found = way(op, eqn, args)
                if found is not None:
                    return found
        made = bind_eqn(eqn, [self.whole(x) for x in args], eqn.params)
        dims = self._uniform(op, args)
        return [Uniform(op, eqn, tuple(args), dims, *made)] if dims else made

    def _call(self, op: Op, eqn: Any, args: Sequence[Any]) -> list[Any] | None:
        call = op.call
        if call is None or call.kind is not RegionKind.CALL or op.name in REMATS:
            return None
        (body,) = closed_region_jaxprs(eqn)
        return self.block(call.regions[0], open_jaxpr(body), jaxpr_consts(body), args)

    def _scan(self, op: Op, eqn: Any, args: Sequence[Any]) -> list[Any] | None:
        """Run a scan as one scan per part, one after the other."""
        call = op.call
        if call is None or call.kind is not RegionKind.SCAN:
            return None
        sliced = call.sliced(args)
        found = {x.sizes for x in sliced if isinstance(x, ValueParts) and x.dim == 0}
        if len(found) != 1:
            return None
        (sizes,) = found
        consts = [self.whole(x) for x in call.consts(args)]
        carry = [self.whole(x) for x in call.carries(args)]
        stacks = [self.parts(x, 0, sizes) for x in sliced]
        order = range(len(sizes))
        made: dict[int, list[Any]] = {}
        for k in reversed(order) if eqn.params["reverse"] else order:
            given = [*consts, *carry, *(x.arrays[k] for x in stacks)]
            outs = bind_eqn(eqn, given, {**eqn.params, "length": sizes[k]})
            carry, made[k] = outs[: call.num_carry], outs[call.num_carry :]
        rows = zip(*(made[k] for k in order), strict=True)
        return [*carry, *(ValueParts(0, row) for row in rows)]

    def _by_factor(self, op: Op, eqn: Any, args: Sequence[Any]) -> list[Any] | None:
        """Run an op part by part, where the split dim is a factor of it."""
        rule = op.rule
        if rule is None or op.call is not None:
            return None
        cut = {
            (rule.operands[i][x.dim], x.sizes)
            for i, x in enumerate(args)
            if isinstance(x, ValueParts)
        }
        dim, sizes = next(iter(cut))
        found = along(op, dim) if len(cut) == 1 else None
        if found is None or rule.factors[dim[0]].size != sum(sizes):
            return None
        given = [
            [self.whole(x)] * len(sizes) if d == -1 else self.parts(x, d, sizes).arrays
            for x, d in zip(args, found.dims, strict=True)
        ]
        made = [
            bind_part(eqn, own, found.results, size)
            for own, size in zip(zip(*given, strict=True), sizes, strict=True)
        ]
        return [
            functools.reduce(COMBINE[found.reducer], row)
            if d == -1
            else ValueParts(d, row)
            for d, row in zip(found.results, zip(*made, strict=True), strict=True)
        ]
