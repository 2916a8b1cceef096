"""Run a scan trip by trip: its body is written once for each.

What it stacks stays in slices, which another scan that is run so reads one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax import lax

from rhino_jax._compat import hide_frames, jaxpr_consts, open_jaxpr, scan_counts
from rhino_jax.frontend.regions import closed_region_jaxprs, evaluate


hide_frames(__file__)


@dataclass(eq=False)
class StackedSlices:
    """The slices that a scan stacks, until they are read as one array.

    Attributes:
      slices: one of each trip.
    """

    slices: list[Any]

    @cached_property
    def whole(self) -> Any:
        """The stack."""
        return lax.concatenate([lax.expand_dims(x, [0]) for x in self.slices], 0)


def array_of(value: Any) -> Any:
    """Return the array of a value that may be `StackedSlices`."""
    return value.whole if isinstance(value, StackedSlices) else value


class ArraySlices:
    """The slices of arrays along dim 0: each is taken once, for all loops that read it.

    A forward and a backward loop over layers so read the same slices of their weights.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[Any, Any]] = {}

    def at(self, x: Any, i: int) -> Any:
        """Return a slice of an array, or of `StackedSlices`."""
        if isinstance(x, StackedSlices):
            return x.slices[i]
        key = id(x), i
        if key not in self._known:  # with the array itself, whose id is then its own
            self._known[key] = x, lax.index_in_dim(x, i, 0, keepdims=False)
        return self._known[key][1]


def run_trips(
    eqn: Any,
    operands: Sequence[Any],
    run: Callable[[Any, list[Any]], Sequence[Any]],
    slices: ArraySlices | None = None,
) -> list[Any]:
    """Run a scan trip by trip.

    Args:
      eqn: the scan.
      operands: arrays, or `StackedSlices`.
      run: runs an equation of its body; see `evaluate`.
      slices: of arrays that other scans read, too; None: there are none.
    Returns:
      The carries, and `StackedSlices` of what it stacks.
    """
    (closed,) = closed_region_jaxprs(eqn)
    body, constants = open_jaxpr(closed), jaxpr_consts(closed)
    num_consts, num_carry = scan_counts(eqn.params)
    first = num_consts + num_carry
    consts = [*map(array_of, operands[:num_consts])]
    carry = [*map(array_of, operands[num_consts:first])]
    order = range(int(eqn.params["length"]))
    made: dict[int, list[Any]] = {}
    slices = slices or ArraySlices()
    for i in reversed(order) if eqn.params["reverse"] else order:
        inputs = [*consts, *carry, *(slices.at(x, i) for x in operands[first:])]
        results = evaluate(body, constants, inputs, run)
        carry = [*results[:num_carry]]
        made[i] = [*map(array_of, results[num_carry:])]
    rows = zip(*(made[i] for i in order), strict=True)
    return [*carry, *(StackedSlices([*slices]) for slices in rows)]
