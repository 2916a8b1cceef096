"""Functions to plan: loaded by name, with abstract arguments.

Abstract arguments come from a TOML file, for planning without writing Python:

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

import importlib
import os
import re
import sys
import tomllib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import rhino_jax
from rhino_jax.errors import RhinoError, check_keys, nearest
from rhino_jax.models import registry


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
            fix="give a TOML file; its format: python -m rhino_jax plan --help.",
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ShapesError(
            f"the file of shapes cannot be read: {error}.",
            where=str(path),
            fix="correct the file; its format: python -m rhino_jax plan --help.",
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
        fix=f"write {expected}; the format: python -m rhino_jax plan --help.",
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


class LoadingError(RhinoError, ValueError):
    """A function to plan cannot be found or loaded."""


@dataclass(frozen=True, slots=True)
class LoadedCall:
    """A function and its arguments to plan.

    Attributes:
      fn: the function.
      args, kwargs: its arguments, arrays as ShapeDtypeStructs.
      options: keywords of `auto_shard`, as `donate_argnums`.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def load_call(target: str, shapes: str | None, command: str = "plan") -> LoadedCall:
    """Return the call that the words of a command line describe.

    Args:
      target: `module:function`, or the name of a model of the zoo.
      shapes: path of a file of shapes (`rhino_jax.commands.loading`), for a function.
      command: name of the command, for messages.

    Raises:
      LoadingError: the function cannot be loaded, or shapes are missing.
      ShapesError, ModelConfigError: the file or the model's name is wrong.
    """
    if ":" not in target:
        workload = registry.get(target)
        if shapes is not None:
            raise LoadingError(
                f"`{target}`: a model of the zoo has its own shapes.",
                where="--shapes",
                fix="leave out --shapes, or name a function as module:function.",
            )
        options = {"donate_argnums": workload.donate_argnums}
        return LoadedCall(workload.step, workload.abstract_args(), options=options)
    if shapes is None:
        raise LoadingError(
            f"`{command} {target}`: the shapes of its arguments are not given.",
            where="--shapes",
            fix=f"python -m rhino_jax {command} {target} --shapes shapes.toml; the"
            f" format: python -m rhino_jax {command} --help.",
        )
    read = read_shapes(shapes)
    fn = import_function(target)
    first = _abstract_result(read.init) if read.init else ()
    return LoadedCall(fn, (*first, *read.args), read.kwargs, read.options)


def import_function(target: str) -> Callable[..., Any]:
    """Import the function that `module:function` names; this folder is searched first.

    Raises:
      LoadingError: no such module or function, or the module fails to load: the user's
        own error and line come first.
    """
    module_name, _, path = target.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise LoadingError(
            f"`{target}`: module {module_name!r} cannot be loaded:"
            f" {type(error).__name__}: {error}.",
            where=last_line(error) or here,
            fix="run from the folder that holds the module, and load it with"
            f" `python -c 'import {module_name}'`.",
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise LoadingError(
                f"`{target}`: {module_name!r} has no {path!r}."
                + nearest(part, [n for n in dir(found) if not n.startswith("_")]),
                where=getattr(found, "__file__", None) or module_name,
                fix="name a function as module:function.",
            )
        found = getattr(found, part)
    if not callable(found):
        raise LoadingError(
            f"`{target}`: this cannot be called.",
            numbers=f"got {type(found).__name__}",
            fix="name a function as module:function.",
        )
    return found


def tracing_error(target: str, error: Exception) -> LoadingError:
    """Return the error for a user's function that raises while it is traced."""
    return LoadingError(
        f"`{target}` fails on these shapes: {type(error).__name__}:"
        f" {str(error).splitlines()[0] if str(error) else ''}",
        where=last_line(error),
        fix="correct the function or the shapes of its arguments.",
    )


_OURS = tuple(
    str(Path(module.__file__ or "").parent) + os.sep for module in (jax, rhino_jax)
)


def last_line(error: BaseException) -> str:
    """Return the user's line that raised an error, as `train.py:12`."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    users = [f for f in frames if not f.filename.startswith((*_OURS, "<"))]
    return f"{users[-1].filename}:{users[-1].lineno}" if users else ""


def _abstract_result(init: str) -> tuple[Any, ...]:
    """Evaluate an init function on shapes; return a tuple of arguments."""
    fn = import_function(init)
    try:
        result = jax.eval_shape(fn)
    except Exception as error:
        raise LoadingError(
            f"`{init}`: fails on shapes: {type(error).__name__}: {error}.",
            where=last_line(error),
            fix="let it take no arguments and return a tuple of arguments.",
        ) from error
    return result if type(result) is tuple else (result,)
