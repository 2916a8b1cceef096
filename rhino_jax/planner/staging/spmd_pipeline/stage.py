"""The search of what one of several stages of one program does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rhino_jax.ir.spec import OpenSpec, without
from rhino_jax.ir.transform import ONE_PROGRAM, Transform, chosen
from rhino_jax.plan.stages import STAGE_AXIS
from rhino_jax.planner.meshes import MeshAxes, own_mesh
from rhino_jax.planner.search.records import Request
from rhino_jax.planner.variant_search import Search
from rhino_jax.planner.variants import cut_in


@dataclass(frozen=True, slots=True, eq=False)
class StageSearch:
    """Searches on one stage's devices.

    Attributes:
      search: of the whole step, on all devices.
      stages: how many.
      per_microbatch: where sums over the batch are those of a micro-batch.
    """

    search: Search
    stages: int
    per_microbatch: tuple[str, ...] = ()

    @property
    def axis(self) -> int:
        """Position of the axis of the stages."""
        names = [[n for n, _ in axes] for axes in self.search.meshes]
        (axis,) = {of.index(STAGE_AXIS) for of in names}
        return axis

    def of_step(self, done: Sequence[Transform] = ()) -> Search:
        """Of the whole step, as if these devices were all there are.

        Args:
          done: passes that are done before.
        """
        own = [own_mesh(axes, 1) for axes in self.search.meshes]
        devices = math.prod(n for _, n in own[0])
        target = self.search.target.replace(num_devices=devices)
        found = replace(self.search, mesh=None, meshes=own, target=target, refine=0)
        found = found.after(done)
        return replace(found, request=own_request(found.request, self.axis))

    def of_stage(self, count: int, done: Sequence[Transform] = ()) -> Search:
        """Of what one stage does of so many micro-batches.

        Args:
          done: passes that are done before.
        """
        cut = cut_in(count, self.per_microbatch)
        stage = chosen(ONE_PROGRAM, {"stages": self.stages})
        return self.of_step([*done, cut, stage])

    def whole_axes(self, own: MeshAxes) -> MeshAxes:
        """The mesh of all devices, of one stage's."""
        every = self.search.meshes
        return every[[own_mesh(axes, 1) for axes in every].index(own)]


def own_request(request: Request, axis: int) -> Request:
    """With the pins that a stage has: of all but the axis of the stages."""
    return replace(
        request,
        pins={i: without(s, [axis]) for i, s in request.pins.items()},
        output_pins={i: without(s, [axis]) for i, s in request.output_pins.items()},
        value_pins={
            v: replace(p, spec=_without(p.spec, axis))
            for v, p in request.value_pins.items()
        },
        has_recipes=False,
    )


def _without(spec: OpenSpec, axis: int) -> OpenSpec:
    return tuple(None if d is None else without((d,), [axis])[0] for d in spec)
