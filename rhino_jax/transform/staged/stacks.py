"""Stacks of layers in parts: a step whose layers are one loop, as a loop for each part.

A loop over L layers reads their weights as stacks `[L, …]`. To be cut into stages, it
becomes several loops one after the other, and every stack several arrays: weights, what
the forward pass leaves for the backward pass, gradients, and what optimizers keep of
them. Ops on stacks are done part by part; what sums over layers adds up the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from rhino_jax._compat import (
    hide_frames,
    in_current_mesh,
    jaxpr_consts,
    open_jaxpr,
    without_dead_code,
    without_mesh,
)
from rhino_jax.frontend.importer import import_jaxpr
from rhino_jax.ir.program import Program, RegionKind
from rhino_jax.transform.retraced import traced_on
from rhino_jax.transform.staged.parts import InParts, Parts


hide_frames(__file__)


@dataclass(frozen=True, slots=True)
class End:
    """An input or result of the step in parts.

    Attributes:
      whole: position of the input or result that it is of.
      part: which part of it along dim 0; None: it is that itself.
    """

    whole: int
    part: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Unstacked:
    """A step with its stacks in parts.

    Attributes:
      closed: closed jaxpr of the arguments in parts.
      program: imported from it.
      inputs, outputs: what each input and result is.
      sizes: layers of every part.
    """

    closed: Any
    program: Program
    inputs: tuple[End, ...]
    outputs: tuple[End, ...]
    sizes: tuple[int, ...]

    @classmethod
    def none(cls, closed: Any, program: Program) -> Unstacked:
        """The step as it is."""
        inputs = tuple(map(End, range(len(program.inputs))))
        return cls(
            closed, program, inputs, tuple(map(End, range(len(program.outputs)))), ()
        )

    @classmethod
    def of(cls, closed: Any, program: Program, shares: Sequence[int]) -> Unstacked:
        """The step in parts; of no `shares`, or without a loop to cut, as it is.

        Its equations no longer name the mesh in which they were traced: they run on
        parts of that.
        """
        with without_mesh():
            closed = in_current_mesh(closed)
        found = unstacked(closed, program, shares) if shares else None
        return cls.none(closed, program) if found is None else found

    @property
    def count(self) -> int:
        """Parts; 0 where it is as it was."""
        return len(self.sizes)


def unstacked(closed: Any, program: Program, shares: Sequence[int]) -> Unstacked | None:
    """A step with its longest loop over stacks of weights in parts; None where it has
    no such loop.

    Args:
      closed: a closed jaxpr.
      program: imported from it.
      shares: of every part, out of their sum.
    """
    stacks = _stacks(program, sum(shares))
    if stacks is None or jaxpr_consts(closed):
        return None
    length, slots = stacks
    sizes = tuple(length // sum(shares) * share for share in shares)
    walk = InParts(program, length, sizes)
    opened = open_jaxpr(closed)
    inputs: list[End] = []
    types: list[Any] = []
    for i, var in enumerate(opened.invars):
        is_stack = i in slots
        for part in range(len(sizes)) if is_stack else (None,):
            inputs.append(End(i, part))
            aval = var.aval
            if part is not None:
                aval = aval.update(shape=(sizes[part], *aval.shape[1:]))
            types.append(aval)
    outputs: list[End] = []

    def run(*arrays: Any) -> list[Any]:
        given: dict[int, list[Any]] = {}
        for end, x in zip(inputs, arrays, strict=True):
            given.setdefault(end.whole, []).append(x)
        args = [Parts(0, tuple(xs)) if i in slots else xs[0] for i, xs in given.items()]
        outs = walk.block(program.body, opened, (), args)
        outputs.clear()
        found: list[Any] = []
        for k, (x, out) in enumerate(zip(outs, program.outputs, strict=True)):
            if isinstance(x, Parts) and x.dim == 0 and out.state_of in slots:
                outputs.extend(End(k, part) for part in range(len(sizes)))
                found += x.arrays
            else:
                outputs.append(End(k))
                found.append(walk.whole(x))
        return found

    made = without_dead_code(traced_on(run, types))
    return _imported(made, program, inputs, outputs, sizes)


def _stacks(program: Program, divisor: int) -> tuple[int, frozenset[int]] | None:
    """The length of the loop that does the most, of lengths that can be divided so, and
    the inputs that are stacks of its layers: of the shape of what it reads slice by
    slice, and state."""
    loops: dict[int, float] = {}
    shapes: dict[int, set[tuple[int, ...]]] = {}
    for op, times in program.walk():
        call = op.call
        if call is None or call.kind is not RegionKind.SCAN:
            continue
        inner = sum(program.ops[o].flops for o in call.regions[0].ops)
        first = call.num_consts + call.num_carry
        loops[call.trip_count] = loops.get(call.trip_count, 0.0) + times * (
            inner * call.trip_count
        )
        shapes.setdefault(call.trip_count, set()).update(
            program.values[v].shape for v in op.operands[first:]
        )
    state = {end.state_of for end in program.outputs if end.state_of is not None}
    for length in sorted(loops, key=lambda n: -loops[n]):
        if length % divisor:
            continue
        slots = frozenset(
            i
            for i, entry in enumerate(program.inputs)
            if i in state and program.values[entry.value].shape in shapes[length]
        )
        if slots:
            return length, slots
    return None


def _imported(
    closed: Any,
    before: Program,
    inputs: Sequence[End],
    outputs: Sequence[End],
    sizes: tuple[int, ...],
) -> Unstacked:
    bounds = [*pairwise(accumulate(sizes, initial=0))]

    def path(text: str, end: End) -> str:
        if end.part is None:
            return text
        start, stop = bounds[end.part]
        return f"{text}[{start}:{stop}]"

    place = {end: i for i, end in enumerate(inputs)}
    state_of = [
        place.get(End(tied, end.part))
        if (tied := before.outputs[end.whole].state_of) is not None
        else None
        for end in outputs
    ]
    program = import_jaxpr(
        closed,
        name=before.name,
        input_paths=[path(before.inputs[e.whole].path, e) for e in inputs],
        donated=[before.inputs[e.whole].is_donated for e in inputs],
        output_paths=[path(before.outputs[e.whole].path, e) for e in outputs],
        state_of=state_of,
    )
    return Unstacked(closed, program, tuple(inputs), tuple(outputs), sizes)
