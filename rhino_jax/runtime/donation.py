"""Detect arrays that are donated twice, or were donated before, before anything runs.

XLA refuses such a call without naming the arguments, and on several devices of the CPU
backend it aborts the process (jaxlib 0.10.2).

Copy arrays that are donated or captured while the user holds references to them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax

from rhino_jax.errors import TraceError


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
        self._made: frozenset[int] = frozenset()

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
        if len(set(map(id, arrays))) < len(arrays):
            self._refuse_twice(arrays, [id(x) for x in arrays])
        if not all(id(arrays[i]) in self._made for i in self._positions):
            copied = set(to_move)
            places = [None if i in copied else _memory(x) for i, x in enumerate(arrays)]
            self._refuse_twice(arrays, places)

    def check_alive(self, arrays: Sequence[Any]) -> None:
        """Refuse deleted arrays.

        Raises:
          TraceError: an array is deleted; the error names the first one.
        """
        gone = [
            path
            for path, x in zip(self._paths, arrays, strict=False)
            if isinstance(x, jax.Array)
            and not isinstance(x, jax.core.Tracer)
            and x.is_deleted()
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
            self._made = frozenset(map(id, outs))

    def _refuse_twice(self, arrays: Sequence[Any], places: Sequence[Any]) -> None:
        donated, seen = set(self._positions), dict[Any, int]()
        for i, (x, place) in enumerate(zip(arrays, places, strict=True)):
            if place is None or not _is_on_devices(x):
                continue
            first = seen.setdefault(place, i)
            if first != i and not donated.isdisjoint((first, i)):
                raise self._twice(first, i, arrays[i], donated)

    def _twice(self, first: int, second: int, x: Any, donated: set[int]) -> TraceError:
        ways = ["donated" if i in donated else "passed" for i in (first, second)]
        one, other = self._paths[first], self._paths[second]
        return TraceError(
            f"`{self._name}`: one array is {ways[0]} as `{one}` and {ways[1]} as"
            f" `{other}`.",
            where=f"{one} and {other}",
            numbers=f"{x.dtype}{list(x.shape)}, {x.nbytes:,} bytes, held once; nothing"
            " was run and nothing is lost",
            fix=f"copy one of them first: jax.tree.map(jnp.copy, …) of `{other}`; or"
            " do not donate it.",
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
