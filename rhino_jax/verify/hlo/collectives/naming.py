"""Find the user's operation that a collective belongs to.

Most collectives carry its name. Some that the compiler combined, moved or wrapped do
not; then their callers, the definition of their operand or the users of their result
tell.
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
    """Return JAX's op name and the user's source line of a collective.

    Args:
      kind: kind of the collective. Without a name of its own, a reduction is named by
        its operand's definition, any other kind by the users of its result.
      places: the collective, or its start, and the callers of its computation (a
        fusion, an asynchronous start), innermost first.
    Returns:
      Op name, or the instruction's name where nothing near has one; source line, or
      empty.
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
    # Users of a fusion that starts a transfer only compute while it runs.
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
            # Some transfers are prepared first, and receive their data in an update.
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
