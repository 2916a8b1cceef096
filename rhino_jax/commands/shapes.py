"""Abstract arguments from a TOML file, for planning without writing Python.

    init = "train:init"            # optional: what this function returns (run on
                                   # shapes only) comes first among the arguments
    donate_argnums = [0, 1]        # optional, as in jax.jit; so is static_argnums

    [[args]]                       # the next positional argument: a dict of arrays
    tokens = "int32[64,1024]"
    [args.targets]                 # dicts nest
    labels = "int32[64,1024]"

    [kwargs]                       # keyword arguments
    mask = "bool[64,1024]"
    deterministic = true           # numbers and booleans are passed as they are

An argument that is not a dict is written in place, as in
`args = ["float32[8,128]", {w = "float32[128,512]"}]`; lists become lists.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from rhino_jax.errors import RhinoError, check_keys, nearest


class ShapesError(RhinoError, ValueError):
    """A file of shapes is malformed."""


@dataclass(frozen=True, slots=True)
class ArgumentShapes:
    """Arguments that a file describes.

    Attributes:
      init: `module:function` whose result comes first among the arguments, or empty.
      args: positional arguments, arrays as ShapeDtypeStructs.
      kwargs: keyword arguments.
      options: `donate_argnums` and `static_argnums`, if given.
    """

    init: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    options: Mapping[str, tuple[int, ...]]


_KEYS = ("init", "args", "kwargs", "donate_argnums", "static_argnums")
_OPTIONS = ("donate_argnums", "static_argnums")
_ARRAY = re.compile(r"^\s*([A-Za-z]\w*)\s*\[\s*((?:\d+\s*(?:,\s*\d+\s*)*)?)\]\s*$")
_EXAMPLE = "write arrays as 'float32[8,128]', scalars as 'int32[]'."


def read_shapes(path: str | Path) -> ArgumentShapes:
    """Read a file of shapes.

    Raises:
      ShapesError: the file is missing or malformed; the message names the key.
    """
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        folder = path.parent
        names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
        raise ShapesError(
            f"no such file of shapes: {path}.{nearest(path.name, names)}",
            where="--shapes",
            fix="give a TOML file; its format: rhino_jax/commands/shapes.py.",
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ShapesError(
            f"the file of shapes cannot be read: {error}.",
            where=str(path),
            fix="correct the file; its format: rhino_jax/commands/shapes.py.",
        ) from None
    return parse_shapes(data, str(path))


def parse_shapes(data: Mapping[str, Any], where: str) -> ArgumentShapes:
    """Return the arguments that a TOML document describes.

    Args:
      data: the document.
      where: its name, for errors.

    Raises:
      ShapesError: a key is unknown, or its value has the wrong type.
    """
    check_keys(ShapesError, "the file of shapes", data, _KEYS, where)
    init = _checked(data, "init", str, "", "'module:function'", where)
    args = _checked(data, "args", list, [], "a list, or [[args]] tables", where)
    kwargs = _checked(data, "kwargs", dict, {}, "a table", where)
    options = {}
    for name in _OPTIONS:
        if name in data:
            given = _checked(data, name, list, [], "a list of positions", where)
            if not all(isinstance(x, int) and not isinstance(x, bool) for x in given):
                raise _misfit(name, given, "a list of positions", where)
            options[name] = tuple(given)
    return ArgumentShapes(
        init,
        tuple(_value(x, f"args[{i}]", where) for i, x in enumerate(args)),
        {k: _value(x, f"kwargs.{k}", where) for k, x in kwargs.items()},
        options,
    )


def _checked(
    data: Mapping[str, Any], key: str, kind: type, default: Any, what: str, where: str
) -> Any:
    value = data.get(key, default)
    if not isinstance(value, kind):
        raise _misfit(key, value, what, where)
    return value


def _misfit(key: str, value: Any, expected: str, where: str) -> ShapesError:
    return ShapesError(
        f"the file of shapes: `{key}` is not {expected}.",
        where=f"{where}, key `{key}`",
        numbers=f"got {value!r}",
        fix=f"write {expected}; the format: rhino_jax/commands/shapes.py.",
    )


def _value(data: Any, key: str, where: str) -> Any:
    if isinstance(data, dict):
        return {k: _value(x, f"{key}.{k}", where) for k, x in data.items()}
    if isinstance(data, list):
        return [_value(x, f"{key}[{i}]", where) for i, x in enumerate(data)]
    if isinstance(data, bool | int | float):
        return data
    if not isinstance(data, str):
        raise _misfit(key, data, "an array, a number, a table or a list", where)
    found = _ARRAY.match(data)
    if found is None:
        raise ShapesError(
            f"the file of shapes: `{key}` is no array.",
            where=f"{where}, key `{key}`",
            numbers=f"got {data!r}",
            fix=_EXAMPLE,
        )
    try:
        dtype = jnp.dtype(found.group(1))
    except TypeError:
        raise ShapesError(
            f"the file of shapes: `{key}` has an unknown element type."
            + nearest(
                found.group(1), ("float32", "bfloat16", "int32", "uint32", "bool")
            ),
            where=f"{where}, key `{key}`",
            numbers=f"got {found.group(1)!r}",
            fix=_EXAMPLE,
        ) from None
    dims = tuple(int(d) for d in found.group(2).split(",") if d.strip())
    return jax.ShapeDtypeStruct(dims, dtype)
