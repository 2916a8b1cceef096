"""The meshes that are compared: of all devices, or of equal groups of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rhino_jax.errors import PinError, StageError
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.layout import mesh_axis_names, mesh_shapes
from rhino_jax.hardware.target import Target
from rhino_jax.ir.blocks import Stored
from rhino_jax.ir.program import Program
from rhino_jax.keywords import read_choice, read_count
from rhino_jax.plan.pins.resolve import ResolvedPins, resolve_pins


STAGE_AXIS = "stage"
AUTO = "auto"

MeshAxes = tuple[tuple[str, int], ...]


def read_stages(what: str, value: Any) -> int | str:
    """`stages=`, checked."""
    if isinstance(value, str):
        return read_choice(what, "stages", value, (AUTO,))
    return read_count(what, "stages", value, least=1)


def num_stages(asked: int | str, axes: MeshAxes | None) -> int:
    """How many stages there are to be; "auto": as many as a mesh has by name, or one.

    Args:
      asked: of the user.
      axes: of the mesh that was given, if any.
    Raises:
      StageError: the mesh has none of these.
    """
    of_mesh = dict(axes or ()).get(STAGE_AXIS)
    if isinstance(asked, str):
        return of_mesh or 1
    if asked == 1 or axes is None or of_mesh == asked:
        return asked
    raise StageError(
        f"the mesh has no axis `{STAGE_AXIS}` of size {asked}.",
        where="`stages=` and `mesh=`",
        numbers="mesh " + ", ".join(f"{n}={s}" for n, s in axes),
        fix=f'give a mesh as {{"{STAGE_AXIS}": {asked}, "data": …}}, or none: rhino'
        " forms the groups.",
    )


def check_in_stages(storage: str | Stored, stages: int) -> None:
    """
    Raises:
      StageError: state is to be stored in blocks, and in several stages.
    """
    if storage and storage != "as written":
        raise StageError(
            "several stages store no fused weights in blocks.",
            where="`storage=` and `stages=`",
            numbers=f"{stages} stages",
            fix="plan with storage='as written', or with stages=1.",
        )


def candidates(
    traced: Traced, target: Target, count: int, stages: int = 1
) -> list[MeshAxes]:
    """Meshes of `count` devices: the one for which the program itself has code
    (`shard_map`), or else all that the topology has; with stages, outermost.

    Raises:
      StageError: groups would not be equal.
    """
    if stages > 1:
        return _staged(target, count, stages)
    by_hand = {op.manual.mesh_axes for op in traced.program.ops if op.manual}
    own = [axes for axes in by_hand if math.prod(n for _, n in axes) == count]
    if len(own) == 1:
        return own
    return [
        tuple(zip(mesh_axis_names(target, len(shape)), shape, strict=True))
        for shape in mesh_shapes(target, count)
    ]


def _staged(target: Target, devices: int, stages: int) -> list[MeshAxes]:
    if devices % stages:
        counts = [n for n in range(2, devices + 1) if devices % n == 0]
        raise StageError(
            f"{devices} devices do not make {stages} equal groups.",
            where="`stages=`",
            numbers=f"{devices} devices, {stages} stages",
            fix=f"take one of {counts} stages, or other devices."
            if counts
            else "take more devices.",
        )
    return [
        (
            (STAGE_AXIS, stages),
            *zip(mesh_axis_names(target, len(shape)), shape, strict=True),
        )
        for shape in mesh_shapes(target, devices // stages)
    ]


def where_pins_hold(
    every: Iterable[MeshAxes], pinned: Mapping[str, Any], program: Program
) -> tuple[list[MeshAxes], ResolvedPins]:
    """The meshes on which all pins hold, and the pins on the last of them.

    Raises:
      PinError: there is none.
    """
    meshes: list[MeshAxes] = []
    resolved: ResolvedPins | None = None
    error: PinError | None = None
    for axes in every:
        try:
            resolved = resolve_pins(pinned, program, axes)
        except PinError as failed:
            # The last has the most axes, so what it says is the most useful.
            error = failed
            continue
        meshes.append(axes)
    if resolved is None:
        assert error is not None
        raise error
    return meshes, resolved
