"""Layer stacks split by stage: a step with one scan over layers, as a scan per stage.

A scan over L layers reads their weights as stacks `[L, …]`. To be cut into stages, it
becomes several scans one after the other, and every stack several arrays: weights,
residuals, gradients, and optimizer state. Ops on stacks run part by part; reductions
over layers add up the parts.

The stack of one scan may be split differently from that of another, and lie on other
stages: an encoder's on the first two, a decoder's on the last two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rhino_jax._compat import (
    in_current_mesh,
    open_jaxpr,
    without_dead_code,
    without_mesh,
)
from rhino_jax.frontend.importer import import_jaxpr
from rhino_jax.ir.program import Program
from rhino_jax.passes.staged.parts import InParts, ValueParts
from rhino_jax.passes.unroll import unroll_pairs
from rhino_jax.rewrite.retraced import reimported, traced_on


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
    walk, opened = InParts(program), open_jaxpr(closed)
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
        found: list[Any] = []
        outs = walk.block(program.body, opened, (), args)
        for x, of in zip(outs, tied, strict=True):
            parts = sizes.get(of)
            found += (
                [walk.whole(x)] if parts is None else walk.parts(x, 0, parts).arrays
            )
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
