"""Buffers that arguments share with results: donated, and state that comes back.

XLA refuses a call that donates an array twice without naming the arguments, and on
several devices of the CPU backend it aborts the process (jaxlib 0.10.2). So this is
checked before anything runs, as is the use of donated arrays. Arrays that are donated
or captured while the user holds references to them are copied.

`y = f(x, w); y = f(y, w)` replaces `x` by the result, though nothing is donated and no
name says so (see `rhino_jax.frontend.state`). The first call that has to move such an
array reveals it; the function is then planned again with the two tied. A warning says
why a function is planned again.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from rhino_jax._compat import is_array_deleted
from rhino_jax.errors import TraceError
from rhino_jax.frontend.call import Call, array_type, type_text
from rhino_jax.frontend.state import with_ties
from rhino_jax.frontend.trace import Traced
from rhino_jax.plan.kept import arguments_of
from rhino_jax.plan.plan import AnyPlan, PlanData


def _count_of_one_holder() -> int:
    """Return `sys.getrefcount` of an array in our list and in one other place."""
    holder = [object()]
    return next(map(sys.getrefcount, list(holder)))


_HELD_ONCE = _count_of_one_holder()


def unshared(arrays: list[Any], owned: Sequence[int]) -> list[Any]:
    """Return arrays with copies of the donated ones that the user holds elsewhere, too.

    An object's previous array is of no use to it, so it is donated without a request;
    but the user may have it in a snapshot, or in a moving average that began as a copy.

    Args:
      arrays: the arrays of a call; only this list and the user's objects may hold
        references to those at `owned`.
      owned: positions of the donated arrays that objects hold.
    """
    counts = list(map(sys.getrefcount, arrays))
    held = [i for i in owned if counts[i] > _HELD_ONCE]
    if not held:
        return arrays
    arrays = list(arrays)
    for i in held:
        arrays[i] = copied(arrays[i])
    return arrays


def copied(x: Any) -> Any:
    """Return a copy in a buffer of its own; a Python scalar as it is.

    `device_put` may share the buffer, whatever its options, where it moves an array.
    """
    return x.copy() if hasattr(x, "copy") else x


class Donations:
    """Checks the donated arguments of one function, call after call.

    Results of the last call share no buffers, so only the buffers of other arrays are
    compared: that takes microseconds each.
    """

    def __init__(
        self, name: str, paths: Sequence[str], donated: Sequence[bool]
    ) -> None:
        self._name, self._paths = name, tuple(paths)
        self._positions = tuple(i for i, gone in enumerate(donated) if gone)
        self._made: list[int] = []

    def check(self, arrays: Sequence[Any], to_move: Sequence[int] = ()) -> None:
        """Refuse a call in which a donated array is given twice.

        Args:
          arrays: the arguments.
          to_move: positions of those that are copied to other devices before the call.
        Raises:
          TraceError: an array is given twice; the error names both arguments.
        """
        if not self._positions:
            return
        ids = list(map(id, arrays))
        if self._is_fed_back(ids):
            return
        if len(set(ids)) < len(ids):
            self._refuse_twice(arrays, ids)
        if not set(self._made).issuperset(ids[i] for i in self._positions):
            copied = set(to_move)
            places = [None if i in copied else _memory(x) for i, x in enumerate(arrays)]
            self._refuse_twice(arrays, places)

    def _is_fed_back(self, ids: Sequence[int]) -> bool:
        """Whether the donated arrays come first, and are the last call's first results.

        The usual case of a training step, in a tenth of the time.
        """
        count = len(self._positions)
        return (
            self._positions[-1] == count - 1
            and ids[:count] == self._made[:count]
            and set(ids[count:]).isdisjoint(self._made)
        )

    def check_alive(self, arrays: Sequence[Any]) -> None:
        """Refuse deleted arrays.

        Raises:
          TraceError: an array is deleted; the error names the first one.
        """
        try:
            if not any(map(is_array_deleted, arrays)):
                return
        except TypeError:  # numbers, NumPy arrays, random keys
            pass
        gone = [
            path
            for path, x in zip(self._paths, arrays, strict=False)
            if getattr(x, "is_deleted", bool)()
        ]
        if gone:
            more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
            raise TraceError(
                f"`{self._name}` is given deleted arrays: `{gone[0]}`{more}.",
                where=gone[0],
                numbers=f"{len(gone)} of {len(arrays)} arrays; nothing was run and"
                " nothing is lost",
                fix="go on with what the last call returned: what it was given was"
                " donated to it; or give copies, jax.tree.map(jnp.copy, …).",
            )

    def made(self, outs: Sequence[Any]) -> None:
        """Register the results of a call."""
        if self._positions:
            self._made = list(map(id, outs))

    def _refuse_twice(self, arrays: Sequence[Any], places: Sequence[Any]) -> None:
        donated, seen = set(self._positions), dict[Any, int]()
        for i, (x, place) in enumerate(zip(arrays, places, strict=True)):
            if place is None or not _is_on_devices(x):
                continue
            first = seen.setdefault(place, i)
            if first != i and not donated.isdisjoint((first, i)):
                ways = ["donated" if k in donated else "passed" for k in (first, i)]
                one, other = self._paths[first], self._paths[i]
                raise TraceError(
                    f"`{self._name}`: one array is {ways[0]} as `{one}` and {ways[1]}"
                    f" as `{other}`.",
                    where=f"{one} and {other}",
                    numbers=f"{x.dtype}{list(x.shape)}, {x.nbytes:,} bytes, allocated"
                    " once; nothing was run and nothing is lost",
                    fix="copy one of them first: jax.tree.map(jnp.copy, …) of"
                    f" `{other}`; or do not donate it.",
                )


def _is_on_devices(x: Any) -> bool:
    return (
        isinstance(x, jax.Array)
        and not isinstance(x, jax.core.Tracer)
        and not x.is_deleted()
    )


def _memory(x: Any) -> Any:
    """Return device and buffer address of an array's first shard; None if unknown."""
    if not _is_on_devices(x) or not x.nbytes:
        return None
    try:
        shard = x.addressable_data(0)
        return next(iter(shard.devices())), shard.unsafe_buffer_pointer()
    except Exception:  # no shard in this process, or an unsupporting backend
        return None


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
