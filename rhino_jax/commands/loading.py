"""Functions to plan: loaded by name, with abstract arguments."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

import rhino_jax
from rhino_jax.commands.shapes import read_shapes
from rhino_jax.errors import RhinoError, nearest
from rhino_jax.models import registry


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
      shapes: path of a file of shapes (`rhino_jax.commands.shapes`), for a function.
      command: name of the command, for messages.

    Raises:
      LoadingError: the function cannot be loaded, or shapes are missing.
      ShapesError, ModelConfigError: the file or the model's name is wrong.
    """
    if ":" not in target:
        return _load_model(target, shapes)
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


def _load_model(name: str, shapes: str | None) -> LoadedCall:
    workload = registry.get(name)
    if shapes is not None:
        raise LoadingError(
            f"`{name}`: a model of the zoo has its own shapes.",
            where="--shapes",
            fix="leave out --shapes, or name a function as module:function.",
        )
    options = {"donate_argnums": workload.donate_argnums}
    return LoadedCall(workload.step, workload.abstract_args(), options=options)


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
