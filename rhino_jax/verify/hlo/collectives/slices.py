"""Read transfers between TPU slices, which go through the hosts.

A program for several slices is compiled for one of them; a transfer between slices is a
`send` and a `recv` that name its kind and its participants, in one of these ways:

    "{1,2}x{0:7}"                           slices 1 and 2, each device with its peer
    {{100000,200000},{100001,200001}}       groups of ids, 100000 × slice + device
    {{100000->200000},{200000->100000}}     (source, target) pairs

Source: compiled programs (libtpu 0.0.51, two slices of v5e:2x4).
"""

from __future__ import annotations

import re

from rhino_jax.verify.hlo.collectives.groups import Groups
from rhino_jax.verify.hlo.module import Instruction


_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_TYPE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_PRODUCT = re.compile(r'_xla_megascale_target="\{([\d,]+)\}x\{')
_LISTS = re.compile(r"_xla_megascale_target=\{((?:\{[\d,>\-]*\},?)*)\}")
_IDS_PER_SLICE = 100_000


def slice_kind(instruction: Instruction) -> str:
    """Return the kind of transfer that a `send` between slices starts, or empty."""
    found = _TYPE.search(instruction.attributes)
    if instruction.opcode != "send" or found is None:
        return ""
    return _KINDS.get(found.group(1), "")


def rendezvous(instruction: Instruction) -> str:
    """Return the name that a `send` shares with its `recv`, or empty."""
    found = _RENDEZVOUS.search(instruction.attributes)
    return found.group(1) if found else ""


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
