"""Choose the usual topology for a number of devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

from rhino_jax.errors import HardwareError
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.target import Target, Tier


def torus_of(target: Target) -> Tier | None:
    """Return the interconnect tier that is a torus, or None."""
    return next((t for t in target.tiers if t.topology == "torus"), None)


def devices_per_chip(target: Target) -> int:
    """Return the number of devices that share one position of the torus."""
    within = itertools.takewhile(lambda t: t.topology != "torus", target.tiers)
    return max((t.size or 1 for t in within), default=1)


def topology_for(hardware: str | Path, num_devices: int) -> str:
    """Return the name of hardware with its usual topology for a number of devices.

    TPU: of the slices that libtpu can describe, one with wrap-around links in all dims
    if there is one, then the most cubic, then the one on fewest hosts: ("v5e", 16) →
    "v5e:4x4", ("v5p", 16) → "v5p:2x2x4". More devices than one slice has use the fewest
    slices. GPU: as many GPUs per host as divide the number evenly: ("h100", 64) →
    "h100:8x8".

    Args:
      hardware: a name or file without its topology, as for `load_target`.
      num_devices: number of JAX devices; a tpu7x chip has two.
    Raises:
      HardwareError: the name is unknown, or there is no such topology.
    """
    target = load_target(hardware)
    name = str(hardware).strip()
    torus = torus_of(target)
    dims: tuple[int, ...] | None = None
    if num_devices >= 1 and target.num_devices is None:
        if torus is None:
            dims = _hosts(target, num_devices)
        elif num_devices % devices_per_chip(target) == 0:
            dims = _slices(torus, devices_per_chip(target), num_devices)
    if dims is not None:
        return f"{name}:{'x'.join(map(str, dims))}"
    raise HardwareError(
        f"hardware {name!r}: no topology of {num_devices} devices is known.",
        numbers="two sides of a TPU slice must each be even or 1, and a tpu7x chip is"
        " two devices",
        fix="use a number of devices with more factors of 2, or name the topology, as"
        " v5e:4x4.",
    )


def _hosts(target: Target, num_devices: int) -> tuple[int, ...] | None:
    if len(target.tiers) != 2:
        return None
    most = min(target.tiers[0].size or num_devices, num_devices)
    gpus = max(n for n in range(1, most + 1) if num_devices % n == 0)
    return num_devices // gpus, gpus


def _slices(torus: Tier, chip_devices: int, num_devices: int) -> tuple[int, ...] | None:
    """Return the number of slices, if several, and each slice's dims in chips."""
    chips = num_devices // chip_devices
    largest = chips if torus.size is None else torus.size // chip_devices
    if chips <= largest:
        return _slice(torus, chips)
    for slices in range(-(-chips // largest), chips + 1):
        sides = _slice(torus, chips // slices) if chips % slices == 0 else None
        if sides is not None:
            return slices, *sides
    return None


def _slice(torus: Tier, chips: int) -> tuple[int, ...] | None:
    """Return the dims of the best slice of that many chips, or None."""
    return min(
        (
            sides
            for sides in _factorisations(chips, torus.rank)
            if torus.is_built(sides)
        ),
        key=lambda sides: (
            not all(torus.wraps(sides)),
            sum(sides),
            _num_hosts(sides),
            sides,
        ),
        default=None,
    )


def _num_hosts(sides: tuple[int, ...]) -> int:
    return math.prod(-(-side // 2) for side in sides[:2]) * math.prod(sides[2:])


def _factorisations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield all ordered ways to write `number` as a product of `parts` factors."""
    if parts == 1:
        yield (number,)
        return
    for factor in range(1, number + 1):
        if number % factor == 0:
            for rest in _factorisations(number // factor, parts - 1):
                yield factor, *rest
