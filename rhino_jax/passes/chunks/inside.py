"""Chunk the body of a user's own loop over micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rhino_jax._compat import bind_eqn, open_jaxpr, without_dead_code
from rhino_jax.frontend.importer import import_jaxpr
from rhino_jax.frontend.regions import closed_region_jaxprs, with_jaxprs
from rhino_jax.ir.program import Program, RegionKind
from rhino_jax.rewrite.emit import substitute
from rhino_jax.rewrite.flat import FlatProgram


@dataclass(frozen=True, slots=True, eq=False)
class ChunkLoop:
    """A scan whose body may be chunked.

    Attributes:
      eqn: the scan's equation.
      body: closed jaxpr of its body.
      program: the body, imported as a program of its own.
    """

    eqn: Any
    body: Any
    program: Program


def loops_of(flat: FlatProgram) -> Iterator[ChunkLoop]:
    """Yield the scans of a program's top level."""
    for item in flat.top.ops:
        if item.op.call is None or item.op.call.kind is not RegionKind.SCAN:
            continue
        (body,) = closed_region_jaxprs(item.eqn)
        if open_jaxpr(body).constvars:
            continue
        program = import_jaxpr(
            body, name=flat.program.name, while_trips=flat.program.while_trips
        )
        yield ChunkLoop(item.eqn, body, program)


def with_body(closed: Any, loop: Any, body: Any) -> Any:
    """Replace the body of one loop of a closed jaxpr.

    Args:
      closed: the closed jaxpr.
      loop: the loop's equation.
      body: the new body: a closed jaxpr of the same arguments and results.
    """

    def instead(eqn: Any, operands: list[Any]) -> list[Any] | None:
        if eqn is not loop:
            return None
        return bind_eqn(eqn, operands, with_jaxprs(eqn, [body]))

    return without_dead_code(substitute(closed, instead))
