"""The submeshes of pipeline stages, and the speed of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from rhino_jax.hardware.layout import lay_out
from rhino_jax.hardware.target import Target
from rhino_jax.passes.staged.sides import Sides
from rhino_jax.plan.stages import STAGE_AXIS
from rhino_jax.planner.meshes import MeshAxes, own_mesh
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.staging.submesh_search import SubmeshSearches, seconds_by_op
from rhino_jax.planner.variant_search import Search


FEW_AXES = 2
"""Maximum number of axes of a submesh on which a step is bounded first, where more are
allowed: meshes of three take ten times as long to search."""

MAX_AXIS_GAIN = 0.25
"""Share of a micro-batch's seconds beyond which a third axis of a submesh is not
searched for: it gained 2 to 5 % of those of GPT 7B on 64, 128 and 256 H100, where the
proof that it does not gain the missing 40 % took 4 s for each number of stages."""


@dataclass(frozen=True, eq=False)
class GroupMeshes:
    """All submeshes, each a part of one mesh.

    Attributes:
      mesh_axes: (name, size) of the axes of all devices.
      places: number of places of each submesh along the stage axis.
      seconds: places → op → its seconds on a submesh of that size.
      hop: bandwidth in bytes per second, and latency in seconds, between submeshes.
      good: the best few candidate meshes, this one first.
      compute_s: places → compute seconds in `seconds`, summed over ops.
    """

    mesh_axes: MeshAxes
    places: tuple[int, ...]
    seconds: Mapping[int, Mapping[int, float]]
    hop: tuple[float, float]
    good: tuple[MeshAxes, ...] = ()
    compute_s: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def on(
        cls,
        mesh_axes: MeshAxes,
        places: tuple[int, ...],
        seconds: Mapping[int, Mapping[int, float]],
        target: Target,
    ) -> GroupMeshes:
        """Return the submeshes of a mesh of this hardware."""
        shapes = cls(mesh_axes, places, seconds, (0.0, 0.0))
        link = lay_out(target, mesh_axes).axes[shapes.stage_axis]
        return replace(shapes, hop=(link.bytes_per_s, link.alpha_s))

    @property
    def groups(self) -> int:
        return len(self.places)

    @cached_property
    def stage_axis(self) -> int:
        """Position of the stage axis in the mesh."""
        return [name for name, _ in self.mesh_axes].index(STAGE_AXIS)

    def mesh(self, group: int) -> MeshAxes:
        """Return the axes of one submesh."""
        return own_mesh(self.mesh_axes, self.places[group])

    def devices(self, group: int) -> int:
        """Return the number of devices of one submesh."""
        return math.prod(size for _, size in self.mesh(group))

    def speed(self, group: int) -> float:
        """Return a submesh's speed over that of the first, for all ops together."""
        first, own = (sum(self.seconds[self.places[g]].values()) for g in (0, group))
        return first / own if own else 1.0


def shapes_of(
    search: Search,
    sides: Sides,
    places: tuple[int, ...],
    meshes: Sequence[MeshAxes],
    finds: SubmeshSearches,
    bound_axes: Callable[[GroupMeshes], float] | None = None,
) -> GroupMeshes:
    """Return the best mesh for a whole micro-batch on the largest submesh, and the
    seconds of its ops on every submesh.

    Args:
      search: the search of the step.
      sides: passes of a micro-batch.
      places: number of places of each submesh along the stage axis.
      meshes: candidate meshes of all devices.
      finds: results for other numbers of micro-batches.
      bound_axes: called before meshes of up to `FEW_AXES` axes with the compute of a
        micro-batch that none is below, and after them with the best of them, as if all
        submeshes were as large as the largest; returns the seconds of a micro-batch
        that meshes of more axes must be shorter than, or raises.
    """
    asked = replace(
        search.request,
        pins={},
        output_pins={},
        value_pins={},
        has_recipes=False,
        level="fast",
        memory_budget_bytes=math.inf,
    )
    of_few: dict[int, float] = {}

    size = max(places)

    def most_s(seconds: Mapping[int, float], compute_s: float) -> float:
        assert bound_axes is not None
        axes, own = meshes[0], {size: seconds}
        brief = GroupMeshes.on(axes, (size,) * len(places), own, search.target)
        return bound_axes(replace(brief, compute_s={size: compute_s}))

    def bound(num_axes: int, compute_s: float, best: SearchResult | None) -> float:
        if best is None:
            # On a third axis, at most this share can be saved.
            return most_s({0: compute_s}, compute_s) / (1 - MAX_AXIS_GAIN)
        # One of the axes is that of the stages.
        if num_axes >= 1 + FEW_AXES and not of_few:
            of_few[size] = most_s(seconds_by_op(best), best.compute_s)
        return max(of_few.values(), default=math.inf)

    seconds: dict[int, dict[int, float]] = {}
    compute_s: dict[int, float] = {}
    good: tuple[MeshAxes, ...] = tuple(meshes)
    for size in sorted({*places}, reverse=True):
        # Smaller submeshes use the mesh that is best for the largest.
        left = good[:1] if seconds else good
        own = [own_mesh(axes, size) for axes in left]
        is_bounded = not seconds and bound_axes is not None
        found = finds.find_whole(
            sides.program, own, search.target, asked, bound if is_bounded else None
        )
        seconds[size] = seconds_by_op(found)
        compute_s[size] = found.compute_s
        if not seconds.keys() - {size}:
            good = tuple(left[own.index(axes)] for axes in found.meshes)
    shapes = GroupMeshes.on(good[0], places, seconds, search.target)
    return replace(shapes, good=good, compute_s=compute_s)
