"""The micro-batch pass, and its analysis alone."""

from __future__ import annotations

import json
from typing import Any

from rhino_jax._compat import without_dead_code
from rhino_jax.errors import MicrobatchError
from rhino_jax.ir.program import Program
from rhino_jax.passes.microbatch.choice import MicrobatchChoice
from rhino_jax.passes.microbatch.cut import MicrobatchCut
from rhino_jax.passes.microbatch.cutting import find_cut
from rhino_jax.passes.microbatch.emit.outside import emitted
from rhino_jax.rewrite.retraced import retraced


def microbatched(closed: Any, program: Program, choice: str) -> tuple[Any, str]:
    """Rewrite a program to run in micro-batches, one after the other.

    Args:
      closed: a closed jaxpr.
      program: the program imported from it.
      choice: JSON, as `{"count": 4}`; see `choice.MicrobatchChoice`.
    Returns:
      A closed jaxpr of the same arguments and results, and the choice with the number
      of micro-batches that run. Results equal those of the original program except for
      the order in which floats are added.
    Raises:
      MicrobatchError: an op needs the whole batch at once.
    """
    read = MicrobatchChoice.read(choice)
    cut, found = find_cut(closed, program, read)
    made = retraced(closed, emitted(found, cut, read.accumulate))
    ran = {**json.loads(choice), "count": cut.count}
    return without_dead_code(made), json.dumps(ran, sort_keys=True)


def may_cut(
    closed: Any, program: Program, count: int, **options: Any
) -> MicrobatchCut | MicrobatchError:
    """Return the schedule of a program in micro-batches, or the error that refuses it.

    Args:
      closed: a closed jaxpr.
      program: the program imported from it.
      count: number of micro-batches.
      options: other fields of `choice.MicrobatchChoice`.
    """
    try:
        return find_cut(closed, program, MicrobatchChoice(count, **options))[0]
    except MicrobatchError as error:
        return error
