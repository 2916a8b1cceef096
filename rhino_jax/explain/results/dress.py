"""Conversion from a data class to the class that users get, which adds only methods."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar


Face = TypeVar("Face")


def dressed(face: type[Face], data: Any) -> Face:
    """Return a dataclass's content as a class with the same fields and more methods."""
    if isinstance(data, face):
        return data
    return face(**{f.name: getattr(data, f.name) for f in fields(data)})
