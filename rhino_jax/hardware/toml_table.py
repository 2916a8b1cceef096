"""A table of a hardware file, read key by key with errors that name the key."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rhino_jax.errors import HardwareError, nearest


MISSING = object()
"""The value that `fail` gets for a missing key."""


@dataclass(frozen=True, slots=True)
class TomlTable:
    """A table of the file.

    Attributes:
      file: name of the file, for errors.
      path: keys that lead to the table, joined by dots; empty for the whole file.
      entries: its keys and values.
    """

    file: str
    path: str
    entries: Mapping[str, Any]

    def key(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def fail(
        self, name: str, expected: str, got: object, fix: str = ""
    ) -> HardwareError:
        key = self.key(name)
        shown = "nothing" if got is MISSING else repr(got)
        what = "is missing" if got is MISSING else "is not what it must be"
        return HardwareError(
            f"hardware file: `{key}` {what}.",
            where=f"{self.file}, key `{key}`",
            numbers=f"expected {expected}, got {shown}",
            fix=fix or f"set `{key}` to {expected}.",
        )

    def refuse_unknown(self, known: Iterable[str]) -> None:
        known = tuple(known)
        for name, value in self.entries.items():
            if name not in known:
                raise HardwareError(
                    f"hardware file: `{self.key(name)}` is not a known key.",
                    where=f"{self.file}, key `{self.key(name)}`",
                    numbers=f"expected one of {', '.join(known)}, got"
                    f" {name} = {value!r}",
                    fix=f"remove or rename it.{nearest(name, known)}",
                )

    def share(self, name: str, default: float | None, most: float = 1.0) -> float:
        expected = f"a share in [0, {most:g}]"
        return self.number(name, expected, may_be_zero=True, most=most, default=default)

    def number(
        self,
        name: str,
        expected: str,
        *,
        may_be_zero: bool = False,
        most: float = math.inf,
        default: float | None = None,
    ) -> float:
        value = self.entries.get(name, MISSING if default is None else default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # Written so that NaN fails.
        if (
            not is_number
            or not (0 <= value <= most)
            or (value == 0 and not may_be_zero)
        ):
            raise self.fail(name, expected, value)
        return float(value)

    def whole(
        self, name: str, *, least: int = 1, default: int | None = None
    ) -> int | None:
        """Return an integer (`5e9` is accepted as one); None if absent, no default."""
        value = self.entries.get(name, default)
        if value is None:
            return None
        is_whole = isinstance(value, int) or (
            isinstance(value, float) and value.is_integer()
        )
        if isinstance(value, bool) or not is_whole or value < least:
            raise self.fail(name, f"a whole number of at least {least}", value)
        return int(value)

    def text(self, name: str, default: str | None = None) -> str:
        value = self.entries.get(name, MISSING if default is None else default)
        if not isinstance(value, str) or not value:
            raise self.fail(name, "a text", value)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of strings, empty if the key is absent."""
        value = self.entries.get(name, [])
        if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
            raise self.fail(name, "a list of texts", value)
        return tuple(value)

    def sizes(self, name: str) -> tuple[int, ...]:
        """Return a list of integers of at least 1, empty if the key is absent."""
        value = self.entries.get(name, [])
        if not isinstance(value, list) or not all(
            isinstance(x, int) and not isinstance(x, bool) and x >= 1 for x in value
        ):
            raise self.fail(name, "a list of whole numbers, as [4, 4]", value)
        return tuple(value)

    def one_of(self, name: str, words: tuple[str, ...], default: str) -> str:
        value = self.entries.get(name, default)
        if value not in words:
            raise self.fail(name, " or ".join(f'"{w}"' for w in words), value)
        return str(value)

    def flag(self, name: str) -> bool:
        """Return a boolean; False if the key is absent."""
        value = self.entries.get(name, False)
        if not isinstance(value, bool):
            raise self.fail(name, "true or false", value)
        return value

    def table(self, name: str) -> TomlTable:
        value = self.entries.get(name, MISSING)
        if not isinstance(value, Mapping):
            raise self.fail(name, "a table", value, f"write [{self.key(name)}].")
        return TomlTable(self.file, self.key(name), value)
