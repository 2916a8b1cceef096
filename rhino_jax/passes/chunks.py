"""Chunked loss: compute logits over a vocabulary in chunks of tokens, never in full.

In: a closed jaxpr, its `Program`, and a choice as text, as `{"count": 8}`.
Out: `run_in_chunks`, a closed jaxpr of the same arguments and results; `may_chunk`, the
schedule of ops without emitting it, or the error.
Order: output projections (matmuls with a parameter and the largest results), the ops on
such a result, forward and backward, and the pass: these ops, in a loop over chunks of
tokens, also within a user's loop over micro-batches.

Only what takes one loop is chunked, so nothing is computed twice. A causal program is
not sliced along its whole sequence (TeraPipe): gradients of early keys wait for the
last token, so all residuals stay live as before; that pays only between pipeline
stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rhino_jax._compat import bind_eqn, open_jaxpr, without_dead_code
from rhino_jax.errors import MicrobatchError
from rhino_jax.frontend.importer import import_jaxpr
from rhino_jax.frontend.regions import closed_region_jaxprs, with_jaxprs
from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.axes import AxisSpan, follow
from rhino_jax.ir.factor import FactorKind, Rule
from rhino_jax.ir.program import Program, Value
from rhino_jax.ir.transform import CHUNKS, Transform, chosen
from rhino_jax.passes.microbatch.cut import MicrobatchCut
from rhino_jax.passes.microbatch.cutting import cut_of
from rhino_jax.passes.microbatch.demand import Demand
from rhino_jax.passes.microbatch.flow.analysis import FlowResult, OpenedRemat, analyse
from rhino_jax.passes.microbatch.flow.ops import DimSizes
from rhino_jax.passes.microbatch.flow.states import DimPart
from rhino_jax.passes.microbatch.passed import emitted
from rhino_jax.passes.program_pass import (
    ChoiceLimits,
    ProgramPass,
    Trial,
    TrialKind,
    read_choice,
)
from rhino_jax.rewrite.emit import substitute
from rhino_jax.rewrite.flat import FlatOp, FlatProgram
from rhino_jax.rewrite.flatten import all_calls, flatten
from rhino_jax.rewrite.retraced import retraced


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A matmul of tokens with a parameter, as an output projection to a vocabulary.

    Attributes:
      item: the matmul.
      tokens: position of the operand that has the tokens; the other is a parameter.
      cut: the dim of that operand to chunk: the longest that the parameter lacks.
      made: the same dim in the result.
      row: the dim of the result that only the parameter has: the vocabulary.
    """

    item: FlatOp
    tokens: int
    cut: AxisSpan
    made: AxisSpan
    row: AxisSpan


def heads_of(flat: FlatProgram) -> Iterator[Head]:
    """Yield the output projections of a program's top level, largest results first.

    Of several on one source line only the first is yielded: those are layers.
    """
    values = flat.program.values
    found = [
        head
        for item in flat.top.ops
        if item.op.traits.is_contraction and (head := _head(flat, item)) is not None
    ]
    found.sort(key=lambda h: -values[h.item.results[0]].bytes)
    first = dict[str, Head]()
    for head in found:
        first.setdefault(str(head.item.op.source), head)
    yield from first.values()


def _head(flat: FlatProgram, item: FlatOp) -> Head | None:
    """Return an op as an output projection; None where it is none."""
    rule = item.op.rule
    if rule is None or item.regions or len(item.operands) != 2:
        return None
    parameters = [i for i, v in enumerate(item.operands) if flat.is_parameter(v)]
    if len(parameters) != 1:
        return None
    tokens = 1 - parameters[0]
    (result,) = rule.results
    cut, row = _own(rule, tokens, parameters[0]), _own(rule, parameters[0], tokens)
    if not cut or len(row) != 1:
        return None
    size = {f: rule.factors[f].size for f in (*cut, *row)}
    longest = max(cut, key=lambda f: size[f])
    cuts = (rule.operands[tokens], longest), (result, longest), (result, row[0])
    spans = [AxisSpan(layout.index((f,)), size[f]) for layout, f in cuts]
    return Head(item, tokens, *spans)


