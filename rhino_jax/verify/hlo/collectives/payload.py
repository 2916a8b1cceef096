"""Classify a collective instruction, and compute the bytes that one device sends.

Transfers between TPU slices go through the hosts: a program for several slices is
compiled for one of them; a transfer between slices is a `send` and a `recv` that name
its kind and its participants, in one of these ways:

    "{1,2}x{0:7}"                           slices 1 and 2, each device with its peer
    {{100000,200000},{100001,200001}}       groups of ids, 100000 × slice + device
    {{100000->200000},{200000->100000}}     (source, target) pairs

Source: compiled programs (libtpu 0.0.51, two slices of v5e:2x4).

Asynchronous transfers start in one place and finish in another. The three compilers
write them in these ways:

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
import math
import re
from collections.abc import Mapping, Sequence

from rhino_jax.ir.collectives import KINDS, OF_OPCODE
from rhino_jax.verify.hlo.collectives.groups import Groups
from rhino_jax.verify.hlo.module import (
    Computation,
    Instruction,
    type_bytes,
)


_SLICE_KINDS = {k.slice_type: k.name for k in KINDS.values() if k.slice_type}
_TYPE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
"""Matches the name that a `send` shares with its `recv`."""
_PRODUCT = re.compile(r'_xla_megascale_target="\{([\d,]+)\}x\{')
_LISTS = re.compile(r"_xla_megascale_target=\{((?:\{[\d,>\-]*\},?)*)\}")
_IDS_PER_SLICE = 100_000


_TRANSFERS = (*OF_OPCODE, "send", "recv")


def is_transfer_opcode(opcode: str) -> bool:
    """Whether an opcode is that of a collective, its start or its end."""
    return opcode.startswith(_TRANSFERS)


def slice_kind(instruction: Instruction) -> str:
    """Return the kind of transfer that a `send` between slices starts, or empty."""
    if instruction.opcode != "send":
        return ""
    return _SLICE_KINDS.get(instruction.find(_TYPE), "")


def slice_groups(instruction: Instruction, num_partitions: int) -> Groups:
    """Return the groups of participants, as positions among all slices' devices.

    Args:
      instruction: the `send`.
      num_partitions: number of devices of one slice.
    Raises:
      ValueError: the participants are written in an unknown way.
    """
    product = _PRODUCT.search(instruction.attributes)
    if product is not None:
        slices = [int(x) - 1 for x in product.group(1).split(",")]
        return tuple(
            tuple(s * num_partitions + device for s in slices)
            for device in range(num_partitions)
        )
    lists = _LISTS.search(instruction.attributes)
    if lists is None:
        raise ValueError(f"cannot read the slices in {instruction.attributes[:200]!r}")
    return tuple(
        tuple(_position(int(x), num_partitions) for x in re.findall(r"\d+", group))
        for group in re.findall(r"\{([^{}]*)\}", lists.group(1))
    )


def _position(device_id: int, num_partitions: int) -> int:
    slice_number, device = divmod(device_id, _IDS_PER_SLICE)
    return (slice_number - 1) * num_partitions + device


Users = Mapping[str, Sequence[Instruction]]

_CHAIN_ID = re.compile(r'\bchain_id="(\w*)"')
_SYNC = re.compile(r'"is_sync":\s*true')
# Instructions that forward, start or await something, and take no time of their own.
_IDLE = frozenset(
    "add-dependency after-all bitcast constant get-tuple-element iota"
    " opt-barrier parameter partition-id replica-id tuple".split()
)
# Loop counters and offsets: computing them overlaps with nothing.
_SCALAR_BYTES = 16


def is_in_chain(computation: Computation, instruction: Instruction) -> bool:
    """Whether a collective is one occurrence in a chain of fusions."""
    return _CHAIN_ID.search(
        instruction.attributes
    ) is not None or computation.name.startswith("async_collective_fusion")


def starts_chain(instruction: Instruction, users: Users) -> bool:
    """Whether a collective of a chain is the occurrence that starts the transfer."""
    return _reaches(instruction, users, '"AsyncCollectiveStart"')


def chain_ends(computation: Computation) -> tuple[list[str], list[str]] | None:
    """Return the ids of the chains that a fusion starts, and of those that it ends;
    None if it is a part of no chain.

    Args:
      computation: the fusion's.
    """
    users = computation.users()
    chained = [
        x for x in computation if collective_kind(x) and is_in_chain(computation, x)
    ]
    started, ended = (
        [x.find(_CHAIN_ID) for x in chained if _reaches(x, users, target)]
        for target in ('"AsyncCollectiveStart"', '"AsyncCollectiveDone"')
    )
    return (started, ended) if chained else None


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


def is_overlapped(computation: Computation, instruction: Instruction) -> bool:
    """Whether compute runs between a start and its done, here or elsewhere.

    Args:
      computation: the computation in which the transfer starts.
      instruction: the start (`all-gather-start`, `async-start`).
    """
    if not (instruction.opcode.endswith("-start") or instruction.opcode == "send"):
        return False
    if _SYNC.search(instruction.attributes):
        return False
    parts, shared = {instruction.name}, instruction.find(_RENDEZVOUS)
    # XLA:TPU prepares some transfers first; the data then goes into an update.
    is_running = bool(instruction.operands)
    started = itertools.dropwhile(lambda x: x is not instruction, computation)
    for other in itertools.islice(started, 1, None):
        if other.opcode == "recv" and other.find(_RENDEZVOUS) == shared:
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
        or is_transfer_opcode(instruction.opcode)
        or instruction.bytes <= _SCALAR_BYTES
    )


_SLICE_SIZES = re.compile(r"slice_sizes=\{((?:\{[\d,]*\},?\s*)+)\}")
_ELEMENT = re.compile(r"\(?\s*([a-z]\w*)\[")


def collective_kind(instruction: Instruction) -> str:
    """Return the collective kind of an instruction or async start, or empty."""
    kind = OF_OPCODE.get(instruction.opcode.removesuffix("-start"))
    return kind.name if kind is not None else slice_kind(instruction)


def payload_bytes(computation: Computation, instruction: Instruction) -> int:
    """Return the bytes of a collective's operands on one device.

    A permute may copy slices straight into place; its further operands are then
    the place and the offsets. A ragged all-to-all carries offsets and sizes, too.
    """
    operands = [computation.instructions[x] for x in instruction.operands]
    slices = _SLICE_SIZES.search(instruction.attributes)
    if slices is not None:
        element = _ELEMENT.match(operands[0].type)
        one = type_bytes(f"{element.group(1)}[]") if element else 0
        shapes = re.findall(r"\{([\d,]*)\}", slices.group(1))
        return one * sum(math.prod(map(int, s.split(","))) for s in shapes)
    if instruction.opcode.startswith("ragged-all-to-all"):
        return operands[0].bytes
    return sum(operand.bytes for operand in operands)
