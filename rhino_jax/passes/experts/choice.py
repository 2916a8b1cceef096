"""The pass, and the numbers of blocks and parts that a program allows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rhino_jax._compat import without_dead_code
from rhino_jax.errors import MicrobatchError
from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.program import Program
from rhino_jax.ir.transform import EXPERTS, Transform, chosen
from rhino_jax.passes.experts.emit import BlocksEmitter, sorted_tokens
from rhino_jax.passes.experts.moves import Blocks
from rhino_jax.passes.experts.rounds import ROUNDS, RoundsEmitter, RowsAreSaved
from rhino_jax.passes.program_pass import (
    ChoiceLimits,
    Gain,
    ProgramPass,
    Trial,
    TrialKind,
    read_choice,
)
from rhino_jax.rewrite.retraced import retraced


@dataclass(frozen=True, slots=True)
class ExpertsChoice:
    """Options of the pass.

    Attributes:
      count: number of blocks of tokens that are sorted by themselves.
      parts: number of parts of the experts, each with the rows of its experts.
      groups: number of groups of blocks whose rows a part multiplies together.
    """

    count: int
    parts: int = 1
    groups: int = 1


def sort_in_blocks(closed: Any, program: Program, choice: str) -> Any:
    """Rewrite a program to sort its tokens by expert in blocks.

    Args:
      closed: a closed jaxpr.
      program: the program imported from it.
      choice: JSON, as `{"count": 8, "parts": 8}`; see `ExpertsChoice`.
    Returns:
      A closed jaxpr of the same arguments and results. Results equal those of the
      original program except for the order in which floats are added.
    Raises:
      MicrobatchError: the program sorts no tokens that may be, or not so.
    """
    read = read_choice(ExpertsChoice, choice, "the choice of blocks of tokens")
    tokens = sorted_tokens(closed, program)
    if tokens is None or (
        tokens.rows % read.count
        or read.count % read.groups
        or _odd(tokens.experts, read.parts)
    ):
        raise MicrobatchError(
            f"`{program.name}` sorts no tokens by expert that can be divided so.",
            where=f"`{program.name}`",
            numbers=choice,
            fix="sort them all at once.",
        )
    blocks = Blocks(read.count)
    if read.parts == 1:
        run = BlocksEmitter(tokens, blocks).run
        return without_dead_code(retraced(closed, run))

    has_gradients = any(op.source.is_backward for op in program.ops)

    def in_rounds(is_one: bool) -> Any:
        emitter = RoundsEmitter(
            tokens,
            blocks,
            parts=read.parts,
            groups=read.groups,
            is_one_round=is_one,
            may_loop=has_gradients,
        )
        return without_dead_code(retraced(closed, emitter.run))

    try:
        return in_rounds(not has_gradients)
    except RowsAreSaved:
        return in_rounds(True)


def _odd(experts: Mapping[int, int], parts: int) -> bool:
    return any(number % parts for number in experts.values())


def _choices(traced: Traced, limits: ChoiceLimits) -> Iterator[Transform]:
    """Yield blocks of tokens with all experts, one block for each device along some
    mesh axes; then parts of the experts, likewise."""
    tokens = sorted_tokens(traced.closed_jaxpr, traced.program)
    counts = sorted(limits.counts)
    if tokens is None or not counts:
        return
    for count in counts:
        if tokens.rows % count == 0:
            yield chosen(EXPERTS, {"count": count, "parts": 1})
    for parts in counts:
        if _odd(tokens.experts, parts):
            continue
        # Of the devices that share the batch, each group has all parts. They read the
        # tokens of their group, or each is sent rows by the others.
        for devices in {parts: None, counts[-1]: None}:
            groups = math.gcd(tokens.rows, devices // parts)
            for count in {groups: None, math.gcd(tokens.rows, devices): None}:
                choice = {"count": count, "parts": parts, "groups": groups}
                yield chosen(EXPERTS, choice)


def _label(choice: Transform) -> str:
    count, parts = choice.chosen["count"], choice.chosen["parts"]
    groups = choice.chosen.get("groups", 1)
    words = [f"tokens sorted in {count} blocks"] if count > 1 else []
    words += [f"experts in {parts} parts"] if parts > 1 else []
    return ", ".join([*words, *([f"{groups} groups"] if groups > 1 else [])])


PASS = ProgramPass(
    EXPERTS,
    sort_in_blocks,
    _choices,
    Trial(TrialKind.EACH, _label, "grouped", "sorted in blocks", Gain.TIME),
    {ROUNDS: 1},
)
