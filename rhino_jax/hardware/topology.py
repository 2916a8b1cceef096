"""The physical topology: how devices are grouped, and the torus of a slice."""

from __future__ import annotations

import dataclasses
import functools
import math

from rhino_jax.errors import HardwareError
from rhino_jax.hardware.target import Target, Tier


def with_topology(
    target: Target, dims: tuple[int, ...], text: str, *, is_built: bool = True
) -> Target:
    """Return the target with its topology fixed.

    Args:
      target: a target with tiers.
      dims: major first. With a torus: its dims, optionally after a number of slices.
        Without: the number of groups of every tier, outermost first, as hosts and GPUs
        per host. Or one number: of chips (or devices), in the usual layout.
      text: the user's text, for errors and as the new name.
      is_built: whether the topology must be one that exists as a product, not any part
        of one.
    Raises:
      HardwareError: the target has no such dims, or cannot be that large.
    """
    torus = target.torus
    if not target.tiers or 0 in dims:
        raise _misfit(target, text, "numbers of at least 1", dims)
    if torus is None:
        return _with_groups(target, dims, text, is_built)
    position = target.tiers.index(torus)
    within = _within(target.tiers, position)
    if len(dims) == 1 and torus.rank != 1:
        found = _sized(target, within * dims[0], text)
        slice_size = capacities(found, within * dims[0])[position]
        if is_built and not torus.is_built(torus_dims(torus, slice_size // within)):
            raise _not_built(target, torus, text, f"no slice of {dims[0]} chips", dims)
        return found
    if len(dims) not in (torus.rank, torus.rank + 1):
        raise _misfit(target, text, f"{torus.rank} numbers (the torus)", dims)
    slices = dims[0] if len(dims) > torus.rank else 1
    sides = dims[-torus.rank :]
    size = within * math.prod(sides)
    if torus.size is not None and size > torus.size:
        raise _misfit(
            target, text, f"at most {torus.size // within} chips a slice", dims
        )
    if is_built and not torus.is_built(sides):
        shape = "x".join(map(str, sides))
        what = f"{slices} slices of {shape}" if len(dims) > torus.rank else shape
        raise _not_built(target, torus, text, f"no {what} chips", sides)
    if slices > 1 and position + 1 == len(target.tiers):
        raise _misfit(target, text, "one slice: nothing links several", dims)
    tiers = list(target.tiers)
    tiers[position] = dataclasses.replace(torus, dims=sides, size=size)
    return _sized(target.replace(tiers=tuple(tiers)), slices * size, text)


def _with_groups(
    target: Target, dims: tuple[int, ...], text: str, is_built: bool
) -> Target:
    if len(dims) == 1:
        return _sized(target, dims[0], text)
    if len(dims) != len(target.tiers):
        names = " x ".join(f"{t.name} groups" for t in reversed(target.tiers))
        raise _misfit(target, text, f"{len(target.tiers)} numbers ({names})", dims)
    tiers, size = [], 1
    for tier, count in zip(target.tiers, reversed(dims), strict=True):
        size *= count
        most = tier.largest or tier.size
        if is_built and most is not None and size > most:
            expected = f"at most {most} devices on one {tier.name}"
            raise _misfit(target, text, expected, dims)
        tiers.append(dataclasses.replace(tier, size=size))
    return _sized(target.replace(tiers=tuple(tiers)), size, text)


def _sized(target: Target, num_devices: int, text: str) -> Target:
    largest = target.tiers[-1].size
    if largest is not None and num_devices > largest:
        raise HardwareError(
            f"hardware {text!r}: it is larger than its links reach.",
            where="hardware=",
            numbers=f"{num_devices} devices, at most {largest}",
            fix="ask for fewer devices.",
        )
    return target.replace(name=text, num_devices=num_devices)


def _misfit(
    target: Target, text: str, expected: str, dims: tuple[int, ...]
) -> HardwareError:
    got = "x".join(map(str, dims))
    return HardwareError(
        f"hardware {text!r}: the topology does not fit {target.name!r}.",
        where="hardware=",
        numbers=f"expected {expected}, got {got}",
        fix="write it as v5e:4x4, v5p:4x4x4, v5e:2x16x16 (two slices) or h100:8x8"
        " (hosts x GPUs).",
    )


def _not_built(
    target: Target, torus: Tier, text: str, what: str, sides: tuple[int, ...]
) -> HardwareError:
    most = f", at most {torus.longest_side}" if torus.longest_side else ""
    example = "v5e:2x16x16" if torus.rank == 2 else "v5p:2x4x4x4"
    return HardwareError(
        f"hardware {text!r}: there is {what} of {target.name!r}.",
        where="hardware=",
        numbers=f"a side of a slice is 1 or a multiple of {torus.side_step}{most}; got"
        f" {'x'.join(map(str, sides))}",
        fix=f"write the {torus.rank} sides of a slice; where there are several, their"
        f" number first, as {example}. To plan for fewer chips than a slice has, leave"
        f" the topology out: hardware={target.name!r}.",
    )


def _within(tiers: tuple[Tier, ...], position: int) -> int:
    """Return how many devices one group inside tier `tiers[position]` has."""
    return (tiers[position - 1].size or 1) if position else 1


def capacities(target: Target, num_devices: int) -> tuple[int, ...]:
    """Return how many of `num_devices` one domain of each tier holds, innermost first.

    Where a domain cannot be filled evenly (384 chips in slices of at most 256), it
    holds the largest divisor that fits.
    """
    found: list[int] = []
    for i, tier in enumerate(target.tiers):
        within = _within(target.tiers, i)
        size = num_devices if tier.size is None else min(tier.size, num_devices)
        is_slice = tier.topology == "torus" and not tier.dims
        if is_slice and num_devices % size:
            size = max(d for d in range(1, size + 1) if num_devices % d == 0)
        found.append(max(size, min(within, num_devices)))
    return tuple(found)


def torus_dims(tier: Tier, num_groups: int) -> tuple[int, ...]:
    """Return the torus that joins `num_groups` groups: the stated or the usual one.

    The usual torus is one that exists as a product if there is one, has dims that all
    wrap around if there is one, and of those is the most cubic, ascending: 16 → 4x4, 64
    → 4x4x4, 192 → 4x4x12 on v5p.
    """
    if tier.dims:
        return tier.dims
    return min(
        (d for d in factorisations(num_groups, tier.rank) if d == tuple(sorted(d))),
        key=lambda dims: (
            not tier.is_built(dims),
            not all(tier.wraps(dims)),
            sum(dims),
            dims,
        ),
    )


@functools.cache
def factorisations(
    number: int, parts: int, least: int = 1
) -> tuple[tuple[int, ...], ...]:
    """Return all ordered ways to write a number as a product.

    Args:
      number: the number.
      parts: number of factors.
      least: smallest factor.
    """
    if parts == 1:
        return ((number,),) if number >= least else ()
    return tuple(
        (factor, *rest)
        for factor in range(least, number + 1)
        if number % factor == 0
        for rest in factorisations(number // factor, parts - 1, least)
    )
