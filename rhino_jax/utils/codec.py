"""Dataclasses as JSON data, and back, by the types of their fields.

A record is an object with a key per field, a tuple or frozenset a list, a mapping an
object whose keys are text: "3" of 3, "3,1" of (3, 1). Numbers that are not finite are
text, so that files are plain JSON; numpy scalars become Python's. Fields with the
metadata `OF_PROCESS` are not written. A class may define `to_json` and `from_json`
itself. An absent key has the field's default.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints


Record = TypeVar("Record")

OF_PROCESS = {"is_saved": False}
"""`metadata=` of fields that are not written: what is of one process."""


def saved_fields(kind: Any) -> tuple[str, ...]:
    """Return the names of the fields of a record that are written."""
    return tuple(
        f.name for f in fields(kind) if f.init and f.metadata.get("is_saved", True)
    )


def to_json(value: Any) -> Any:
    """Convert a record, or a container of records, to JSON data."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return {name: to_json(getattr(value, name)) for name in saved_fields(value)}
    if isinstance(value, Mapping):
        return {_key_text(key): to_json(x) for key, x in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(x) for x in value]
    if isinstance(value, frozenset):
        return sorted(map(to_json, value))
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _key_text(key: Any) -> str:
    return ",".join(map(str, key)) if isinstance(key, tuple) else str(key)


def from_json(kind: type[Record], data: Any) -> Record:
    """Convert the result of `to_json` back.

    Args:
      kind: the type of the value, a dataclass as a rule.
      data: JSON data; parts of it may be converted already.
    Raises:
      KeyError, TypeError, ValueError: the data is not that of a value of this type.
    """
    return cast(Record, _reader(cast(Any, kind))(data))


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return the function that converts JSON data to a type."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda data: data
    if kind is float:
        return float
    if hasattr(kind, "from_json"):
        own: Callable[[Any], Any] = kind.from_json
        return lambda data: data if isinstance(data, kind) else own(data)
    if is_dataclass(kind):
        return _record_reader(cast(type, kind))
    if origin in (Union, types.UnionType) and len(inner) == 2 and type(None) in inner:
        (of_one,) = (_reader(x) for x in inner if x is not type(None))
        return lambda data: None if data is None else of_one(data)
    if origin in (tuple, frozenset):
        return _sequence_reader(origin, inner)
    if origin is not None and issubclass(origin, Mapping):
        key, value = _key_reader(inner[0]), _reader(inner[1])
        return lambda data: {
            key(k): value(x) for k, x in _checked(Mapping, data).items()
        }
    # Sizes that were computed with floats are written as floats.
    accepted = (int, float) if kind is int else kind
    return lambda data: _checked(accepted, data)


def _key_reader(kind: Any) -> Callable[[str], Any]:
    """Return the function that converts the text of a key to text, int or ints."""
    if get_origin(kind) is tuple:
        return lambda text: tuple(map(int, text.split(",")))
    return int if kind is int else str


def _record_reader(kind: type) -> Callable[[Any], Any]:
    hints = get_type_hints(kind)
    readers = {name: _reader(hints[name]) for name in saved_fields(kind)}

    def read(data: Any) -> Any:
        if isinstance(data, kind):
            return data
        unknown = _checked(Mapping, data).keys() - readers.keys()
        if unknown:
            raise TypeError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
        return kind(**{name: readers[name](value) for name, value in data.items()})

    return read


def _sequence_reader(
    origin: Callable[[Any], Any], inner: tuple[Any, ...]
) -> Callable[[Any], Any]:
    if origin is frozenset or inner[1:] == (...,):
        of_one = _reader(inner[0])
        return lambda data: origin(of_one(x) for x in _checked(list | tuple, data))
    readers = tuple(map(_reader, inner))
    return lambda data: tuple(
        read(x) for read, x in zip(readers, _checked(list | tuple, data), strict=True)
    )


def _checked(kind: Any, data: Any) -> Any:
    if not isinstance(data, kind):
        raise TypeError(f"expected {getattr(kind, '__name__', kind)}, got {data!r}")
    return data
