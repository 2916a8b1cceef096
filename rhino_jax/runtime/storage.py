"""Track which arrays are in interleaved storage: as the plan requests, and as known.

An array does not carry the order of its elements, and one in the wrong order gives
wrong numbers and no error. So every array in interleaved storage is registered for as
long as it lives, whoever made it, and a call accepts no other where its plan has one.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType

from rhino_jax.errors import RhinoError
from rhino_jax.ir.program import Program
from rhino_jax.ir.transform import InterleavedOrder, stored_in_blocks
from rhino_jax.passes.interleaved import all_stored, all_written
from rhino_jax.plan.plan import PlanData
from rhino_jax.runtime.constraints import explicit_part


Dims = tuple[tuple[int, InterleavedOrder], ...]
"""(dim, order) of an array's interleaved dims; empty: the default order."""

_KNOWN: dict[int, tuple[weakref.ref[Any], Dims]] = {}
"""id of an array → (weak reference to it, its interleaved dims)."""


def remember(x: Any, dims: Dims) -> Any:
    """Register the storage order of an array; returns the array."""
    if dims and isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        key = id(x)
        _KNOWN[key] = weakref.ref(x, lambda _: _KNOWN.pop(key, None)), dims
    return x


def dims_of(x: Any) -> Dims:
    """Return the registered storage order of an array; empty if there is none."""
    found = _KNOWN.get(id(x))
    return found[1] if found is not None and found[0]() is x else ()


def stored_arguments(plan: PlanData) -> dict[str, Dims]:
    """Return tree path → storage order of the arguments in interleaved storage."""
    stored = stored_in_blocks(plan.transforms)
    return {plan.inputs[slot].path: dims for slot, dims in stored.items()}


def in_order(x: Any, have: Dims, want: Dims) -> Any:
    """Return an array in another storage order, on the same devices or on the host."""
    if have == want:
        return x
    if not isinstance(x, jax.Array):
        return all_stored(all_written(x, have), want)
    mesh = getattr(x.sharding, "mesh", None)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        made = _reorder(x.sharding, have, want)(x)
    if (
        len(devices := made.sharding.device_set) > 1
        and next(iter(devices)).platform == "cpu"
    ):
        jax.block_until_ready(made)  # see `SpmdExecutable`
    return remember(made, want)


@functools.lru_cache(maxsize=256)
def _reorder(sharding: Any, have: Dims, want: Dims) -> Any:
    """Return the compiled reordering function for arrays of one sharding."""

    def run(x: Any) -> Any:
        return all_stored(all_written(x, have), want)

    mesh = getattr(sharding, "mesh", None)
    if mesh is not None and AxisType.Explicit in mesh.axis_types:
        run = jax.sharding.auto_axes(
            run, axes=mesh.axis_names, out_sharding=explicit_part(sharding)
        )
    return jax.jit(run, out_shardings=sharding)


@dataclass(frozen=True, slots=True)
class Storage:
    """The storage order of a program's arguments and results.

    Attributes:
      name: name of the program.
      paths: tree paths of its inputs.
      inputs, outputs: position → storage order, of those in interleaved storage.
    """

    name: str
    paths: tuple[str, ...]
    inputs: Mapping[int, Dims]
    outputs: Mapping[int, Dims]

    @classmethod
    def of(cls, program: Program, plan: PlanData) -> Storage:
        inputs = stored_in_blocks(plan.transforms)
        outputs = {
            i: inputs[out.state_of]
            for i, out in enumerate(program.outputs)
            if out.state_of in inputs
        }
        paths = tuple(entry.path for entry in program.inputs)
        return cls(program.name, paths, inputs, outputs)

    def check(self, arrays: Sequence[Any]) -> None:
        """Refuse arguments that are not in the plan's storage order.

        Raises:
          RhinoError: an argument is, as far as is known, in another order.
        """
        if not self.inputs and not _KNOWN:
            return
        for i, x in enumerate(arrays):
            have, want = dims_of(x), self.inputs.get(i, ())
            if have != want:
                raise other_order(f"`{self.name}`", self.paths[i], have, want)

    def check_no_trace(self) -> None:
        """Refuse to be traced where arguments are in interleaved storage.

        Raises:
          RhinoError: there are such arguments: inside of `jit`, `grad` and `vmap` their
            storage order is unknown.
        """
        for i, dims in self.inputs.items():
            raise RhinoError(
                f"`{self.name}` was called inside of a trace (jit, grad, vmap), where"
                " nobody can tell whether its arguments are stored in blocks.",
                where=self.paths[i],
                numbers=f"its plan stores it in {said(dims)}",
                fix="call it outside, or plan it with storage='as written'.",
            )

    def stored(self, arrays: Sequence[Any]) -> list[Any]:
        """Return arguments in the program's storage order."""
        return [
            in_order(x, dims_of(x), self.inputs.get(i, ()))
            for i, x in enumerate(arrays)
        ]

    def written(self, outs: Sequence[Any]) -> list[Any]:
        """Return results in default order."""
        return [in_order(x, self.outputs.get(i, ()), ()) for i, x in enumerate(outs)]

    def gave(self, outs: Sequence[Any]) -> None:
        """Register the storage order of results."""
        for i, dims in self.outputs.items():
            remember(outs[i], dims)


def said(dims: Dims) -> str:
    """Return the text of a storage order, for messages."""
    each = [f"{blocks} along dim {dim}" for dim, blocks in dims]
    return " and ".join(each) or "the order that is written"


def other_order(what: str, path: str, have: Dims, want: Dims) -> RhinoError:
    """Return the error of an array that is, or may be, in another storage order."""
    if want:
        fix = (
            "plan.put(tree) takes arrays as they are written, plan.init makes them;"
            " plan.put(tree, stored=True) takes copies of what a step gave, and what"
            " was computed from it element by element."
        )
    else:
        fix = "give plan.as_written(tree), or plan this function with like=."
    return RhinoError(
        f"{what}: this array is not known to be stored as it is read.",
        where=path,
        numbers=f"read in {said(want)}; known to be in"
        f" {said(have) if have else 'no blocks'}",
        fix=fix,
    )
