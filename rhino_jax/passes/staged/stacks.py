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
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rhino_jax._compat import (
    hide_frames,
    in_current_mesh,
    open_jaxpr,
    without_dead_code,
    without_mesh,
)
from rhino_jax.frontend.importer import import_jaxpr
from rhino_jax.ir.program import Program
from rhino_jax.passes.staged.parts import InParts, ValueParts
from rhino_jax.rewrite.retraced import traced_on


hide_frames(__file__)


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
    """

    closed: Any
    program: Program
    inputs: tuple[End, ...]
    outputs: tuple[End, ...]
    stacks: tuple[LayerStack, ...]

    @classmethod
    def none(cls, closed: Any, program: Program) -> Unstacked:
        """Return the step unchanged."""
        inputs = tuple(map(End, range(len(program.inputs))))
        return cls(
            closed, program, inputs, tuple(map(End, range(len(program.outputs)))), ()
        )

    @classmethod
    def of(
        cls, closed: Any, program: Program, stacks: Sequence[LayerStack]
    ) -> Unstacked:
        """Return the step with these stacks split; without any, unchanged.

        Its equations no longer name the mesh in which they were traced: they run on
        submeshes of that.
        """
        with without_mesh():
            closed = in_current_mesh(closed)
        return (
            unstacked(closed, program, stacks) if stacks else cls.none(closed, program)
        )

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
    def sizes(self) -> Mapping[int, tuple[int, ...]]:
        """Layers of the parts, for every input that was a stack."""
        return _sizes(self.stacks)


def _sizes(stacks: Sequence[LayerStack]) -> dict[int, tuple[int, ...]]:
    return {slot: stack.sizes for stack in stacks for slot in stack.slots}


def unstacked(closed: Any, program: Program, stacks: Sequence[LayerStack]) -> Unstacked:
    """Split the layer stacks of a step.

    Args:
      closed: a closed jaxpr without constants.
      program: imported from it.
      stacks: inputs, and the parts of each.
    """
    sizes = _sizes(stacks)
    walk, opened = InParts(program), open_jaxpr(closed)
    inputs: list[End] = []
    types: list[Any] = []
    for i, var in enumerate(opened.invars):
        for part, size in enumerate(sizes[i]) if i in sizes else ((None, 0),):
            inputs.append(End(i, part))
            aval = var.aval
            if part is not None:
                aval = aval.update(shape=(size, *aval.shape[1:]))
            types.append(aval)
    outputs: list[End] = []

    def run(*arrays: Any) -> list[Any]:
        given: dict[int, list[Any]] = {}
        for end, x in zip(inputs, arrays, strict=True):
            given.setdefault(end.whole, []).append(x)
        args = [
            ValueParts(0, tuple(xs)) if i in sizes else xs[0] for i, xs in given.items()
        ]
        outs = walk.block(program.body, opened, (), args)
        outputs.clear()
        found: list[Any] = []
        for k, (x, out) in enumerate(zip(outs, program.outputs, strict=True)):
            of = sizes.get(-1 if out.state_of is None else out.state_of)
            if of is None:
                outputs.append(End(k))
                found.append(walk.whole(x))
            else:
                outputs.extend(End(k, part) for part in range(len(of)))
                found += walk.parts(x, 0, of).arrays
        return found

    made = without_dead_code(traced_on(run, types))
    return _imported(made, program, inputs, outputs, stacks)


def _imported(
    closed: Any,
    before: Program,
    inputs: Sequence[End],
    outputs: Sequence[End],
    stacks: Sequence[LayerStack],
) -> Unstacked:
    sizes = _sizes(stacks)

    def path(text: str, end: End, stack: int | None) -> str:
        if end.part is None or stack is None:
            return text
        of = sizes[stack]
        start = sum(of[: end.part])
        return f"{text}[{start}:{start + of[end.part]}]"

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
        input_paths=[path(before.inputs[e.whole].path, e, e.whole) for e in inputs],
        donated=[before.inputs[e.whole].is_donated for e in inputs],
        output_paths=[
            path(before.outputs[e.whole].path, e, before.outputs[e.whole].state_of)
            for e in outputs
        ],
        state_of=state_of,
        while_trips=before.while_trips,
    )
    return Unstacked(closed, program, tuple(inputs), tuple(outputs), tuple(stacks))
