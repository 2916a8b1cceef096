"""Validation of the values of a suite's file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rhino_jax.bench.errors import BenchError
from rhino_jax.errors import check_keys, nearest
from rhino_jax.models.config import ModelConfigError
from rhino_jax.models.workload import Workload
from rhino_jax.units import parse_bytes


@dataclass(frozen=True, slots=True)
class FilePlace:
    """Location in a file, for errors on its values."""

    file: str
    what: str

    def check(
        self,
        is_good: bool,
        key: str,
        value: Any,
        expected: str,
        known: Sequence[str] = (),
    ) -> None:
        if is_good:
            return
        close = nearest(value, known) if isinstance(value, str) else ""
        raise BenchError(
            f"{self.what}: `{key}` is not {expected}.{close}",
            where=f"{self.file}, key `{key}`",
            numbers=f"got {value!r}"
            + (f", known: {', '.join(known)}" if known else ""),
            fix=f"change `{key}`.",
        )

    def check_keys(
        self, table: Mapping[str, Any], known: Sequence[str], required: Sequence[str]
    ) -> None:
        check_keys(BenchError, self.what, table, known, self.file)
        for key in required:
            if key not in table:
                raise BenchError(
                    f"{self.what} has no `{key}`.",
                    where=self.file,
                    numbers=f"required: {', '.join(required)}",
                    fix=f"add the key `{key}`.",
                )


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def memory_of(
    row: Mapping[str, Any], at: FilePlace
) -> tuple[float | None, float | None, str]:
    """Return a row's `memory_share`, `memory_room` and `memory`, checked."""
    share = row.get("memory_share")
    is_share = share is None or (is_number(share) and 0 < share <= 1)
    at.check(is_share, "memory_share", share, "a share, > 0 and at most 1")
    room = row.get("memory_room")
    is_share = room is None or (is_number(room) and 0 <= room <= 1)
    at.check(is_share, "memory_room", room, "a share, from 0 to 1")
    at.check(
        None in (share, room), "memory_room", room, "left out beside `memory_share`"
    )
    memory = row.get("memory", "")
    is_size = isinstance(memory, str) and (not memory or parse_bytes(memory))
    at.check(bool(is_size), "memory", memory, "a size, as '6GiB'")
    return (
        None if share is None else float(share),
        None if room is None else float(room),
        memory,
    )


def built(
    make: Callable[..., Workload], name: str, overrides: Mapping[str, Any]
) -> Workload:
    """Return the workload that a function makes.

    Args:
      make: the function.
      name: name of the model, for messages.
      overrides: keywords of the function.

    Raises:
      ModelConfigError: it has no such keyword.
    """
    known = inspect.signature(make).parameters
    check_keys(
        ModelConfigError, f"the model {name!r}", overrides, known, make.__module__
    )
    return make(**overrides)
