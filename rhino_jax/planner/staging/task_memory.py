"""Working memory of the tasks of a planned submesh.

A submesh is planned as one program, in which its tasks follow one another. Each is
compiled separately: all of its arguments are live from its start to its end, all of its
results are written, and its temporaries end with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rhino_jax.analysis.graph import Graph, NodeKind
from rhino_jax.ir.program import Op
from rhino_jax.model.build import held_ports
from rhino_jax.passes.staged.group import GroupProgram
from rhino_jax.passes.staged.holding import TaskResiduals, earlier_results
from rhino_jax.passes.staged.step import StagedStep, ValueKey
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.runtime.tasks.programs import donated


def working_bytes(
    step: StagedStep,
    of: GroupProgram,
    found: SearchResult,
    size_of: Callable[[ValueKey], int],
) -> tuple[int, ...]:
    """Return the bytes per device that each task takes in addition to what is live
    whether or not it runs.

    Args:
      step: the tasks of all submeshes.
      of: the submesh's tasks as one program.
      found: the result of that program.
      size_of: bytes per device of a value between tasks.
    """
    holding = TaskResiduals.of(of.tasks, step.received(of.tasks[0].group))
    usages = _usages(found)
    in_place: set[ValueKey] = set()
    taken = []
    for task, op_id in zip(of.tasks, of.program.body.ops, strict=True):
        held, replaced = set(holding.held(task)), donated(step, of, task).values()
        in_place |= {*replaced}
        own = [k for k in task.reads if k not in held]
        own += [k for k in earlier_results(of.tasks, task) if k not in in_place]
        made = {
            value: 0 if key in held or key in in_place else size_of(key)
            for value, key in zip(
                of.program.ops[op_id].results, task.makes, strict=True
            )
        }
        whole = sum(map(size_of, own))
        taken.append(whole + _inside(found, of.program.ops[op_id], made, usages))
    return tuple(taken)


@dataclass(frozen=True, slots=True)
class _Usage:
    """Memory of one value, or copy, under a choice.

    Attributes:
      port: port of the value; None for copies.
      bytes: bytes on one device.
      start, stop: times from which and until which it is live; stop is excluded.
    """

    port: int | None
    bytes: float
    start: int
    stop: int


def _usages(found: SearchResult) -> list[_Usage]:
    solved = found.solved[0]
    model, labels = solved.mesh_problem.model, solved.solution.labels
    assert labels is not None, "nothing was found"
    problem = model.problem
    ports: list[int | None] = [port.id for port in held_ports(model.analysis)]
    ports += [None] * (len(problem.node_usages) - len(ports))
    usages = [
        _Usage(port, float(u.usage[labels[u.node]]), u.start, u.stop)
        for port, u in zip(ports, problem.node_usages, strict=True)
    ]
    for pair in problem.edge_usages:
        amount = float(pair.usage[labels[pair.source], labels[pair.target]])
        usages.append(_Usage(None, amount, pair.start, pair.stop))
    return usages


def _inside(
    found: SearchResult, call: Op, made: dict[int, int], usages: Sequence[_Usage]
) -> int:
    """Return the peak bytes of values that are live inside of a task.

    Args:
      found: the result of the submesh's program.
      call: the task's call.
      made: result of the task → bytes that it allocates when it is produced.
      usages: memory of all values of the program.
    """
    graph = found.solved[0].mesh_problem.model.graph
    ops = {op.id for op, _ in graph.program.within(call)}
    times = [n.time for n in graph.nodes if n.op is not None and n.op.id in ops]
    if not times:
        return sum(made.values())
    first, last = min(times), max(times)
    starts = {u.port: u.start for u in usages if u.port is not None}
    changes = np.zeros(last - first + 2)
    results = set[int]()
    for value, size in made.items():
        port = graph.held.get(value)
        since = first
        if port is not None:
            node = graph.nodes[port.node]
            # A loop's final carry has the buffer of the carry.
            kept = node.ports[0] if node.kind is NodeKind.CARRY else port
            results.add(kept.id)
            since = max(first, starts.get(kept.id, node.time))
        changes[min(since, last) - first] += size
    for u in usages:
        if u.bytes and first <= u.start <= last and u.port not in results:
            changes[u.start - first] += u.bytes
            changes[_end(graph, u, last) - first] -= u.bytes
    return math.ceil(np.cumsum(changes)[:-1].max())


def _end(graph: Graph, usage: _Usage, last: int) -> int:
    """Return the time at which a task's temporary is not needed any more."""
    if usage.stop <= last + 1 or usage.port is None:
        return min(usage.stop, last + 1)
    # A fused value that another task reads is written here, not computed there.
    read = [e.time for e in graph.readers[usage.port] if e.time <= last]
    return max(read, default=usage.start) + 1
