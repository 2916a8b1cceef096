"""Read the values of users' keywords, or refuse them with four-part errors."""

from __future__ import annotations

import math
import numbers
import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rhino_jax.errors import RhinoError, nearest
from rhino_jax.units import parse_bytes, parse_seconds


LARGEST_SEED = 2**31 - 1
"""Largest seed that CP-SAT accepts."""


def read_bytes(what: str, name: str, value: Any) -> int | None:
    """Read a size as an integer number of bytes; text may have a unit.

    As `"16GiB"` or `"1.5 GB"`. None for None.

    Raises:
      RhinoError: it is no positive, finite size.
    """
    if value is None:
        return None
    found = parse_bytes(value) if isinstance(value, str) else real(value)
    if found is None or not 0 < round_or(found, -1) < math.inf:
        raise _refused(what, name, value, "a positive size in bytes", f"{name}='16GiB'")
    return round(found)


def read_seconds(what: str, name: str, value: Any) -> float | None:
    """Read a time in seconds; text may have a unit.

    As `"300ms"` or `"2min"`. None for None.

    Raises:
      RhinoError: it is no positive, finite time.
    """
    if value is None:
        return None
    found = parse_seconds(value) if isinstance(value, str) else real(value)
    if found is None or not 0 < found < math.inf:
        raise _refused(what, name, value, "a positive time in seconds", f"{name}=5")
    return found


def read_count(
    what: str, name: str, value: Any, *, least: int = 0, most: int | None = None
) -> int:
    """Read an integer; see `read_count_or`."""
    return int(read_count_or(what, name, value, None, least=least, most=most))


def read_count_or(
    what: str,
    name: str,
    value: Any,
    word: str | None,
    *,
    least: int = 1,
    most: int | None = None,
    also: str = "",
) -> int | str:
    """Read an integer, or a word.

    Args:
      what: name of the calling API, for messages.
      name: name of the keyword.
      value: the value that the user gave.
      word: the word that is accepted; None: none is.
      least: smallest number that is accepted.
      most: largest number that is accepted; None: no limit.
      also: further accepted values, as text for messages.
    Raises:
      RhinoError: it is neither, or out of range.
    """
    if isinstance(value, str) and value == word:
        return value
    found = whole(value)
    if found is None or found < least or (most is not None and found > most):
        to = f" to {most}" if most is not None else " or more"
        either = "" if word is None else f"{word!r} or "
        wanted = f"{either}a whole number, {least}{to}{also}"
        raise _refused(what, name, value, wanted, f"{name}={max(least, 2)}")
    return found


def read_choice(what: str, name: str, value: Any, known: tuple[str, ...]) -> str:
    """Read one of a few words.

    Raises:
      RhinoError: it is another value.
    """
    if isinstance(value, str) and value in known:
        return value
    hint = nearest(value, known) if isinstance(value, str) else ""
    raise RhinoError(
        f"{what}: {name} {brief(value)} is not known.{hint}",
        where=f"{name}=",
        numbers=f"known: {', '.join(known)}",
        fix=f"write {' or '.join(f'{name}={k!r}' for k in known)}.",
    )


def read_folder(what: str, name: str, value: Any) -> Path | None:
    """Read the path of a folder; None for None.

    Raises:
      RhinoError: it is no path.
    """
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not str(value).strip():
        raise _refused(what, name, value, "the path of a folder", f'{name}="passes"')
    return Path(value)


def read_progress(
    what: str, value: Any
) -> bool | Callable[[float | None, float | None], None]:
    """Read whether, or by which function, progress is reported.

    Raises:
      RhinoError: it is neither a bool nor a function.
    """
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if callable(value) and not isinstance(value, type):
        return value
    raise _refused(
        what,
        "progress",
        value,
        "True, False, or a function of (best, bound) in seconds",
        "progress=False",
    )


def whole(value: Any) -> int | None:
    """Return a Python or NumPy integer as an int.

    None for other values, bools included.
    """
    if isinstance(value, bool | np.bool_ | np.ndarray):
        return None
    try:
        return operator.index(value) if isinstance(value, numbers.Integral) else None
    except TypeError:
        return None


def real(value: Any) -> float | None:
    """Return a Python or NumPy real number as a float.

    None for other values, bools included.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def round_or(value: float, default: float) -> float:
    """Round to an integer; `default` where the value is not finite."""
    return round(value) if math.isfinite(value) else default


def brief(value: Any) -> str:
    """Return the text of a value for a message: one line of at most 80 characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}…"


def _refused(what: str, name: str, value: Any, wanted: str, example: str) -> RhinoError:
    return RhinoError(
        f"{what}: {name} must be {wanted}.",
        where=f"{name}=",
        numbers=f"got {brief(value)} ({type(value).__name__})",
        fix=f"leave it out, or write {example}.",
    )
