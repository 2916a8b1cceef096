"""The submeshes of pipeline stages, and the speed of each.

Searches of submeshes and micro-batches are shared between equivalent ones, and give the
predicted seconds of every op under their plans.

Planning stages takes many searches: split loops, numbers of micro-batches, schedules
and then every submesh. One search comes before all of these, that of a whole
micro-batch on a submesh, and mostly it proves that stages gain nothing: lower bounds on
a step that has to beat another plan are here, too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from rhino_jax.analysis.graph import Graph, NodeKind
from rhino_jax.hardware.layout import lay_out
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Program, Source
from rhino_jax.passes.staged.sides import Sides
from rhino_jax.plan.stages import STAGE_AXIS
from rhino_jax.planner.decision import NotFaster
from rhino_jax.planner.meshes import MeshAxes, own_mesh
from rhino_jax.planner.search.driver import find
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.records import Request, SolvedMesh
from rhino_jax.planner.search.remat.choice import Chosen
from rhino_jax.planner.variant_search import NEAR, Search


def seconds_by_op(found: SolvedMesh) -> dict[int, float]:
    """Return the seconds of every op of a plan, with the collectives that it waits for.

    Seconds are of all runs in a step; the communication that compute hides is
    subtracted from all ops proportionally, so that they sum up to the predicted step.

    Args:
      found: the solution of a mesh on which a plan fits.
    """
    graph = found.model.graph

    def place(source: int, target: int) -> int:
        """The producer of an argument's next value also reshards it to that one."""
        return source if graph.nodes[target].kind is NodeKind.INPUT else target

    seconds = found.seconds(place)
    total = seconds.sum()
    scale = float(found.solution.objective / total) if total else 1.0
    by_op: dict[int, float] = defaultdict(float)
    for n in np.flatnonzero(seconds).tolist():
        by_op[_op_of(graph, n)] += scale * float(seconds[n])
    return by_op


def _op_of(graph: Graph, n: int) -> int:
    """Return the op that a node's time belongs to: its own; for a value that is
    resharded for several readers the first of these, or its producer."""

    def after(m: int) -> list[int]:
        return [e.target for e in graph.outgoing[m]]

    def before(m: int) -> list[int]:
        return [e.source.node for e in graph.incoming[m]]

    for beside in (after, before):
        seen, around = {n}, [n]
        while around:
            ends = [graph.nodes[m] for m in around if graph.nodes[m].op is not None]
            if ends:
                op = min(ends, key=lambda node: node.time).op
                assert op is not None
                return op.id
            around = [
                m for m in {k for m in around for k in beside(m)} if m not in seen
            ]
            seen.update(around)
    return graph.program.body.ops[-1]  # An argument returned in another layout.


def with_regions(program: Program, seconds: Mapping[int, float], op_id: int) -> float:
    """Return the seconds of an op and of all ops in its regions."""
    op = program.ops[op_id]
    if op.call is None:
        return seconds.get(op_id, 0.0)
    return sum(seconds.get(inner.id, 0.0) for inner, _ in program.within(op))


@dataclass(frozen=True, slots=True, eq=False)
class SubmeshSearches:
    """Results of searches of one step, and of its submeshes.

    Of a loop over layers most stages compute the same with parts of one stack: they
    differ in the paths of their inputs, and in the names of their tasks.

    Attributes:
      known: results of submeshes.
      whole: mesh of the largest submesh → the result of a whole micro-batch on it.
      faster: (plan of a submesh, whether stacked residuals stay) → the values to
        recompute because that is faster, memory left aside.
    """

    known: dict[Hashable, SearchResult] = field(default_factory=dict)
    whole: dict[MeshAxes, SearchResult] = field(default_factory=dict)
    faster: dict[tuple[SearchResult, bool], Chosen | None] = field(default_factory=dict)

    def find(
        self, program: Program, mesh_axes: MeshAxes, target: Target, request: Request
    ) -> SearchResult:
        """Search a submesh, or return the result of an equivalent one.

        Args:
          program: the submesh's tasks as one program.
          mesh_axes: (name, size) of its axes.
          target: its devices; the same for all submeshes of a mesh.
          request: the same for all submeshes but for pins and memory.
        """
        # Names of inputs, results and tasks do not change what is found.
        tasks = {*program.body.ops}
        key = (
            replace(
                program,
                name="",
                ops=tuple(
                    replace(op, source=Source(), label="") if op.id in tasks else op
                    for op in program.ops
                ),
                inputs=tuple(replace(end, path="") for end in program.inputs),
                outputs=tuple(replace(end, path="") for end in program.outputs),
            ),
            tuple(mesh_axes),
            frozenset(request.pins.items()),
            frozenset(request.output_pins.items()),
            frozenset(request.value_pins.items()),
            request.memory_budget_bytes,
        )
        if key not in self.known:
            self.known[key] = find(program, [mesh_axes], target, request)
        return self.known[key]


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

    def least_step_s(self, searched: int, count: int) -> float:
        """Return a lower bound on a step: every submesh has a share of the model in
        proportion to its speed, and the pipeline fills as with late weight gradients,
        in a third of the time of 1F1B (Qi et al. 2023, table 1).

        In fewer micro-batches, collectives whose size does not depend on the
        micro-batch, such as those of weights, shrink in proportion; in more, they are
        not counted more often.

        Args:
          searched: the number of micro-batches which the seconds are for.
          count: the number of micro-batches.
        """
        rates = []
        for places in self.places:
            # Seconds of all micro-batches, were the whole model on one submesh.
            total_s = math.fsum(self.seconds[places].values())
            compute_s = min(total_s, self.compute_s.get(places, 0.0))
            sent_s = (total_s - compute_s) * min(1.0, count / searched)
            seconds = searched * (compute_s + sent_s)
            rates.append(1 / seconds if seconds else 0.0)
        if not all(rates):
            return 0.0
        # Fewer micro-batches than stages may run in sequence slices, which fill the
        # pipeline.
        idle = (self.groups - 1) / (3 * count) if count >= self.groups else 0.0
        return (1 - NEAR) / sum(rates) * (1 + idle)

    def speed(self, group: int) -> float:
        """Return a submesh's speed over that of the first, for all ops together."""
        first, own = (sum(self.seconds[self.places[g]].values()) for g in (0, group))
        return first / own if own else 1.0


