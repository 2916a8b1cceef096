"""Run a jaxpr with some of its values split into parts along a dim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import jax
from jax import lax

from rhino_jax._compat import (
    bind_eqn,
    eqn_context,
    hide_frames,
    jaxpr_consts,
    open_jaxpr,
)
from rhino_jax.frontend.regions import REMATS, closed_region_jaxprs, evaluate_ops
from rhino_jax.frontend.registry import local_params
from rhino_jax.frontend.rules.reduce import COMBINE
from rhino_jax.ir.factor import FactorKind, Layout
from rhino_jax.ir.program import Op, Program, Region, RegionKind
from rhino_jax.ir.traits import OpKind


hide_frames(__file__)

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


@dataclass(slots=True, eq=False)
class Uniform:
    """A result that is the same at every index of some dims, as a broadcast is.

    A part of it along these is computed at its own size, and never sliced from the
    whole.

    Attributes:
      op, eqn: that compute it.
      args: operands, of which some may be uniform.
      dims: dims along which it is uniform.
      array: the whole array; None until it is needed.
    """

    op: Op
    eqn: Any
    args: tuple[Any, ...]
    dims: frozenset[int]
    array: Any = None


@dataclass(frozen=True, eq=False)
class InParts:
    """Runs a jaxpr with some of its values split into parts.

    Attributes:
      program: imported from the jaxpr.
    """

    program: Program

    def whole(self, x: Any) -> Any:
        if isinstance(x, Uniform):
            if x.array is None:
                given = [self.whole(arg) for arg in x.args]
                with eqn_context(x.eqn):
                    (x.array,) = bind_eqn(x.eqn, given, x.eqn.params)
            return x.array
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

    def _uniform(self, op: Op, eqn: Any, args: Sequence[Any]) -> Uniform | None:
        """Return an op's result as `Uniform`, or None where it is uniform along no dim.

        It is uniform along a dim where all operands with that factor are, or that is
        broadcast.
        """
        rule = op.rule
        if rule is None or op.call is not None or len(rule.results) != 1:
            return None
        found = set()
        for dim, factors in enumerate(rule.results[0]):
            if len(factors) != 1 or rule.factors[factors[0]].kind is not PARALLEL:
                continue
            places = [_place(layout, factors[0]) for layout in rule.operands]
            of = [
                x.dims if isinstance(x, Uniform) else ()
                for x, place in zip(args, places, strict=True)
                if place != -1
            ]
            at = [place for place in places if place != -1]
            is_same = all(place in dims for place, dims in zip(at, of, strict=True))
            if is_same and (at or op.traits.kind is OpKind.BROADCAST):
                found.add(dim)
        return Uniform(op, eqn, tuple(args), frozenset(found)) if found else None

    def _of_size(self, x: Uniform, dim: int, size: int) -> Any:
        """Compute a uniform value with another size of one of its dims."""
        assert x.op.rule is not None  # see `_uniform`
        rule = x.op.rule
        (factor,) = rule.results[0][dim]
        given = []
        for arg, layout in zip(x.args, rule.operands, strict=True):
            place = _place(layout, factor)
            is_whole = place in (None, -1)
            given.append(
                self.whole(arg)
                if is_whole
                else self._of_size(arg, int(place or 0), size)
            )
        shape = list(x.eqn.outvars[0].aval.shape)
        shape[dim] = size
        ins = [tuple(jax.numpy.shape(a)) for a in given]
        params = local_params(x.op.name, x.eqn.params, ins, [tuple(shape)])
        with eqn_context(x.eqn):
            (found,) = bind_eqn(x.eqn, given, params)
        return found

    def op(self, op: Op, eqn: Any, args: Sequence[Any]) -> list[Any]:
        if any(isinstance(x, ValueParts) for x in args):
            for way in (self._call, self._scan, self._by_factor):
                found = way(op, eqn, args)
                if found is not None:
                    return found
        elif (uniform := self._uniform(op, eqn, args)) is not None:
            return [uniform]
        return bind_eqn(eqn, [self.whole(x) for x in args], eqn.params)

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
        first = call.num_consts + call.num_carry
        found = {
            x.sizes for x in args[first:] if isinstance(x, ValueParts) and x.dim == 0
        }
        if len(found) != 1:
            return None
        (sizes,) = found
        consts = [self.whole(x) for x in args[: call.num_consts]]
        carry = [self.whole(x) for x in args[call.num_consts : first]]
        stacks = [self.parts(x, 0, sizes) for x in args[first:]]
        order = range(len(sizes))
        made: dict[int, list[Any]] = {}
        for k in reversed(order) if eqn.params["reverse"] else order:
            given = [*consts, *carry, *(x.arrays[k] for x in stacks)]
            outs = bind_eqn(eqn, given, {**eqn.params, "length": sizes[k]})
            carry, made[k] = outs[: call.num_carry], outs[call.num_carry :]
        count = len(eqn.outvars) - call.num_carry
        return [
            *carry,
            *(ValueParts(0, tuple(made[k][i] for k in order)) for i in range(count)),
        ]

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
        if len(cut) != 1 or len(dim) != 1:
            return None
        (factor,) = dim
        kind = rule.factors[factor].kind
        if kind not in (PARALLEL, FactorKind.REDUCE):
            return None
        places = [_place(layout, factor) for layout in rule.operands]
        results = [_place(layout, factor) for layout in rule.results]
        if None in (*places, *results) or rule.factors[factor].size != sum(sizes):
            return None
        partial = rule.partial_results(factor)
        if any(d == -1 and i not in partial for i, d in enumerate(results)):
            return None
        count = range(len(sizes))
        made = [self._part(op, eqn, args, places, results, sizes, k) for k in count]
        reducer = rule.factors[factor].reducer
        return [
            _added([m[i] for m in made], COMBINE[str(reducer)])
            if d == -1
            else ValueParts(int(d or 0), tuple(m[i] for m in made))
            for i, d in enumerate(results)
        ]

    def _part(
        self,
        op: Op,
        eqn: Any,
        args: Sequence[Any],
        places: Sequence[int | None],
        results: Sequence[int | None],
        sizes: Sequence[int],
        k: int,
    ) -> list[Any]:
        given = [
            self.whole(x) if d == -1 else self.parts(x, int(d or 0), sizes).arrays[k]
            for x, d in zip(args, places, strict=True)
        ]
        shapes = []
        for var, d in zip(eqn.outvars, results, strict=True):
            shape = list(var.aval.shape)
            if d != -1:
                shape[int(d or 0)] = sizes[k]
            shapes.append(tuple(shape))
        ins = [tuple(jax.numpy.shape(x)) for x in given]
        params = local_params(op.name, eqn.params, ins, shapes)
        return bind_eqn(eqn, given, params)


def _place(layout: Layout, factor: int) -> int | None:
    """Return the dim that is exactly a factor.

    It is -1 where no dim has the factor, None where it is a part of a dim, or in
    several.
    """
    found = [d for d, dim in enumerate(layout) if factor in dim]
    if not found:
        return -1
    return found[0] if len(found) == 1 and len(layout[found[0]]) == 1 else None


def _added(parts: Sequence[Any], combine: Callable[[Any, Any], Any]) -> Any:
    total = parts[0]
    for part in parts[1:]:
        total = combine(total, part)
    return total