def _own(rule: Rule, mine: int, other: int) -> list[int]:
    """Return the parallel factors that are dims of one operand and of the result alone.

    Args:
      rule: factors of the op.
      mine: position of the operand.
      other: position of the other operand.
    """
    return [
        f
        for f, factor in enumerate(rule.factors)
        if (f,) in rule.operands[mine]
        and (f,) in rule.results[0]
        and not any(f in dim for dim in rule.operands[other])
        and factor.kind is FactorKind.PARALLEL
    ]


Place = tuple[AxisSpan | None, ...]
"""Dims of a value that are the tokens and the vocabulary; None where it lacks the
dim."""


def size_of(value: Value) -> int:
    """Return the number of elements of a value."""
    return math.prod(value.shape)


def part_of(flat: FlatProgram, head: Head) -> DimPart | None:
    """Return the ops to chunk with an output projection.

    Args:
      flat: the program.
      head: the output projection.
    Returns:
      None where they would include contractions or regions that do not work on logits.
    """
    (logits,), values = head.item.results, flat.program.values
    long: dict[int, Place] = {logits: (head.made, head.row)}
    seeds = {head.item.op.id: {head.tokens: head.cut}}

    def include(value: int, place: Place) -> None:
        """Include the op that computes a value as large as the logits, as one-hot
        labels, and its operands likewise, where it has operands to chunk."""
        item = flat.maker.get(value)
        is_small = size_of(values[value]) < size_of(values[logits])
        if item is None or None in place or value in long or is_small:
            return
        count = len(item.operands)
        places = _places(item, count + item.results.index(value), place)[:count]
        cuts = {i: p[0] for i, p in enumerate(places) if p[0] is not None}
        if not cuts or item.op.traits.is_contraction:
            return  # a broadcast, which each chunk computes itself; or another matmul
        long[value], seeds[item.op.id] = place, cuts
        for operand, there in zip(item.operands, places, strict=True):
            include(operand, there)

    before = 0
    while before < len(seeds):
        before, ops = len(seeds), _ops_on(flat, long) | seeds.keys()
        items = [item for item in flat.top.ops if item.op.id in ops]
        for item in items:
            is_other = long.keys().isdisjoint(item.operands) and item is not head.item
            if item.regions or (item.op.traits.is_contraction and is_other):
                return None
        for item in items:
            at = next((i for i, v in enumerate(item.operands) if v in long), None)
            if at is not None:
                places = _places(item, at, long[item.operands[at]])
                for value, place in zip(item.operands, places, strict=False):
                    include(value, place)
    return DimPart(frozenset(ops), seeds)


def _ops_on(flat: FlatProgram, long: dict[int, Place]) -> set[int]:
    """Return ids of the ops that read logits, or lie between such ops.

    Args:
      flat: the program.
      long: id of each value with full tokens and vocabulary → its dims that are these;
        results that have both are added.
    """
    behind = sorted(flat.top.behind(long))
    after, later = flat.top.made_by(behind), [flat.top.ops[i] for i in behind]
    for item in later:
        for i, value in enumerate(item.operands):
            if value in long:
                found = _places(item, i, long[value])[len(item.operands) :]
                for made, place in zip(item.results, found, strict=True):
                    if None not in place:
                        long.setdefault(made, place)
    after |= long.keys()
    ops, wanted = set[int](), set[int]()
    for item in reversed(later):
        is_long = not long.keys().isdisjoint(item.operands)
        if is_long or not wanted.isdisjoint(item.results):
            ops.add(item.op.id)
            wanted |= after.intersection(item.operands)
    return ops


def _places(item: FlatOp, at: int, place: Place) -> list[Place]:
    """Return the dims of tokens and vocabulary in an op's operands and results.

    Args:
      item: the op.
      at: position of an operand, or of a result after all operands.
      place: its dims that are these.
    """
    rule = item.op.rule
    if rule is None or item.regions:
        return [(None, None)] * (len(item.operands) + len(item.results))
    layouts = (*rule.operands, *rule.results)
    return [
        tuple(None if s is None else follow(rule, layouts[at], s, to) for s in place)
        for to in layouts
    ]


