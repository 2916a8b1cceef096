"""Which of the user's operations a collective belongs to.

Most collectives say so. Of those that the compiler combined, moved or wrapped, some
do not; then what calls them, makes their operand or reads their result tells.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from rhino_jax.verify.hlo.module import Computation, Instruction


Users = Mapping[str, Sequence[Instruction]]

_REDUCTIONS = ("all-reduce", "reduce-scatter")
_MAX_STEPS = 10


Place = tuple[Computation, Instruction]


def name_of(kind: str, *places: Place) -> tuple[str, str]:
    """JAX's name of an operation, and the user's line.

    Args:
      kind: of the collective. A reduction is named by what makes its operand, any
        other by what reads its result, where it has no name of its own.
      places: the collective, or its start, and what calls the computation that it
        is in (a fusion, an asynchronous start), innermost first.
    Returns:
      The instruction's name where nothing near has one; a line may be missing.
    """
    near = itertools.chain(
        (instruction for _, instruction in places),
        *(_around(kind, *place) for place in places),
    )
    op = source = ""
    for instruction in near:
        op, source = op or instruction.op_name, source or instruction.source
        if op and source:
            break
    return op or places[0][1].name, source


def _around(
    kind: str, computation: Computation, instruction: Instruction
) -> Iterator[Instruction]:
    users = computation.users()
    makers = _makers(computation, instruction, users)
    # What reads a fusion that starts a transfer only computes while it runs.
    readers = () if instruction.opcode == "fusion" else _readers(instruction, users)
    first, second = (makers, readers) if kind in _REDUCTIONS else (readers, makers)
    yield from first
    yield from second


def _makers(
    computation: Computation, instruction: Instruction, users: Users
) -> Iterator[Instruction]:
    at = instruction
    for _ in range(_MAX_STEPS):
        names = at.operands
        if not names and users[at.name]:
            # Some transfers are prepared first, and get their data in an update.
            names = users[at.name][0].operands[1:]
        if not names or names[0] not in users:
            return
        at = computation.instructions[names[0]]
        yield at


def _readers(instruction: Instruction, users: Users) -> Iterator[Instruction]:
    at = instruction
    for _ in range(_MAX_STEPS):
        if not users[at.name]:
            return
        at = users[at.name][0]
        yield at
