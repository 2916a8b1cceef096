"""The micro-batch pass: the ops outside of loops, and the loops over micro-batches; and
its analysis alone."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rhino_jax._compat import without_dead_code
from rhino_jax.errors import MicrobatchError
from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.program import Program
from rhino_jax.ir.transform import MICROBATCHES, Transform, chosen
from rhino_jax.passes.microbatch.cut import (
    LoopCrossing,
    MicrobatchChoice,
    MicrobatchCut,
    MicrobatchLoop,
)
from rhino_jax.passes.microbatch.cutting import find_cut
from rhino_jax.passes.microbatch.emit import (
    Piece,
    PieceEmitter,
    Split,
    combined,
    start,
    together,
    view,
)
from rhino_jax.passes.microbatch.flow.analysis import FlowResult
from rhino_jax.passes.program_pass import (
    ChoiceLimits,
    ProgramPass,
    Trial,
    TrialKind,
    read_choice,
)
from rhino_jax.rewrite.retraced import retraced


def emitted(
    found: FlowResult, cut: MicrobatchCut, scope: str = "micro-batches"
) -> Callable[..., list[Any]]:
    """Return a function of the program's inputs and constants, to be traced.

    Args:
      found: the analysis.
      cut: which ops run in which loop.
      scope: `jax.named_scope` of the loops.
    """
    flat, split = found.flat, Split.of(cut.rows, cut.count)
    values = flat.program.values

    def run(*arrays: Any) -> list[Any]:
        env = dict(zip(flat.top.inputs, arrays, strict=True))
        for at, ops in enumerate(cut.outside):
            flat.run(frozenset(ops), env)
            if at < len(cut.loops) and cut.loops[at].leaving:
                loop(cut.loops[at], env)
        return [flat.read(v, env) for v in flat.top.outputs]

    def loop(each: MicrobatchLoop, env: dict[int, Any]) -> None:
        """Emit a loop over micro-batches, and record the values that leave it."""

        def read(value: int) -> Any:
            return flat.read(value, env)

        views = {}
        for c in each.entering:
            if c.how == "sliced":
                with line(c):
                    views[c.value, c.span] = view(read(c.value), c.span, split)

        def piece(index: Any) -> list[Any]:
            return PieceEmitter(found, Piece(split, index), read, views).top(each)

        kept = [c for c in each.leaving if not is_stacked(c)]

        def step(carry: list[Any], index: Any) -> tuple[list[Any], list[Any]]:
            made = [*zip(each.leaving, piece(index), strict=True)]
            parts = [x for c, x in made if c in kept]
            return [*map(added, kept, carry, parts)], [
                x for c, x in made if c not in kept
            ]

        starts = [*map(start_of, kept)]
        with jax.named_scope(scope):
            carry, stacks = lax.scan(step, starts, lax.iota(np.int32, split.full))
        rest = piece(None) if split.rest else [None] * len(each.leaving)
        sums, rows = iter(carry), iter(stacks)
        for c, last in zip(each.leaving, rest, strict=True):
            if c.how == "stacked":
                with line(c):
                    whole = together(next(rows), last, c.span, split)
            elif c not in kept:
                whole = next(rows)[0]
            else:
                whole = next(sums)
                if last is not None:
                    whole = added(c, whole, last)
                with line(c):
                    dtype = jnp.dtype(values[c.value].dtype)
                    whole = lax.convert_element_type(whole, dtype)
            env[c.value] = whole

    def line(crossing: LoopCrossing) -> contextlib.AbstractContextManager[None]:
        """Return a context with the name stack and source line of a value's op."""
        maker = flat.maker.get(crossing.value)
        return contextlib.nullcontext() if maker is None else maker.context()

    def is_stacked(crossing: LoopCrossing) -> bool:
        """Whether a loop stacks a leaving value: PRNG keys too, which have no zero."""
        is_key = values[crossing.value].dtype.startswith("key<")
        return crossing.how == "stacked" or is_key

    def start_of(crossing: LoopCrossing) -> Any:
        """Return the initial accumulator of a leaving value."""
        value = values[crossing.value]
        with line(crossing):
            return start(crossing, value.shape, jnp.dtype(value.dtype))

    def added(crossing: LoopCrossing, so_far: Any, part: Any) -> Any:
        """Return the accumulator of a leaving value after one more micro-batch."""
        with line(crossing):
            return combined(crossing.how, so_far, part)

    return run


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
      MicrobatchError: the text is no valid choice, or an op needs the whole batch at
        once.
    """
    read = read_choice(MicrobatchChoice, choice, "the choice of micro-batches")
    cut, found = find_cut(closed, program, read)
    made = retraced(closed, emitted(found, cut))
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
