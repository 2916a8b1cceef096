"""The pass, and the same without its result."""

from __future__ import annotations

from typing import Any

from rhino_jax._compat import without_dead_code
from rhino_jax.errors import MicrobatchError
from rhino_jax.ir.program import Program
from rhino_jax.passes.microbatch.choice import MicrobatchChoice
from rhino_jax.passes.microbatch.cut import MicrobatchCut
from rhino_jax.passes.microbatch.cutting import find_cut
from rhino_jax.passes.microbatch.emit.outside import emitted
from rhino_jax.passes.retraced import retraced


def microbatched(closed: Any, program: Program, choice: str) -> Any:
    """The same function, its batch in pieces one after the other.

    Args:
      closed: a closed jaxpr.
      program: imported from it.
      choice: JSON, as `{"count": 4}`; see `choice.MicrobatchChoice`.
    Returns:
      A closed jaxpr of the same arguments and results. Results are those of the
      undivided program but for the order in which floats are added.
    Raises:
      MicrobatchError: something needs all of the batch at once.
    """
    read = MicrobatchChoice.read(choice)
    cut, found = find_cut(closed, program, read)
    made = retraced(closed, emitted(found, cut, read.accumulate))
    return without_dead_code(made)


def may_cut(
    closed: Any, program: Program, count: int, **options: Any
) -> MicrobatchCut | MicrobatchError:
    """What would run where in so many pieces; or why it cannot.

    Args:
      closed, program: as of `microbatched`.
      count: pieces.
      options: others of `choice.MicrobatchChoice`.
    """
    try:
        return find_cut(closed, program, MicrobatchChoice(count, **options))[0]
    except MicrobatchError as error:
        return error
