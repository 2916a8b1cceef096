"""Searches of submeshes and micro-batches, shared between equivalent ones; and the
predicted seconds of every op under their plans."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rhino_jax.analysis.graph import Graph, NodeKind
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Program, Source
from rhino_jax.planner.meshes import MeshAxes
from rhino_jax.planner.search.driver import find
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.records import Request
from rhino_jax.planner.search.remat.rows import Chosen


def seconds_by_op(found: SearchResult) -> dict[int, float]:
    """Return the seconds of every op of a plan, with the collectives that it waits for.

    Seconds are of all runs in a step; the communication that compute hides is
    subtracted from all ops proportionally, so that they sum up to the predicted step.

    Args:
      found: the result of a search in which a plan fits.
    """
    solved = found.solved[0]
    model, labels = solved.mesh_problem.model, solved.solution.labels
    assert labels is not None, "nothing was found"
    nodes = model.graph.nodes
    seconds = np.array(
        [costs[label] for costs, label in zip(model.problem.costs, labels, strict=True)]
    )
    for source, target, table in model.problem.edges:
        # The producer of an argument's next value also reshards it to that argument.
        is_made = nodes[target].kind is NodeKind.INPUT
        seconds[source if is_made else target] += table[labels[source], labels[target]]
    total = seconds.sum()
    scale = float(found.step_s / total) if total else 1.0
    by_op: dict[int, float] = {}
    for n in np.flatnonzero(seconds).tolist():
        op = _op_of(model.graph, n)
        by_op[op] = by_op.get(op, 0.0) + scale * float(seconds[n])
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
    inner = () if op.call is None else op.call.regions
    return seconds.get(op_id, 0.0) + sum(
        with_regions(program, seconds, o) for region in inner for o in region.ops
    )


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

    def find_whole(
        self,
        program: Program,
        meshes: Sequence[MeshAxes],
        target: Target,
        request: Request,
        bound_axes: Callable[[int, float, SearchResult | None], float] | None = None,
    ) -> SearchResult:
        """Search a whole micro-batch.

        On one mesh, it starts from the known solution of another number of
        micro-batches, or of whole loops, on that mesh.

        Args:
          program: the program of a micro-batch.
          meshes: candidate meshes of a submesh.
          target: all devices.
          request: the same for all searches but for the remaining time.
          bound_axes: see `rhino_jax.planner.search.driver.find`.
        """
        like = self.whole.get(tuple(meshes[0])) if len(meshes) == 1 else None
        found = find(
            program,
            meshes,
            target,
            request,
            like=like,
            is_estimate=True,
            bound_axes=bound_axes,
        )
        # Only the best mesh's problem is cached.
        best = replace(found, solved=found.solved[:1])
        self.whole.setdefault(found.mesh_axes, best)
        return found

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
        key = (
            _without_names(program),
            tuple(mesh_axes),
            frozenset(request.pins.items()),
            frozenset(request.output_pins.items()),
            frozenset(request.value_pins.items()),
            request.memory_budget_bytes,
        )
        if key not in self.known:
            self.known[key] = find(program, [mesh_axes], target, request)
        return self.known[key]

    def of_plan(
        self, found: SearchResult, keeps_stacks: bool, ask: Callable[[], Chosen | None]
    ) -> Chosen | None:
        """Return the values to recompute under a plan, once for equivalent submeshes.

        Args:
          found: the plan of the submesh.
          keeps_stacks: whether stacked residuals stay.
          ask: chooses the values.
        """
        key = found, keeps_stacks
        if key not in self.faster:
            self.faster[key] = ask()
        return self.faster[key]


def _without_names(program: Program) -> Program:
    """Return a submesh's program without the names of its inputs, results and tasks."""
    tasks = {*program.body.ops}
    return replace(
        program,
        name="",
        ops=tuple(
            replace(op, source=Source(), label="") if op.id in tasks else op
            for op in program.ops
        ),
        inputs=tuple(replace(end, path="") for end in program.inputs),
        outputs=tuple(replace(end, path="") for end in program.outputs),
    )
