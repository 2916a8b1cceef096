"""Names of places in a user's program: source lines, scopes, modules, functions."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Iterator

from rhino_jax.ir.op import Source
from rhino_jax.ir.program import Program


_LINE = re.compile(r"(?P<file>.+):(?P<line>\d+)")
_NUMBER = re.compile(r"_\d+$")


def on_line(key: str) -> Callable[[Source], bool] | None:
    """Whether sources are on a line, given as `model.py:61`; None of another key."""
    line = _LINE.fullmatch(key)
    if line is None:
        return None
    ending, number = "/" + line["file"].lstrip("/"), int(line["line"])

    def is_there(source: Source) -> bool:
        return source.line == number and ("/" + source.file).endswith(ending)

    return is_there


def in_scope(key: str) -> Callable[[str], str | None]:
    """The outermost of the scopes around that a glob matches."""
    pattern = re.compile(fnmatch.translate(key.strip("/")))

    @functools.cache
    def scope(scopes: str) -> str | None:
        return next((p for p in prefixes(scopes) if pattern.fullmatch(p)), None)

    return scope


def at_place(key: str) -> Callable[[Source], bool]:
    """Whether ops are in a place, be it of the forward or of the backward pass.

    Args:
      key: a line (`model.py:61`), a glob over scopes (`encoder/layer_*`), over one of
        them without its number (`BatchNorm`: all of Flax's modules of that class), or
        over functions (`batch_norm`).
    """
    is_on_line = on_line(key)
    if is_on_line is not None:
        return is_on_line
    scope, one = in_scope(key), re.compile(fnmatch.translate(key))

    @functools.cache
    def is_there(scopes: str, function: str) -> bool:
        parts = [*scopes.split("/"), function, *function.split(".")]
        names = {n for p in parts for n in (p, _NUMBER.sub("", p)) if n}
        return scope(scopes) is not None or any(map(one.fullmatch, names))

    return lambda source: is_there(source.scopes, source.function)


def known_places(program: Program) -> list[str]:
    """Lines and scopes that could have been meant."""
    lines: dict[str, None] = {}
    scopes: dict[str, None] = {}
    for op in program.ops:
        source = op.source
        if source.file and not source.is_backward:
            lines[f"{source.file.rsplit('/', 1)[-1]}:{source.line}"] = None
        scopes.update(dict.fromkeys(prefixes(source.scopes)))
    return [*lines, *scopes]


def prefixes(scopes: str) -> Iterator[str]:
    """`a`, `a/b` and `a/b/c` of `a/b/c`."""
    end = -1
    while scopes and (end := scopes.find("/", end + 1)) != -1:
        yield scopes[:end]
    if scopes:
        yield scopes
