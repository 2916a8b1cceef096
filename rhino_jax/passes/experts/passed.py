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
from rhino_jax.passes.experts.emit import BlocksEmitter
from rhino_jax.passes.experts.found import sorted_tokens
from rhino_jax.passes.experts.moves import Blocks
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
      parts: number of parts of the experts, each with an order of its own.
    """

    count: int
    parts: int = 1


def sort_in_blocks(closed: Any, program: Program, choice: str) -> Any:
    """Rewrite a program to sort its tokens by expert in blocks.

    Args:
      closed: a closed jaxpr.
      program: the program imported from it.
      choice: JSON, as `{"count": 8, "parts": 1}`; see `ExpertsChoice`.
    Returns:
      A closed jaxpr of the same arguments and results. Results equal those of the
      original program except for the order in which floats are added.
    Raises:
      MicrobatchError: the program sorts no tokens that may be, or not so.
    """
    read = read_choice(ExpertsChoice, choice, "the choice of blocks of tokens")
    tokens = sorted_tokens(closed, program)
    if tokens is None or tokens.rows % read.count or _odd(tokens.experts, read.parts):
        raise MicrobatchError(
            f"`{program.name}` sorts no tokens by expert that can be divided so.",
            where=f"`{program.name}`",
            numbers=choice,
            fix="sort them all at once.",
        )
    emitter = BlocksEmitter(tokens, Blocks(read.count, read.parts))
    return without_dead_code(retraced(closed, emitter.run))


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
        if not _odd(tokens.experts, parts):
            count = math.gcd(tokens.rows, counts[-1] // parts)
            yield chosen(EXPERTS, {"count": count, "parts": parts})


def _label(choice: Transform) -> str:
    count, parts = choice.chosen["count"], choice.chosen["parts"]
    words = [f"tokens sorted in {count} blocks"] if count > 1 else []
    return ", ".join([*words, *([f"experts in {parts} parts"] if parts > 1 else [])])


PASS = ProgramPass(
    EXPERTS,
    sort_in_blocks,
    _choices,
    Trial(TrialKind.EACH, _label, "grouped", "sorted in blocks", Gain.TIME),
)
