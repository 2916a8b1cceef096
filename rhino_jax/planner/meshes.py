"""Candidate meshes: of all devices, or of the submeshes of pipeline stages.

With several stages, the outermost axis is `stage`. Submeshes of equal size have one
place each along it; submeshes of unequal size have places in proportion: four, two and
two devices are 2 + 1 + 1 places of two devices, in a mesh stage=4, x=2. A stage's own
mesh is its part of that: the other axes are common to all stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from rhino_jax.errors import PinError, StageError
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.layout import mesh_axis_names, mesh_shapes
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import axes_text
from rhino_jax.plan.resolved_pins import ResolvedPins, resolve_pins
from rhino_jax.plan.stages import STAGE_AXIS
from rhino_jax.utils.keywords import brief, read_count_or, whole


AUTO = "auto"

MeshAxes = tuple[tuple[str, int], ...]


def read_stages(what: str, value: Any) -> int | str | tuple[int, ...]:
    """Check `stages=`: a number of stages, "auto", or the devices of each stage."""
    if isinstance(value, list | tuple) and value:
        sizes = tuple(n for x in value if (n := whole(x)) is not None and n > 0)
        if len(sizes) == len(value):
            return sizes
    also = "; or the devices of each, as [4, 2, 2]"
    return read_count_or(what, "stages", value, AUTO, also=also)


def places_of(
    asked: int | str | tuple[int, ...],
    axes: MeshAxes | None,
    devices: int,
    *,
    on_torus: bool = False,
) -> tuple[int, ...]:
    """Return the number of places along the stage axis of each stage; "auto": one stage
    for each place of the mesh's stage axis, or one stage where it has no such axis.

    Args:
      asked: the user's `stages=`, as read by `read_stages`.
      axes: (name, size) of the given mesh's axes; None: no mesh is given.
      devices: the number of devices.
      on_torus: whether the devices are TPUs, whose collectives do not run in groups of
        arbitrary size.
    Raises:
      StageError: the mesh has no such stage axis, or the submeshes do not sum up to all
        devices, or they do not tile the torus.
    """
    of_mesh = dict(axes or ()).get(STAGE_AXIS)
    if isinstance(asked, tuple):
        sizes = " + ".join(map(str, asked))
        near = _near(asked, devices)
        instead = f", as stages={near}" if near else ""
        if sum(asked) != devices:
            raise StageError(
                f"stages of {sizes} devices do not use all devices.",
                where="`stages=`",
                numbers=f"{sizes} = {sum(asked)}, and there are {devices} devices",
                fix=f"give sizes that sum up to {devices}{instead}, or a number of"
                " equal stages.",
            )
        # libtpu 0.0.52 does not compile a reduce-scatter over 3, 5 or 6 of 8 chips, nor
        # an all-reduce over 6:
        # "total_device_count % num_participants_per_group == 0".
        wrong = [size for size in dict.fromkeys(asked) if devices % size]
        if on_torus and wrong:
            raise StageError(
                f"stages of {sizes} devices do not tile the topology: TPUs have"
                " collectives in groups whose size divides the number of all devices.",
                where="`stages=`",
                numbers=f"{devices} devices, which "
                + " and ".join(map(str, wrong))
                + f" {'does' if len(wrong) == 1 else 'do'} not divide",
                fix=f"take sizes of {_divisors(devices)}{instead}.",
            )
        unit = math.gcd(*asked)
        places = tuple(size // unit for size in asked)
        of_mesh = (of_mesh or 1) if axes is not None else sum(places)
        if axes is not None and of_mesh % sum(places):
            raise StageError(
                f"stages of {sizes} devices are no parts of the"
                f" mesh along `{STAGE_AXIS}`.",
                where="`stages=` and `mesh=`",
                numbers=f"mesh {axes_text(axes)}",
                fix=f'give a mesh as {{"{STAGE_AXIS}": {sum(places)}, "x": {unit}}}, or'
                " none: rhino forms the submeshes.",
            )
        return tuple(n * of_mesh // sum(places) for n in places)
    if isinstance(asked, str):
        return (1,) * (of_mesh or 1)
    if axes is None and asked > devices:
        raise _not_equal(devices, asked)
    if asked == 1 or axes is None or of_mesh == asked:
        return (1,) * asked
    raise StageError(
        f"the mesh has no axis `{STAGE_AXIS}` of size {asked}.",
        where="`stages=` and `mesh=`",
        numbers=f"mesh {axes_text(axes)}",
        fix=f'give a mesh as {{"{STAGE_AXIS}": {asked}, "data": …}}, or none: rhino'
        " forms the submeshes.",
    )


def _near(sizes: tuple[int, ...], devices: int) -> list[int]:
    """Return the sizes of as many submeshes, each a divisor of the number of devices
    and together all devices, that are nearest to the requested sizes; empty where there
    are none."""
    choices = _divisors(devices)
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for size in sizes:
        more: dict[int, tuple[int, list[int]]] = {}
        for used, (off, found) in best.items():
            for n in choices:
                if used + n <= devices:
                    way = off + abs(n - size), [*found, n]
                    more[used + n] = min(way, more.get(used + n, way))
        best = more
    return best.get(devices, (0, []))[1]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def candidates(
    traced: Traced, target: Target, count: int, places: tuple[int, ...] = (1,)
) -> list[MeshAxes]:
    """Return the candidate meshes of `count` devices: the one that the program's own
    `shard_map` code is written for, or else all that the topology has; with several
    stages, the stage axis is outermost.

    Args:
      traced: the traced function.
      target: the hardware.
      count: the number of devices.
      places: the number of places of each stage along the stage axis.
    Raises:
      StageError: the devices do not make equal submeshes.
    """
    if len(places) > 1:
        if count % sum(places):
            raise _not_equal(count, sum(places))
        of_stage = _all(target, count // sum(places))
        return [((STAGE_AXIS, sum(places)), *axes) for axes in of_stage]
    by_hand = {op.manual.mesh_axes for op in traced.program.ops if op.manual}
    own = [axes for axes in by_hand if math.prod(n for _, n in axes) == count]
    if len(own) == 1:
        return own
    return _all(target, count)


def _all(target: Target, count: int) -> list[MeshAxes]:
    return [
        tuple(zip(mesh_axis_names(target, len(shape)), shape, strict=True))
        for shape in mesh_shapes(target, count)
    ]


def _not_equal(devices: int, places: int) -> StageError:
    counts = _divisors(devices)[1:]
    each, more = divmod(devices, places)
    nearly_equal = [each + (stage < more) for stage in range(min(places, devices))]
    return StageError(
        f"{devices} devices do not make {brief(places)} equal stages.",
        where="`stages=`",
        numbers=f"{devices} devices, {brief(places)} stages",
        fix=f"take one of {counts} stages, or the devices of each, as"
        f" stages={nearly_equal}."
        if devices >= places
        else "take fewer stages, or more devices.",
    )


def own_mesh(mesh_axes: MeshAxes, places: int) -> MeshAxes:
    """Return the axes of a submesh that has `places` places on the stage axis."""
    return tuple((n, places if n == STAGE_AXIS else size) for n, size in mesh_axes)


def stage_devices(mesh_axes: MeshAxes, places: Sequence[int]) -> list[list[int]]:
    """Return each stage's devices, in its order, as positions in the whole mesh.

    Args:
      mesh_axes: (name, size) of the axes of all devices.
      places: number of places of each stage along the stage axis.
    """
    names, sizes = zip(*mesh_axes, strict=True)
    positions = np.arange(math.prod(sizes)).reshape(sizes)
    return [
        np.take(positions, range(*bound), names.index(STAGE_AXIS)).ravel().tolist()
        for bound in pairwise(accumulate(places, initial=0))
    ]


def where_pins_hold(
    every: Iterable[MeshAxes], pinned: Mapping[str, Any], program: Program
) -> tuple[list[MeshAxes], ResolvedPins]:
    """Return the meshes on which all pins hold, and the pins on the last of them.

    Raises:
      PinError: there is no such mesh.
    """
    meshes: list[MeshAxes] = []
    resolved: ResolvedPins | None = None
    error: PinError | None = None
    for axes in every:
        try:
            resolved = resolve_pins(pinned, program, axes)
        except PinError as failed:
            # The last mesh has the most axes, so its error is the most useful.
            error = failed
            continue
        meshes.append(axes)
    if resolved is None:
        assert error is not None
        raise error
    return meshes, resolved


def without_stages(
    pinned: Mapping[str, Any], stages: int
) -> tuple[dict[str, Any], dict[str, int]]:
    """Separate layout pins from stage pins, which are numbers.

    Args:
      pinned: key → spec or stage.
      stages: the number of stages.
    Raises:
      PinError: there is no such stage.
    """
    found = {k: v for k, v in pinned.items() if type(v) is int}
    for key, stage in found.items():
        if 0 <= stage < stages and stages > 1:
            continue
        raise PinError(
            f"pin {key!r}: there is no stage {stage}.",
            where=repr(key),
            numbers=f"{stages} stages, from 0" if stages > 1 else "one stage",
            fix=f"pin it to a stage from 0 to {stages - 1}."
            if stages > 1
            else "say how many stages, as stages=2, or pin a PartitionSpec.",
        )
    return {k: v for k, v in pinned.items() if k not in found}, found
