"""From data to the class that users hold, which adds only methods."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar


Face = TypeVar("Face")


def dressed(face: type[Face], data: Any) -> Face:
    """What a dataclass holds, as a class that has the same fields and more methods."""
    if isinstance(data, face):
        return data
    return face(**{f.name: getattr(data, f.name) for f in fields(data)})