SCOPE = "chunks"
"""`jax.named_scope` of the loops over chunks."""

COUNTS = (4, 16)
"""Numbers of chunks to try: with the fewest, the rest of the logits of 50,000 classes
is about one layer's activations; more chunks are worth a try where the logits still
make the peak. Every chunk reads the head's weights and accumulates their gradient once
more."""

MAX_HEADS = 8
"""Maximum number of output projections that are tried, largest first."""


@dataclass(frozen=True, slots=True)
class ChunkChoice:
    """Options of the chunking pass.

    Attributes:
      count: number of chunks.
    """

    count: int


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
      MicrobatchError: the text is no valid choice, or the program has no logits that
        can be chunked.
    """
    read = read_choice(ChunkChoice, choice, "the choice of chunks")
    cut, found, loop = _find(closed, program, read.count)
    inner = closed if loop is None else closed_region_jaxprs(loop)[0]
    made = without_dead_code(retraced(inner, emitted(found, cut, SCOPE)))
    if loop is None:
        return made

    def instead(eqn: Any, operands: list[Any]) -> list[Any] | None:
        if eqn is not loop:
            return None
        return bind_eqn(eqn, operands, with_jaxprs(eqn, [made]))

    return without_dead_code(substitute(closed, instead))


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
        return _find(closed, program, count)[0]
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
    closed: Any, program: Program, count: int
) -> tuple[MicrobatchCut, FlowResult, Any]:
    """Find a schedule of the program, or of the body of a loop of its user's.

    Returns:
      The schedule, its analysis, and the equation of the loop whose body it is of, or
        None.
    Raises:
      MicrobatchError: no output projection can be chunked.
    """
    flat = flatten(program, closed, all_calls())
    for loop, inner in _programs(flat):
        for head in islice(heads_of(inner), MAX_HEADS):
            if count <= head.cut.size:
                found = _cut(inner, head, count)
                if found is not None:
                    return *found, loop
    heads = [*heads_of(flat)]
    raise MicrobatchError(
        f"`{program.name}` makes no long rows of which a loss is made at once.",
        where=str(heads[0].item.op.source) if heads else f"`{program.name}`",
        numbers=f"{len(heads)} products with a parameter, {count} chunks",
        fix="leave them whole.",
    )


def _programs(flat: FlatProgram) -> Iterator[tuple[Any, FlatProgram]]:
    """Yield None and the program, then each scan of its top level whose body has no
    constants, and that body."""
    yield None, flat
    program = flat.program
    for item in flat.top.ops:
        if item.is_scan:
            (body,) = closed_region_jaxprs(item.eqn)
            if not open_jaxpr(body).constvars:
                trips = program.while_trips
                inner = import_jaxpr(body, name=program.name, while_trips=trips)
                yield item.eqn, flatten(inner, body, all_calls())


def _cut(
    flat: FlatProgram, head: Head, count: int
) -> tuple[MicrobatchCut, FlowResult] | None:
    """Return a schedule of one loop that no full logits enter or leave, or None."""
    part = part_of(flat, head)
    if part is None:
        return None
    try:
        found = analyse(flat, {}, DimSizes(head.cut.size, 0), part=part)
    except OpenedRemat:
        return None
    demand = Demand.of(found)
    if len(demand.loops) != 1 or head.item.op.id not in demand.loops[0].ops:
        return None
    cut = cut_of(demand, count)
    values = flat.program.values
    least = size_of(values[head.item.results[0]])
    (loop,) = cut.loops
    rows = [
        c for c in (*loop.entering, *loop.leaving) if c.how in ("sliced", "stacked")
    ]
    is_whole = any(size_of(values[c.value]) >= least for c in rows)
    return None if is_whole else (cut, found)
