"""Detect results that come back as arguments: state that only the calls reveal.

`y = f(x, w); y = f(y, w)` replaces `x` by the result, though nothing is donated and no
name says so (see `rhino_jax.frontend.state`). The first call that has to move such an
array reveals it; the function is then planned again with the two tied.

Explain to the user why a function is planned again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rhino_jax.frontend.call import Call, array_type, type_text
from rhino_jax.frontend.state import with_ties
from rhino_jax.frontend.trace import Traced
from rhino_jax.plan.kept import arguments_of
from rhino_jax.plan.plan import AnyPlan, PlanData


def kept_text(before: PlanData, plan: PlanData) -> str:
    """Return a sentence that says whether mesh and state stay where they were."""
    if plan.mesh_axes != before.mesh_axes:
        return "Nothing fits on the mesh as it was: state moves to another."
    old = {(leaf.path, leaf.shape): leaf.spec for leaf in before.inputs}
    same = [leaf for leaf in plan.inputs if (leaf.path, leaf.shape) in old]
    moved = sum(old[leaf.path, leaf.shape] != leaf.spec for leaf in same)
    if not same:
        return "The mesh stays."
    if moved:
        return f"{moved} of {len(same)} shared arrays move, or nothing would fit."
    return f"The mesh, and the layout of the {len(same)} arrays that both have, stay."


def difference(before: Traced, call: Call) -> str | None:
    """Return the first difference between a call and an earlier traced one.

    None where only static values or the mesh differ, which the user knows.
    """
    now = call.signature()
    if (now.statics, now.static_leaves) != (
        before.signature.statics,
        before.signature.static_leaves,
    ):
        return None
    if now.tree != before.signature.tree:
        is_mode = call.lifted is not None and now.arrays == before.signature.arrays
        if is_mode and call.leaves.paths == before.arguments.paths:
            return None  # an object changed mode, as from training to evaluation
        return "the structure of the arguments is another"
    for path, x, was in zip(
        call.leaves.array_paths,
        call.leaves.arrays,
        before.arguments.arrays,
        strict=True,
    ):
        if array_type(x) != array_type(was):
            return f"`{path}` is {type_text(x)}, was {type_text(was)}"
    return None


class Feedback:
    """The results of the last call that could come back as arguments."""

    def __init__(self, traced: Traced) -> None:
        program = traced.program
        tied = {o.state_of for o in program.outputs}
        free = {
            _type_of(program, e.value)
            for i, e in enumerate(program.inputs)
            if not e.is_const and i not in tied
        } - {None}
        self._candidates = [
            k
            for k, o in enumerate(program.outputs)
            if o.state_of is None and _type_of(program, o.value) in free
        ]
        self._tied = tied
        self._given: list[tuple[int, weakref.ref[Any]]] = []

    def gave(self, outs: Sequence[Any]) -> None:
        """Remember the results of a call, by weak references."""
        if self._candidates:
            self._given = [(k, weakref.ref(outs[k])) for k in self._candidates]

    def ignore(self) -> None:
        """Stop remembering results."""
        self._candidates, self._given = [], []

    def came_back(
        self, arrays: Sequence[Any], to_move: Sequence[int]
    ) -> dict[int, int]:
        """Return result → argument, for results of the last call that are to move.

        Args:
          arrays: the arguments of this call.
          to_move: positions of the arguments that have to be moved.
        """
        found: dict[int, int] = {}
        for i in to_move:
            if i in self._tied:
                continue
            for k, given in self._given:
                if k not in found and given() is arrays[i]:
                    found[k] = i
        return found


def _type_of(program: Any, value: int) -> tuple[tuple[int, ...], str] | None:
    """Return shape and dtype of a value; None for a scalar, which is never sharded."""
    found = program.values[value]
    return (found.shape, found.dtype) if found.rank else None


def tied(traced: Traced, ties: dict[int, int]) -> Traced:
    """Return the trace with further results tied to the arguments that they replace."""
    return replace(traced, program=with_ties(traced.program, ties), after_passes={})


def without(plan: AnyPlan, arguments: set[int]) -> AnyPlan:
    """Return the plan without some arguments, so that their layout is not preserved."""
    known = arguments_of(plan)
    left = [i for i in range(len(known)) if i not in arguments]
    return replace(
        plan,
        inputs=(*(known[i] for i in left), *plan.inputs[len(known) :]),
        in_leaf_positions=tuple(plan.in_leaf_positions[i] for i in left),
    )
