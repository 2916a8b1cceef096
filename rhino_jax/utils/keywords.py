"""What users give for keywords, read as what it means or refused in four parts."""

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
"""CP-SAT takes no larger one."""


def read_bytes(what: str, name: str, value: Any) -> int | None:
    """A size as whole bytes; text may have a unit (`"16GiB"`, `"1.5 GB"`).

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
    """A time in seconds; text may have a unit (`"300ms"`, `"2min"`).

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
    """A whole number.

    Raises:
      RhinoError: it is none, or out of range.
    """
    found = whole(value)
    if found is None or found < least or (most is not None and found > most):
        to = f" to {most}" if most is not None else " or more"
        wanted = f"a whole number, {least}{to}"
        raise _refused(what, name, value, wanted, f"{name}={max(least, 2)}")
    return found


def read_count_or(
    what: str, name: str, value: Any, word: str, *, also: str = ""
) -> int | str:
    """A whole number from 1 on, or a word.

    Args:
      also: what else may be given, as messages say it.
    Raises:
      RhinoError: it is neither.
    """
    if isinstance(value, str) and value == word:
        return value
    found = whole(value)
    if found is None or found < 1:
        wanted = f"{word!r} or a whole number, 1 or more{also}"
        raise _refused(what, name, value, wanted, f"{name}=2")
    return found


def read_choice(what: str, name: str, value: Any, known: tuple[str, ...]) -> str:
    """One of a few words.

    Raises:
      RhinoError: it is another.
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
    """A folder's path; None where there is none.

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
    """Whether, or by which function, progress is shown.

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
    """An int, of Python or NumPy; None of all else, a bool too."""
    if isinstance(value, bool | np.bool_ | np.ndarray):
        return None
    try:
        return operator.index(value) if isinstance(value, numbers.Integral) else None
    except TypeError:
        return None


def real(value: Any) -> float | None:
    """A number, of Python or NumPy; None of all else, a bool too."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def round_or(value: float, default: float) -> float:
    """To a whole number; `default` where there is none."""
    return round(value) if math.isfinite(value) else default


def brief(value: Any) -> str:
    """How a value is shown in a message: on one line, not too long."""
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
