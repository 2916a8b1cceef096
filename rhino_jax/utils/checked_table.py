"""Tables of plain values, as of TOML files, checked by the types of records."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from rhino_jax.errors import RhinoError, check_keys, nearest


Record = TypeVar("Record")

Numbers = tuple[tuple[str, str, float], ...]
"""(End of the name of a number, its unit; what it may be; the largest), the first of
which counts."""

FINITE: Numbers = (("", "a finite number >= 0", sys.float_info.max),)


def is_number(value: Any, least: float = 0, most: float = math.inf) -> bool:
    """Whether a value is a number, and no bool, in a range; NaN is not."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and least <= value <= most


def is_whole(value: Any, least: int = 1) -> bool:
    """Whether a value is an integer of at least some number; `5e9` is one."""
    return is_number(value, least) and value == value // 1 < math.inf


@dataclass(frozen=True, slots=True)
class CheckedTable:
    """A table, with its place for errors.

    Attributes:
      entries: its keys and values.
      what: what it is, at the start of messages.
      file: the file or call that it comes from.
      error: class of the errors.
      path: keys that lead to it, joined by dots; empty for the whole file.
      numbers: what numbers may be, by their units; 0 is refused where that says
        "above 0".
      least: smallest value of whole numbers, by key, where it is not 1.
    """

    entries: Mapping[str, Any]
    what: str
    file: str
    error: type[RhinoError]
    path: str = ""
    numbers: Numbers = FINITE
    least: Mapping[str, int] = field(default_factory=dict)

    def key(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def fail(
        self,
        name: str,
        expected: str,
        got: object = MISSING,
        fix: str = "",
        known: Sequence[str] = (),
    ) -> RhinoError:
        """Return the error of a key that is not what it must be, or missing.

        Args:
          name: the key.
          expected: what it must be.
          got: its value; MISSING: there is none.
          fix: what to do; empty: to set it so.
          known: names that it may be.
        """
        key = self.key(name)
        close = nearest(got, known) if isinstance(got, str) else ""
        words = f"{self.what}: `{key}` is not {expected}.{close}"
        return self.error(
            f"{self.what} has no `{key}`." if got is MISSING else words,
            where=f"{self.file}, key `{key}`",
            numbers=f"expected {expected},"
            f" got {'nothing' if got is MISSING else repr(got)}"
            f"{', known: ' * bool(known)}{', '.join(known)}",
            fix=fix or f"set `{key}` to {expected}.",
        )

    def check(
        self,
        is_good: bool,
        name: str,
        value: Any,
        expected: str,
        known: Sequence[str] = (),
    ) -> None:
        """Raise the error of a key unless its value is good; see `fail`."""
        if not is_good:
            raise self.fail(name, expected, value, known=known)

    def refuse_unknown(self, known: Iterable[str]) -> None:
        named = {self.key(name): value for name, value in self.entries.items()}
        check_keys(self.error, self.what, named, map(self.key, known), self.file)

    def get(self, name: str, hint: Any, default: Any = MISSING, unit: str = "") -> Any:
        """Return a checked value.

        Args:
          name: the key.
          hint: its type.
          default: value of an absent key; MISSING: there must be one.
          unit: a name that ends as the key's unit does; empty: the key's own.
        """
        expected, is_good, convert = self._format(unit or name, hint)
        value = self.entries.get(name, default)
        if value is default and default is not MISSING:
            return default
        is_empty = value in ([], ()) and default is MISSING
        self.check(is_good(value) and not is_empty, name, value, expected)
        return convert(value)

    def _format(
        self, name: str, hint: Any
    ) -> tuple[str, Callable[[Any], bool], Callable[[Any], Any]]:
        """Return what a value of a type must be, whether one is, and its conversion."""
        inner = get_args(hint)
        if get_origin(hint) is Literal:
            return " or ".join(map(repr, inner)), inner.__contains__, str
        if get_origin(hint) is tuple:
            of, is_one, _ = self._format("", inner[0])
            expected = f"a list, each element {of}"
            return (
                expected,
                lambda x: isinstance(x, list | tuple) and all(map(is_one, x)),
                tuple,
            )
        if hint is bool:
            return "true or false", lambda x: isinstance(x, bool), bool
        if hint is str:
            return "a text", lambda x: isinstance(x, str) and x != "", str
        if int in (hint, *inner):
            least = self.least.get(name, 1)
            return f"a whole number >= {least}", lambda x: is_whole(x, least), int
        every = ((said, most) for end, said, most in self.numbers if name.endswith(end))
        expected, most = next(every)
        may_be_zero = "above 0" not in expected
        is_good = lambda x: is_number(x, most=most) and (x > 0 or may_be_zero)  # noqa: E731
        return expected, is_good, float

    def values(self, kind: Any, names: Iterable[str]) -> dict[str, Any]:
        """Return the values of some fields of a record, or their defaults."""
        hints, known = get_type_hints(kind), {f.name: f.default for f in fields(kind)}
        return {n: self.get(n, hints[n], known[n]) for n in names}

    def record(self, kind: type[Record]) -> Record:
        """Return the record that the table, and nothing but it, describes."""
        names = tuple(get_type_hints(kind))
        self.refuse_unknown(names)
        return kind(**self.values(kind, names))

    def table(self, name: str) -> CheckedTable:
        value = self.entries.get(name, MISSING)
        if not isinstance(value, Mapping):
            raise self.fail(name, "a table", value, f"write [{self.key(name)}].")
        return replace(self, entries=value, path=self.key(name))
