"""Reducing partial sums: the collectives, and the specs to pass through.

A value whose reduced result is sharded is reduce-scattered. XLA does so over one dim
(GPU, CPU) or one mesh axis (TPU) at a time, if every waypoint is annotated; if only the
last spec is annotated, it all-reduces the whole value and slices the result, for twice
the bytes (seen with jax 0.10.2 and libtpu 0.0.51: matmuls on 2x8 H100, v5e:4x4,
v5p:4x4x4, v6e:16x16).
"""

from __future__ import annotations

import math

from rhino_jax.cost.reshard import ReshardStep
from rhino_jax.hardware.lowering import OBSERVED, LoweringPolicy
from rhino_jax.hardware.mesh import LaidMesh
from rhino_jax.ir.collectives import ALL_REDUCE, REDUCE_SCATTER
from rhino_jax.ir.spec import Spec
from rhino_jax.ir.traits import OpKind


def combine_steps(
    made: Spec, done: Spec, partial: tuple[int, ...], made_bytes: float, mesh: LaidMesh
) -> tuple[ReshardStep, ...]:
    """Return the collectives that reduce partial sums to a value.

    Args:
      made: spec of the partial sums.
      done: spec of the reduced value; sharded over more axes than `made`, or equal to
        it.
      partial: positions of the mesh axes over which the value is partial.
      made_bytes: bytes of the partial sums on one device.
      mesh: the mesh.
    Returns:
      Reduce-scatters first, so that the all-reduce of the rest is smaller.
    """
    lowering = mesh.lowering
    parts = _parts(made, done, lowering)
    is_told = lowering.annotates_waypoints or lowering.loops_matmuls
    if len(parts) > 1 and not is_told:
        return (ReshardStep(ALL_REDUCE, partial, made_bytes),)
    most = OBSERVED.most_scattered - lowering.gathers_by_axis
    steps: list[ReshardStep] = []
    local, scattered = made_bytes, set[int]()
    for _, axes in parts:
        pieces = math.prod(mesh.sizes[a] for a in axes)
        is_whole = pieces == mesh.num_devices and pieces > most
        # Shards of a vector, as of a bias's gradient, are no whole tiles on TPU: these
        # were all-reduces in GPTs of 256 to 2,048 features.
        is_reduced = lowering.scatters_by_axis and (is_whole or len(made) == 1)
        kind = ALL_REDUCE if is_reduced else REDUCE_SCATTER
        steps.append(ReshardStep(kind, axes, local))
        local /= pieces
        scattered |= set(axes)
    rest = tuple(a for a in partial if a not in scattered)
    if rest:
        steps.append(ReshardStep(ALL_REDUCE, rest, local))
    return tuple(steps)


def combine_route(
    made: Spec, done: Spec, lowering: LoweringPolicy, kind: OpKind | None = None
) -> tuple[Spec, ...]:
    """Return the specs to annotate between partial sums and their reduced value.

    One spec after each reduce-scatter but the last, and before them `made` itself if
    the compiler would otherwise compute the op in `done`:

    - A convolution, with compilers that scatter by axis: these make a loop of it and
      the reduce-scatter of its result, which reads the images again for every slice of
      the filters (gradients of 3x3 and 1x1 filters on v5e:4x4, libtpu 0.0.51: 724 → 177
      and 259 → 94 us if `made` is annotated).
    - A look-up, with any compiler: it shards the indices further, so that no device has
      all that fall into its rows, and then permutes and all-reduces where one
      reduce-scatter suffices (table of 8,192 x 512 on h100:8 and v5e:2x4); over three
      axes that does not compile: "Slice dim size 6 greater than dynamic slice
      dimension: 3" (jax 0.10.2).

    Args:
      made: spec of the partial sums.
      done: spec of the reduced value.
      lowering: how the compiler lowers shardings.
      kind: kind of the op that makes the partial sums; None: any other op.
    """
    now = list(made)
    route: list[Spec] = []
    for dim, axes in _parts(made, done, lowering):
        now[dim] = (*now[dim], *axes)
        route.append(tuple(now))
    is_annotated = kind is OpKind.LOOKUP or (
        kind is OpKind.CONVOLUTION and lowering.scatters_by_axis
    )
    return (*((made,) if route and is_annotated else ()), *route[:-1])


def _parts(
    made: Spec, done: Spec, lowering: LoweringPolicy
) -> list[tuple[int, tuple[int, ...]]]:
    """Return (dim, mesh axes) of each reduce-scatter, in order.

    Minor axes lie on the faster links: they come first, while the value is large.
    """
    added = [
        (dim, after[len(before) :])
        for dim, (before, after) in enumerate(zip(made, done, strict=True))
        if len(after) > len(before)
    ]
    added.sort(key=lambda d: -max(d[1]))
    if not lowering.scatters_by_axis:
        return added
    return [(dim, (axis,)) for dim, axes in added for axis in axes]
