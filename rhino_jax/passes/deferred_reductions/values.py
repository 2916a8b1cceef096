"""Values with unreduced parts.

A value is `plain + sum over p of open[p]`, for each of several groups in which it may
be unreduced. Either part may be missing: it is zero then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax

from rhino_jax._compat import eqn_context


class UnreducedValue:
    """A value of the program, some of whose sums may be unreduced.

    Attributes:
      aval: abstract value of JAX: shape and dtype.
      plain: array of its reduced part; None: zero.
      open: index of a group → array of shape (*pieces, *shape).
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
        """Create a value; `maker` is the equation whose source line its sums get."""
        self.aval, self.plain, self.open = aval, plain, dict(opened or {})
        self.is_zero, self._maker = is_zero, maker
        self._closed = None if self.open else plain

    def closed(self) -> Any:
        """Return the reduced array, computed once."""
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
    """Return a part of a value that is zero, with leading dims of sizes `pieces`."""
    return lax.full((*pieces, *aval.shape), 0, aval.dtype)
