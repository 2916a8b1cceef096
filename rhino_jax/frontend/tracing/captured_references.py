"""References (`jax.new_ref`) that a function captures: inputs, and results.

As under `jax.jit`, every call reads their current values, and writes back those that
the function wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from rhino_jax._compat import (
    discharged,
    is_outermost,
    low_jaxpr,
    open_jaxpr,
    ref_value,
    references_as_arguments,
    set_ref_value,
    with_eqns,
)
from rhino_jax.errors import TraceError
from rhino_jax.frontend.tracing.captured import reached_by


@dataclass(frozen=True, slots=True)
class CapturedReferences:
    """The references that a function captures.

    Attributes:
      references: the references; the last of the program's constants.
      names: their names in the function's code.
      written: positions among them of those that it writes to, whose final values are
        the last of the program's results.
    """

    references: tuple[Any, ...] = ()
    names: tuple[str, ...] = ()
    written: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.references)

    def values(self) -> list[Any]:
        """Return their current values: the arrays themselves; inside a trace,
        tracers."""
        if is_outermost():
            return [ref_value(r) for r in self.references]
        return [r[...] for r in self.references]

    def split(self, outs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Split all results of a run into the function's own, and those to write
        back."""
        first = len(outs) - len(self.written)
        return list(outs[:first]), list(outs[first:])

    def write(self, after: Sequence[Any]) -> None:
        """Set the references to their results of a run."""
        for k, value in zip(self.written, after, strict=True):
            if is_outermost():
                set_ref_value(self.references[k], value)
            else:
                self.references[k][...] = value

    def keep(self, before: Sequence[Any], placed: Sequence[Any]) -> None:
        """Set references that are only read to their moved arrays, to move them once
        only.

        Args:
          before: their values before the move.
          placed: the moved arrays.
        """
        if not is_outermost():
            return
        for k, (old, new) in enumerate(zip(before, placed, strict=True)):
            if old is not new and k not in self.written:
                set_ref_value(self.references[k], new)

    def check(self, arguments: Sequence[Any], name: str) -> None:
        """Refuse a reference that is captured and given as an argument as well.

        Args:
          arguments: references among the arguments of a call.
          name: name of the function.

        Raises:
          TraceError: one is both.
        """
        for text, captured in zip(self.names, self.references, strict=True):
            if any(captured is given for given in arguments):
                raise TraceError(
                    f"`{name}` captures a reference that it is given as an"
                    " argument as well, and what is written to one would not be read"
                    " from the other.",
                    where=text,
                    numbers=f"{jax.typeof(captured)}; nothing has run",
                    fix=f"let `{name}` use its argument alone, or leave that out.",
                )


def as_values(jaxpr: Any, fn: Any) -> tuple[Any, CapturedReferences]:
    """Return a traced function without high-level primitives and captured references.

    Args:
      jaxpr: closed, as traced.
      fn: the user's function.

    Returns:
      The closed jaxpr, whose last arguments are the references' values, and whose last
      results are the final values of those that are written to; and the references.
    """
    jaxpr, references, is_written = references_as_arguments(jaxpr)
    jaxpr = low_jaxpr(jaxpr)
    if not references:
        return jaxpr, CapturedReferences()
    count = len(open_jaxpr(jaxpr).outvars)
    jaxpr = discharged(jaxpr)
    opened = open_jaxpr(jaxpr)
    written = [k for k, changes in enumerate(is_written) if changes]
    outs = [*opened.outvars[:count], *(opened.outvars[count + k] for k in written)]
    return with_eqns(jaxpr, opened.eqns, outs), CapturedReferences(
        tuple(references), _names(references, fn), tuple(written)
    )


def _names(references: Sequence[Any], fn: Any) -> tuple[str, ...]:
    """Return a unique name for each reference."""
    known: dict[int, str] = {}
    for path, value in reached_by(fn):
        known.setdefault(id(value), path)
    names: list[str] = []
    for reference in references:
        name, k = known.get(id(reference), "reference"), 2
        while name in names:
            name, k = f"{name.split(' #')[0]} #{k}", k + 1
        names.append(name)
    return tuple(names)
