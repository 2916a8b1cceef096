"""The chunking pass, and its analysis alone.

A program is chunked, or the body of its user's own loop over micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rhino_jax._compat import bind_eqn, open_jaxpr, without_dead_code
from rhino_jax.errors import MicrobatchError
from rhino_jax.frontend.importer import import_jaxpr
from rhino_jax.frontend.regions import closed_region_jaxprs, with_jaxprs
from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.program import Program
from rhino_jax.ir.transform import CHUNKS, Transform, chosen
from rhino_jax.passes.chunks.heads import Head, heads_of
from rhino_jax.passes.chunks.part import part_of, size_of
from rhino_jax.passes.microbatch.cut import MicrobatchCut
from rhino_jax.passes.microbatch.cutting import cut_of
from rhino_jax.passes.microbatch.demand import Demand
from rhino_jax.passes.microbatch.emit.outside import emitted
from rhino_jax.passes.microbatch.flow.analysis import FlowResult, OpenedRemat, analyse
from rhino_jax.passes.microbatch.flow.ops import DimSizes
from rhino_jax.passes.program_pass import (
    ChoiceLimits,
    ProgramPass,
    Trial,
    TrialKind,
    read_choice,
)
from rhino_jax.rewrite.emit import substitute
from rhino_jax.rewrite.flat import FlatProgram
from rhino_jax.rewrite.flatten import all_calls, flatten
from rhino_jax.rewrite.retraced import retraced


ChunkLoop = tuple[Any, Any]
"""A scan whose body may be chunked: its equation, and the closed jaxpr of its body."""


def loops_of(flat: FlatProgram) -> Iterator[ChunkLoop]:
    """Yield the scans of a program's top level whose bodies have no constants."""
    for item in flat.top.ops:
        if item.is_scan:
            (body,) = closed_region_jaxprs(item.eqn)
            if not open_jaxpr(body).constvars:
                yield item.eqn, body


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


SCOPE = "chunks"
"""`jax.named_scope` of the loops over chunks."""

COUNTS = (4, 16)
"""Numbers of chunks to try: with the fewest, the rest of the logits of 50,000 classes
is about one layer's activations; more chunks are worth a try where the logits still
make the peak. Every chunk reads the head's weights and accumulates their gradient once
more."""


@dataclass(frozen=True, slots=True)
class ChunkChoice:
    """Options of the chunking pass.

    Attributes:
      count: number of chunks.
      accumulate: dtype in which sums of narrower floats are accumulated.
      most_tried: maximum number of output projections that are tried, largest first.
    """

    count: int
    accumulate: str = "float32"
    most_tried: int = 8

    @classmethod
    def read(cls, text: str) -> ChunkChoice:
        """Parse a choice from JSON, as `{"count": 8}`.

        Raises:
          MicrobatchError: the text is no valid choice.
        """
        return read_choice(cls, text, "the choice of chunks")


def run_in_chunks(closed: Any, program: Program, choice: str) -> Any:
    """Rewrite a program to compute its largest logits in chunks.

    Args:
      closed: a closed jaxpr.
      program: the program imported from it.
      choice: JSON, as `{"count": 8}`; see `ChunkChoice`.
    Returns:
      A closed jaxpr of the same arguments and results. Results equal those of the
      original program except for the order in which floats are added.
    Raises:
      MicrobatchError: the program has no logits that can be chunked.
    """
    read = ChunkChoice.read(choice)
    (cut, found), loop = _find(closed, program, read)
    inner = closed if loop is None else loop[1]
    made = retraced(inner, emitted(found, cut, read.accumulate, SCOPE))
    made = without_dead_code(made)
    return made if loop is None else with_body(closed, loop[0], made)


def may_chunk(
    closed: Any, program: Program, count: int
) -> MicrobatchCut | MicrobatchError:
    """Return the schedule of a program in chunks, or the error that refuses it.

    Args:
      closed: a closed jaxpr.
      program: the program imported from it.
      count: number of chunks.
    Returns:
      A schedule of the program, or of the body of one of its loops.
    """
    try:
        return _find(closed, program, ChunkChoice(count))[0][0]
    except MicrobatchError as error:
        return error


def _choices(traced: Traced, limits: ChoiceLimits) -> Iterator[Transform]:
    """Yield numbers of chunks of the loss, fewest first; none where its largest array
    is no larger than `limits.least_bytes`."""
    cut = may_chunk(traced.closed_jaxpr, traced.program, COUNTS[0])
    if isinstance(cut, MicrobatchError):
        return
    (loop,), program = cut.loops, cut.program
    made = (v for op in loop.ops for v in program.ops[op].results)
    if max(program.values[v].bytes for v in made) > limits.least_bytes:
        for count in COUNTS:
            if count <= cut.rows:
                yield chosen(CHUNKS, {"count": count})


PASS = ProgramPass(
    CHUNKS,
    run_in_chunks,
    _choices,
    Trial(
        TrialKind.WHILE_BETTER,
        lambda choice: f"{choice.chosen['count']} chunks of the loss",
        "microbatches",
        "the loss in chunks",
    ),
)


def _find(
    closed: Any, program: Program, choice: ChunkChoice
) -> tuple[tuple[MicrobatchCut, FlowResult], ChunkLoop | None]:
    """Find a schedule of the program, or of the body of a loop of its user's.

    Returns:
      The schedule with its analysis, and the loop whose body it is of; None: the
      program.
    Raises:
      MicrobatchError: no output projection can be chunked.
    """
    flat = flatten(program, closed, all_calls())
    heads = [*heads_of(flat)]
    found = _first(flat, heads, choice)
    if found is not None:
        return found, None
    for loop in loops_of(flat):
        body = import_jaxpr(loop[1], name=program.name, while_trips=program.while_trips)
        inner = flatten(body, loop[1], all_calls())
        found = _first(inner, [*heads_of(inner)], choice)
        if found is not None:
            return found, loop
    raise MicrobatchError(
        f"`{program.name}` makes no long rows of which a loss is made at once.",
        where=str(heads[0].item.op.source) if heads else f"`{program.name}`",
        numbers=f"{len(heads)} products with a parameter, {choice.count} chunks",
        fix="leave them whole.",
    )


def _first(
    flat: FlatProgram, heads: list[Head], choice: ChunkChoice
) -> tuple[MicrobatchCut, FlowResult] | None:
    """Return the schedule of the first output projection to have one, or None."""
    for head in heads[: choice.most_tried]:
        found = _cut(flat, head, choice) if choice.count <= head.cut.size else None
        if found is not None:
            return found
    return None


def _cut(
    flat: FlatProgram, head: Head, choice: ChunkChoice
) -> tuple[MicrobatchCut, FlowResult] | None:
    """Return a schedule of one loop that no full logits enter or leave, or None."""
    part = part_of(flat, head)
    if part is None:
        return None
    try:
        found = analyse(flat, {}, DimSizes(head.cut.size, 0), part=part)
    except OpenedRemat:
        return None
    demand = Demand(found)
    if len(demand.bodies) != 1 or head.item.op.id not in demand.bodies[0].ops:
        return None
    cut = cut_of(flat.program, found, demand, choice.count, head.cut.size)
    values = flat.program.values
    least = size_of(values[head.item.results[0]])
    (loop,) = cut.loops
    rows = [
        c for c in (*loop.entering, *loop.leaving) if c.how in ("sliced", "stacked")
    ]
    is_whole = any(size_of(values[c.value]) >= least for c in rows)
    return None if is_whole else (cut, found)
