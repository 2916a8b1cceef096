"""Analyse asynchronous transfers: started in one place and finished in another.

The three compilers write them in these ways:

    a-start, a-done                 a pair of instructions
    async-start, async-done         likewise around a computation that contains `a`
    custom-call-start, …            likewise on another core (XLA:TPU)
    send, recv, recv-done           between slices (XLA:TPU)
    a chain of fusions (XLA:TPU)    each contains `a` once more: the first passes it to
                                    `AsyncCollectiveStart`, the last to
                                    `AsyncCollectiveDone`, and those between,
                                    `async_collective_fusion`s, continue it while they
                                    compute, in loops too

A chain is one transfer: it counts where its first fusion runs. Its members share a
`chain_id` (ids are reused in other computations). Channel ids do not identify it: the
collectives of `shard_map` may all have the same.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

from rhino_jax.verify.hlo.collectives.slices import rendezvous
from rhino_jax.verify.hlo.module import Computation, Instruction


Users = Mapping[str, Sequence[Instruction]]

_CHAIN = re.compile(r'\bchain_id="')
_SYNC = re.compile(r'"is_sync":\s*true')
# Instructions that forward, start or await something, and take no time of their own.
_IDLE = frozenset(
    "add-dependency after-all bitcast constant get-tuple-element iota"
    " opt-barrier parameter partition-id replica-id tuple".split()
)
_COLLECTIVE = re.compile(
    r"^(?:all-|reduce-scatter|collective-|ragged-all-to-all|send|recv)"
)
# Loop counters and offsets: computing them overlaps with nothing.
_SCALAR_BYTES = 16


def is_in_chain(computation: Computation, instruction: Instruction) -> bool:
    """Whether a collective is one occurrence in a chain of fusions."""
    return _CHAIN.search(
        instruction.attributes
    ) is not None or computation.name.startswith("async_collective_fusion")


def starts_chain(instruction: Instruction, users: Users) -> bool:
    """Whether a collective of a chain is the occurrence that starts the transfer."""
    return _reaches(instruction, users, '"AsyncCollectiveStart"')


def _reaches(instruction: Instruction, users: Users, target: str) -> bool:
    """Whether a result flows into a custom call, through slices and the like."""
    todo = [instruction.name]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        for user in users[name]:
            if user.opcode == "custom-call":
                if target in user.attributes:
                    return True
            elif user.name not in seen:
                seen.add(user.name)
                todo.append(user.name)
    return False


def is_overlapped(
    computation: Computation, instruction: Instruction, *, is_scheduled: bool
) -> bool:
    """Whether compute runs between a start and its done, here or elsewhere.

    Args:
      computation: the computation in which the transfer starts.
      instruction: the start (`all-gather-start`, `async-start`).
      is_scheduled: whether the printed order is the run order; if it is not, any
        start counts as overlapped.
    """
    if not (instruction.opcode.endswith("-start") or instruction.opcode == "send"):
        return False
    if _SYNC.search(instruction.attributes):
        return False
    if not is_scheduled:
        return True
    parts = {instruction.name}
    # XLA:TPU prepares some transfers first; the data then goes into an update.
    is_running = bool(instruction.operands)
    started = itertools.dropwhile(lambda x: x is not instruction, computation)
    for other in itertools.islice(started, 1, None):
        if other.opcode == "recv" and rendezvous(other) == rendezvous(instruction):
            parts.add(other.name)
        elif parts.intersection(other.operands):
            if other.opcode.endswith("-done") and other.opcode != "send-done":
                return False
            parts.add(other.name)
            is_running = is_running or other.opcode.endswith("-update")
        elif is_running and _works(other):
            return True
    return True


def _works(instruction: Instruction) -> bool:
    return not (
        instruction.opcode in _IDLE
        or instruction.opcode.endswith(("-start", "-done", "-update"))
        or _COLLECTIVE.match(instruction.opcode)
        or instruction.bytes <= _SCALAR_BYTES
    )
