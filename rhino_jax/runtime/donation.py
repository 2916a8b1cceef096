"""Detect arrays that are donated twice, or were donated before, before anything runs.

XLA refuses such a call without naming the arguments, and on several devices of the CPU
backend it aborts the process (jaxlib 0.10.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from rhino_jax.errors import TraceError


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
