"""Values of which some sums are open.

A value is `plain + sum over p of open[p]`, for each of several groups that it may be
open in. Either part may be missing: it is zero then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jax import lax

from rhino_jax._compat import eqn_context
from rhino_jax.ir.program import Region
from rhino_jax.passes.deferred_reductions.choice import DeferredGroup


class UnreducedValue:
    """A value of the program.

    Attributes:
      aval: shape and type.
      plain: what of it is whole; None: nothing.
      open: number of a group → array of shape (*pieces, *shape).
      is_zero: whether it is known to be zero everywhere.
    """

    def __init__(
        self,
        aval: Any,
        plain: Any | None,
        opened: Mapping[int, Any] | None = None,
        *,
        maker: Any = None,
        is_zero: bool = False,
    ) -> None:
        """`maker`: the equation on whose line sums are closed."""
        self.aval, self.plain, self.open = aval, plain, dict(opened or {})
        self.is_zero, self._maker = is_zero, maker
        self._closed = None if self.open else plain

    def closed(self) -> Any:
        """The array as the program has it, made once."""
        if self._closed is None:
            if self._maker is None:
                self._closed = self._sum()
            else:
                with eqn_context(self._maker):
                    self._closed = self._sum()
        return self._closed

    def _sum(self) -> Any:
        total = self.plain
        for array in self.open.values():
            count = array.ndim - len(self.aval.shape)
            whole = lax.reduce_sum(array, tuple(range(count)))
            total = whole if total is None else lax.add(total, whole)
        return zeros(self.aval, ()) if total is None else total


def zeros(aval: Any, pieces: Sequence[int]) -> Any:
    """A part of a value that has nothing in it."""
    return lax.full((*pieces, *aval.shape), 0, aval.dtype)


class RegionRunner(Protocol):
    """What runs the regions of a program; see `emit.InterleavedEmitter`."""

    @property
    def groups(self) -> Sequence[DeferredGroup]:
        """What is left open."""
        ...

    def held_open(self, value: int) -> list[int]:
        """The groups in which a value of the program is held open."""
        ...

    def region(
        self,
        region: Region,
        jaxpr: Any,
        consts: Sequence[Any],
        inputs: Sequence[UnreducedValue],
    ) -> list[UnreducedValue]:
        """Run all equations of a jaxpr; its results."""
        ...
