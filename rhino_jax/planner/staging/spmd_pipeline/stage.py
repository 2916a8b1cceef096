"""The search of the program of one stage of an SPMD pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rhino_jax.ir.spec import OpenSpec, without
from rhino_jax.ir.transform import ONE_PROGRAM, Transform, chosen
from rhino_jax.passes.apply import cut_in
from rhino_jax.plan.stages import STAGE_AXIS
from rhino_jax.planner.meshes import MeshAxes, own_mesh
from rhino_jax.planner.search.records import Request
from rhino_jax.planner.variant_search import Search


@dataclass(frozen=True, slots=True, eq=False)
class StageSearch:
    """Search on one stage's devices.

    Attributes:
      search: the search of the whole step, on all devices.
      stages: the number of stages.
      per_microbatch: places where sums over the batch are taken over each micro-batch.
    """

    search: Search
    stages: int
    per_microbatch: tuple[str, ...] = ()

    @property
    def axis(self) -> int:
        """Position of the stage axis."""
        names = [[n for n, _ in axes] for axes in self.search.meshes]
        (axis,) = {of.index(STAGE_AXIS) for of in names}
        return axis

    def of_step(self, done: Sequence[Transform] = ()) -> Search:
        """Return the search of the whole step on one stage's devices.

        Args:
          done: passes applied before.
        """
        own = [own_mesh(axes, 1) for axes in self.search.meshes]
        devices = math.prod(n for _, n in own[0])
        target = self.search.target.replace(num_devices=devices)
        found = replace(self.search, mesh=None, meshes=own, target=target, refine=0)
        found = found.after(done)
        return replace(found, request=own_request(found.request, self.axis))

    def of_stage(self, count: int, done: Sequence[Transform] = ()) -> Search:
        """Return the search of one stage's program in `count` micro-batches.

        Args:
          count: the number of micro-batches.
          done: passes applied before.
        """
        cut = cut_in(count, self.per_microbatch)
        stage = chosen(ONE_PROGRAM, {"stages": self.stages})
        return self.of_step([*done, cut, stage])

    def whole_axes(self, own: MeshAxes) -> MeshAxes:
        """Return the mesh of all devices for the mesh of one stage."""
        every = self.search.meshes
        return every[[own_mesh(axes, 1) for axes in every].index(own)]


def own_request(request: Request, axis: int) -> Request:
    """Return the request with the pins of one stage, without the stage axis."""
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
