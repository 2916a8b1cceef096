"""Layer stacks split by stage: a step with one scan over layers, as a scan per stage.

A scan over L layers reads their weights as stacks `[L, …]`. To be cut into stages, it
becomes several scans one after the other, and every stack several arrays: weights,
residuals, gradients, and optimizer state. Ops on stacks run part by part; reductions
over layers add up the parts.

A jaxpr is run with some of its values split into parts along a dim.

The stack of one scan may be split differently from that of another, and lie on other
stages: an encoder's on the first two, a decoder's on the last two.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import jax
from jax import lax

from rhino_jax._compat import (
    bind_eqn,
    in_current_mesh,
    open_jaxpr,
    without_dead_code,
    without_mesh,
)
from rhino_jax.frontend.importer import import_jaxpr
from rhino_jax.frontend.regions import CALLS, REMATS
from rhino_jax.frontend.rules.reduce import COMBINE
from rhino_jax.ir.factor import FactorKind, dim_of
from rhino_jax.ir.program import Op, Program
from rhino_jax.ir.traits import OpKind
from rhino_jax.passes.ops_along import along
from rhino_jax.passes.region_walk import run_region
from rhino_jax.passes.unroll import unroll_pairs
from rhino_jax.rewrite.emit import bind_part
from rhino_jax.rewrite.flat import FlatOp
from rhino_jax.rewrite.flatten import flatten, plain_calls
from rhino_jax.rewrite.retraced import reimported, traced_on


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
    """An op whose result is the same at every index of some dims, as a broadcast is.

    A part of it along these is computed at its own size, and never sliced from the
    whole.

    Attributes:
      item: the op.
      args: operands, of which some may be uniform.
      dims: dims along which it is uniform.
      array: the result; None until it is needed in full.
    """

    item: FlatOp
    args: tuple[Any, ...]
    dims: frozenset[int]
    array: Any = None


def whole(x: Any) -> Any:
    """Return the array of a value that may be split, or uniform."""
    if isinstance(x, Uniform):
        if x.array is None:
            (x.array,) = x.item.bind([*map(whole, x.args)])
        return x.array
    return lax.concatenate(x.arrays, x.dim) if isinstance(x, ValueParts) else x


def in_parts(x: Any, dim: int, sizes: Sequence[int]) -> ValueParts:
    """Split a value into parts of some sizes along a dim."""
    if isinstance(x, ValueParts) and x.dim == dim and x.sizes == tuple(sizes):
        return x
    if isinstance(x, Uniform) and dim in x.dims:
        return ValueParts(dim, tuple(_of_size(x, dim, size) for size in sizes))
    x, bounds = whole(x), pairwise(accumulate(sizes, initial=0))
    return ValueParts(
        dim, tuple(lax.slice_in_dim(x, a, b, axis=dim) for a, b in bounds)
    )


def _uniform(op: Op, args: Sequence[Any]) -> frozenset[int]:
    """Return the dims along which an op's result is uniform.

    It is where all operands with that factor are, or that is broadcast.
    """
    rule, found = op.rule, set[int]()
    if rule is None or len(rule.results) != 1:
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


def _of_size(x: Uniform, dim: int, size: int) -> Any:
    """Compute a uniform value with another size of one of its dims."""
    rule = x.item.rule
    (factor,) = rule.results[0][dim]
    given = []
    for arg, layout in zip(x.args, rule.operands, strict=True):
        place = dim_of(layout, factor)  # as of `_uniform`, a dim of its own
        if place is None or place == -1:
            given.append(whole(arg))
        else:
            given.append(_of_size(arg, place, size))
    with x.item.context():
        (found,) = bind_part(x.item.eqn, given, [dim], size)
    return found


def run_in_parts(item: FlatOp, args: Sequence[Any]) -> list[Any]:
    """Run an op some of whose operands are split, or uniform."""
    if any(isinstance(x, ValueParts) for x in args):
        found = (_scan if item.is_scan else _by_factor)(item, args)
        if found is not None:
            return found
    elif dims := _uniform(item.op, args):
        return [Uniform(item, tuple(args), dims)]
    return bind_eqn(item.eqn, [*map(whole, args)], item.eqn.params)


def _scan(item: FlatOp, args: Sequence[Any]) -> list[Any] | None:
    """Run a scan as one scan per part, one after the other."""
    call, eqn = item.call, item.eqn
    sliced = call.sliced(args)
    found = {x.sizes for x in sliced if isinstance(x, ValueParts) and x.dim == 0}
    if len(found) != 1:
        return None
    (sizes,) = found
    consts, carry = [*map(whole, call.consts(args))], [*map(whole, call.carries(args))]
    stacks = [in_parts(x, 0, sizes) for x in sliced]
    order = range(len(sizes))
    made: dict[int, list[Any]] = {}
    for k in reversed(order) if eqn.params["reverse"] else order:
        given = [*consts, *carry, *(x.arrays[k] for x in stacks)]
        outs = bind_eqn(eqn, given, {**eqn.params, "length": sizes[k]})
        carry, made[k] = outs[: call.num_carry], outs[call.num_carry :]
    rows = zip(*(made[k] for k in order), strict=True)
    return [*carry, *(ValueParts(0, row) for row in rows)]


def _by_factor(item: FlatOp, args: Sequence[Any]) -> list[Any] | None:
    """Run an op part by part, where the split dim is a factor of it."""
    rule = item.op.rule
    if rule is None:
        return None
    cut = {
        (layout[x.dim], x.sizes)
        for layout, x in zip(rule.operands, args, strict=True)
        if isinstance(x, ValueParts)
    }
    dim, sizes = next(iter(cut))
    found = along(item.op, dim) if len(cut) == 1 else None
    if found is None or rule.factors[dim[0]].size != sum(sizes):
        return None
    given = [
        [whole(x)] * len(sizes) if d == -1 else in_parts(x, d, sizes).arrays
        for x, d in zip(args, found.dims, strict=True)
    ]
    made = [
        bind_part(item.eqn, own, found.results, size)
        for own, size in zip(zip(*given, strict=True), sizes, strict=True)
    ]
    return [
        functools.reduce(COMBINE[found.reducer], row) if d == -1 else ValueParts(d, row)
        for d, row in zip(found.results, zip(*made, strict=True), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class LayerStack:
    """Arrays of the same layers, to be split along dim 0.

    Attributes:
      slots: positions of the step's inputs.
      sizes: number of layers of every part; the parts are on consecutive stages.
      first: the stage of the first part; None: any.
    """

    slots: frozenset[int]
    sizes: tuple[int, ...]
    first: int | None = None


@dataclass(frozen=True, slots=True)
class End:
    """An input or result of the split step.

    Attributes:
      whole: position of the input or result of the original step.
      part: which part of it along dim 0; None: it is not split.
    """

    whole: int
    part: int | None = None


@dataclass(frozen=True, eq=False)
class Unstacked:
    """A step with its layer stacks split.

    Attributes:
      closed: closed jaxpr with the split arguments.
      program: imported from it.
      inputs, outputs: the original of each input and result.
      stacks: the stacks that are split.
      unrolled_trips: loops over layers of up to so many trips are unrolled.
    """

    closed: Any
    program: Program
    inputs: tuple[End, ...]
    outputs: tuple[End, ...]
    stacks: tuple[LayerStack, ...]
    unrolled_trips: int = 0

    @classmethod
    def of(
        cls,
        closed: Any,
        program: Program,
        stacks: Sequence[LayerStack],
        unrolled_trips: int = 0,
    ) -> Unstacked:
        """Return the step with these stacks split; without any, unchanged.

        Its equations no longer name the mesh in which they were traced: they run on
        submeshes of that.

        Args:
          closed: a closed jaxpr; `program`: imported from it.
          stacks: inputs, and the parts of each.
          unrolled_trips: trips of the longest loop over layers that is unrolled.
        """
        with without_mesh():
            closed = in_current_mesh(closed)
        if stacks:
            found = unstacked(closed, program, stacks)
        else:
            inputs, outputs = map(len, (program.inputs, program.outputs))
            ends = tuple(map(End, range(max(inputs, outputs))))
            found = cls(closed, program, ends[:inputs], ends[:outputs], ())
        return found.unrolled(unrolled_trips) if unrolled_trips else found

    def unrolled(self, trips: int) -> Unstacked:
        """Return the step with loops over layers of up to `trips` trips unrolled."""
        closed = unroll_pairs(self.closed, self.program, trips)
        program = reimported(closed, self.program)
        return replace(self, closed=closed, program=program, unrolled_trips=trips)

    @cached_property
    def together(self) -> tuple[frozenset[int], ...]:
        """All positions of the inputs of every part of every stack.

        These are weights of some layers, and their optimizer state.
        """
        of = {slot: k for k, stack in enumerate(self.stacks) for slot in stack.slots}
        found: dict[tuple[int, int], set[int]] = {}
        for i, end in enumerate(self.inputs):
            if end.part is not None:
                found.setdefault((of[end.whole], end.part), set()).add(i)
        return tuple(map(frozenset, found.values()))

    @cached_property
    def sizes(self) -> Mapping[int | None, tuple[int, ...]]:
        """Layers of the parts, for every input that was a stack."""
        return _sizes(self.stacks)


def _sizes(stacks: Sequence[LayerStack]) -> dict[int | None, tuple[int, ...]]:
    return {slot: stack.sizes for stack in stacks for slot in stack.slots}


def unstacked(closed: Any, program: Program, stacks: Sequence[LayerStack]) -> Unstacked:
    """Split the layer stacks of a step.

    Args:
      closed: a closed jaxpr without constants.
      program: imported from it.
      stacks: inputs, and the parts of each.
    """
    sizes, tied = _sizes(stacks), [out.state_of for out in program.outputs]
    opened = open_jaxpr(closed)
    flat = flatten(program, closed, plain_calls(program, CALLS - REMATS))
    inputs = [e for i in range(len(opened.invars)) for e in _ends(i, sizes.get(i))]
    outputs = [e for k, of in enumerate(tied) for e in _ends(k, sizes.get(of))]

    def aval(end: End) -> Any:
        whole = opened.invars[end.whole].aval
        if end.part is None:
            return whole
        return whole.update(shape=(sizes[end.whole][end.part], *whole.shape[1:]))

    def run(*arrays: Any) -> list[Any]:
        given: dict[int, list[Any]] = {}
        for end, x in zip(inputs, arrays, strict=True):
            given.setdefault(end.whole, []).append(x)
        args = [
            ValueParts(0, tuple(xs)) if i in sizes else xs[0] for i, xs in given.items()
        ]
        env, found = dict[int, Any](), list[Any]()

        def op(item: FlatOp) -> list[Any]:
            return run_in_parts(item, [flat.read(v, env) for v in item.operands])

        run_region(flat.top, args, env, op)
        for v, of in zip(flat.top.outputs, tied, strict=True):
            x, parts = flat.read(v, env), sizes.get(of)
            found += [whole(x)] if parts is None else in_parts(x, 0, parts).arrays
        return found

    made = without_dead_code(traced_on(run, map(aval, inputs)))
    place = {end: i for i, end in enumerate(inputs)}
    found = import_jaxpr(
        made,
        name=program.name,
        input_paths=[
            _path(program.inputs[e.whole].path, e, sizes.get(e.whole)) for e in inputs
        ],
        donated=[program.inputs[e.whole].is_donated for e in inputs],
        output_paths=[
            _path(program.outputs[e.whole].path, e, sizes.get(tied[e.whole]))
            for e in outputs
        ],
        state_of=[
            None if (of := tied[e.whole]) is None else place.get(End(of, e.part))
            for e in outputs
        ],
        while_trips=program.while_trips,
    )
    return Unstacked(made, found, tuple(inputs), tuple(outputs), tuple(stacks))


def _ends(whole: int, sizes: Sequence[int] | None) -> list[End]:
    """Return the parts of an input or result."""
    return [End(whole)] if sizes is None else [End(whole, k) for k in range(len(sizes))]


def _path(text: str, end: End, sizes: Sequence[int] | None) -> str:
    """Return the path of a part, with its range of layers."""
    if end.part is None or sizes is None:
        return text
    start = sum(sizes[: end.part])
    return f"{text}[{start}:{start + sizes[end.part]}]"