@dataclass(frozen=True, slots=True)
class StepBound:
    """A time that a step in stages has to be shorter than.

    Attributes:
      counts: candidate numbers of micro-batches; the first is that for which the
        submeshes are searched.
      enough_s: seconds that the step has to be shorter than.
    """

    counts: Sequence[int]
    enough_s: float

    def check(self, shapes: GroupMeshes) -> None:
        """Refuse stages that are too slow in any number of micro-batches, however they
        are cut and scheduled.

        Args:
          shapes: the submeshes, with the seconds of a micro-batch on each.
        Raises:
          NotFaster: no number of micro-batches makes a step fast enough.
        """
        searched = self.counts[0]
        least_s, count = min((shapes.least_step_s(searched, n), n) for n in self.counts)
        if least_s >= self.enough_s:
            raise NotFaster(least_s, count)

    def most_s(self, shapes: GroupMeshes) -> float:
        """Return the seconds of a micro-batch on a submesh from which on a step is too
        slow in any number of micro-batches, on meshes of more axes: these save
        collectives, but no compute.

        Args:
          shapes: equal submeshes of few axes.
        Raises:
          NotFaster: compute alone takes too long, or more than `MAX_AXIS_GAIN` has to
            be saved.
        """
        (size,) = {*shapes.places}
        compute_s, searched = shapes.compute_s[size], self.counts[0]
        alone = replace(shapes, seconds={size: {0: compute_s}})
        self.check(alone)
        sent_s = 0.0
        for count in self.counts:
            # A step is as long as its compute and a share of the sent seconds.
            least_s = alone.least_step_s(searched, count)
            share = min(1.0, count / searched)
            each = least_s / compute_s * share if compute_s else 0.0
            sent_s = max(sent_s, (self.enough_s - least_s) / each if each else math.inf)
        if (1 - MAX_AXIS_GAIN) * math.fsum(shapes.seconds[size].values()) > (
            compute_s + sent_s
        ):
            self.check(shapes)
        return compute_s + sent_s


def shapes_of(
    search: Search,
    sides: Sides,
    places: tuple[int, ...],
    meshes: Sequence[MeshAxes],
    finds: SubmeshSearches,
    bound: StepBound | None = None,
) -> GroupMeshes:
    """Return the best mesh for a whole micro-batch on the largest submesh, and the
    seconds of its ops on every submesh.

    Args:
      search: the search of the step.
      sides: passes of a micro-batch.
      places: number of places of each submesh along the stage axis.
      meshes: candidate meshes of all devices.
      finds: results for other numbers of micro-batches.
      bound: checked before meshes of up to `FEW_AXES` axes with the compute of a
        micro-batch that none is below, and after them with the best of them, as if all
        submeshes were as large as the largest.
    Raises:
      NotFaster: see `StepBound`.
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
        assert bound is not None
        axes, own = meshes[0], {size: seconds}
        brief = GroupMeshes.on(axes, (size,) * len(places), own, search.target)
        return bound.most_s(replace(brief, compute_s={size: compute_s}))

    def bound_axes(num_axes: int, compute_s: float, best: SolvedMesh | None) -> float:
        if best is None:
            # On a third axis, at most this share can be saved.
            return most_s({0: compute_s}, compute_s) / (1 - MAX_AXIS_GAIN)
        # One of the axes is that of the stages.
        if num_axes >= 1 + FEW_AXES and not of_few:
            of_few[size] = most_s(seconds_by_op(best), best.overlapped_s)
        return max(of_few.values(), default=math.inf)

    seconds: dict[int, dict[int, float]] = {}
    compute_s: dict[int, float] = {}
    good: tuple[MeshAxes, ...] = tuple(meshes)
    for size in sorted({*places}, reverse=True):
        # Smaller submeshes use the mesh that is best for the largest.
        left = good[:1] if seconds else good
        own = [own_mesh(axes, size) for axes in left]
        is_bounded = not seconds and bound and math.isfinite(bound.enough_s)
        # On one mesh, from the solution of another number of micro-batches, or of whole
        # loops, there.
        found = find(
            sides.program,
            own,
            search.target,
            asked,
            like=finds.whole.get(own[0]) if len(own) == 1 else None,
            is_estimate=True,
            bound_axes=bound_axes if is_bounded else None,
        )
        # Only the best mesh's problem is cached.
        best = replace(found, solved=found.solved[:1])
        finds.whole.setdefault(found.mesh_axes, best)
        seconds[size] = seconds_by_op(found.best)
        compute_s[size] = found.best.overlapped_s
        if not seconds.keys() - {size}:
            good = tuple(left[own.index(axes)] for axes in found.meshes)
    shapes = GroupMeshes.on(good[0], places, seconds, search.target)
    return replace(shapes, good=good, compute_s=compute_s)
