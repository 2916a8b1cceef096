"""The micro-batch pass, and its analysis alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from rhino_jax._compat import without_dead_code
from rhino_jax.errors import MicrobatchError
from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.program import Program
from rhino_jax.ir.transform import MICROBATCHES, Transform, chosen
from rhino_jax.passes.microbatch.cut import MicrobatchChoice, MicrobatchCut
from rhino_jax.passes.microbatch.cutting import find_cut
from rhino_jax.passes.microbatch.emit.outside import emitted
from rhino_jax.passes.program_pass import ChoiceLimits, ProgramPass, Trial, TrialKind
from rhino_jax.rewrite.retraced import retraced


MAX_DOUBLINGS = 8
"""Maximum number of doublings of the number of micro-batches: up to 256."""


def run_in_microbatches(closed: Any, program: Program, choice: str) -> tuple[Any, str]:
    """Rewrite a program to run in micro-batches, one after the other.

    Args:
      closed: a closed jaxpr.
      program: the program imported from it.
      choice: JSON, as `{"count": 4}`; see `cut.MicrobatchChoice`.
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
      options: other fields of `cut.MicrobatchChoice`.
    """
    try:
        return find_cut(closed, program, MicrobatchChoice(count, **options))[0]
    except MicrobatchError as error:
        return error


def cut_in(count: int, places: Sequence[str] = ()) -> Transform:
    """Return the pass that splits the batch into micro-batches.

    Args:
      count: the number of micro-batches.
      places: places where sums over the batch are taken over each micro-batch.
    """
    own = {"per_microbatch": list(places)} if places else {}
    return chosen(MICROBATCHES, {"count": count, **own})


def _choices(traced: Traced, limits: ChoiceLimits) -> Iterator[Transform]:
    """Yield numbers of micro-batches, fewest first.

    Raises:
      MicrobatchError: the program has no batch that can be split.
    """
    closed, program, places = traced.closed_jaxpr, traced.program, limits.places
    cut = may_cut(closed, program, 2, per_microbatch=tuple(places))
    if isinstance(cut, MicrobatchError):
        raise cut
    for count in (2**k for k in range(1, MAX_DOUBLINGS + 1)):
        if count <= cut.rows:
            # Each has as many rows as the largest of `count` would.
            yield cut_in(math.ceil(cut.rows / math.ceil(cut.rows / count)), places)


PASS = ProgramPass(
    MICROBATCHES,
    run_in_microbatches,
    _choices,
    Trial(
        TrialKind.REPEATED,
        lambda choice: f"{choice.chosen['count']} micro-batches",
        "microbatches",
    ),
)
