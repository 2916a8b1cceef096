"""The fastest order of a graph of tasks, by CP-SAT.

Variables: the start of every task and transfer, in integer units of time. Constraints:
one task at a time in a group, one transfer at a time on a link, no task before its
inputs, and, if memory is limited, live bytes at any time. Micro-batches are equivalent,
so tasks of one kind and chunk run in their order: if any starts satisfy the
constraints, so do sorted ones. Objective: the end of the last task.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ortools.sat.python import cp_model

from rhino_jax.pipeline.simulation import Simulation
from rhino_jax.pipeline.tasks import Hold, TaskGraph, Transfer


_UNITS = 20_000
"""Time units per known step, if durations have no common unit."""


def reorder(
    known: Simulation, *, seed: int = 0, effort: float = 1.0
) -> tuple[tuple[tuple[int, ...], ...] | None, bool]:
    """Search for faster orders of a schedule's tasks.

    Args:
      known: simulation of the schedule to start from.
      seed: seed of the search.
      effort: limit on CP-SAT's deterministic seconds.
    Returns:
      The orders, or None if none exist or none were found; and whether it was proved
      that none is faster than these, or than the known one. Without a common unit
      durations are rounded, and nothing is proved.
    """
    graph, tasks = known.schedule.graph, known.schedule.graph.tasks
    unit = common_unit(list(graph.seconds))
    unit_s = unit or known.step_time_s / _UNITS
    horizon = math.ceil(known.step_time_s / unit_s - 1e-6)
    lengths = [round(seconds / unit_s) for seconds in graph.seconds]
    hints = (*known.task_start_s, *known.transfer_start_s)
    model = cp_model.CpModel()
    starts: list[Any] = []
    rows: dict[Any, list[cp_model.IntervalVar]] = defaultdict(list)
    for i, node in enumerate(graph.nodes):
        length = lengths[i]
        if isinstance(node, Transfer) and not length:
            starts.append(starts[node.source] + lengths[node.source])
            continue
        starts.append(model.new_int_var(0, horizon - length, f"s{i}"))
        model.add_hint(starts[i], round(hints[i] / unit_s))
        interval = model.new_fixed_size_interval_var(starts[i], length, f"i{i}")
        place = (node.link,) if isinstance(node, Transfer) else node.group
        rows[place].append(interval)
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    for i, before in enumerate(graph.before):
        # A transfer that takes no time has no start of its own.
        for other in before if i < len(tasks) or lengths[i] else ():
            model.add(starts[i] >= ends[other])
    for row in rows.values():
        model.add_no_overlap(row)
    if graph.limit_bytes:
        _add_memory(model, graph, starts, ends, horizon)
    for i, task in enumerate(tasks):
        later = graph.by_key.get(
            (task.kind, task.chunk, task.micro_batch + 1, task.slice)
        )
        if later is not None:
            model.add(starts[later] >= ends[i])
    last = model.new_int_var(0, horizon, "step")
    for end in ends[: len(tasks)]:
        model.add(end <= last)
    model.minimize(last)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model)
    is_exact = unit is not None
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, status == cp_model.INFEASIBLE and is_exact
    # Tasks of no duration keep their order.
    keys = [(solver.value(starts[i]), lengths[i]) for i in range(len(tasks))]
    orders = (sorted(order, key=keys.__getitem__) for order in known.schedule.orders)
    return tuple(map(tuple, orders)), status == cp_model.OPTIMAL and is_exact


def _add_memory(
    model: cp_model.CpModel,
    graph: TaskGraph,
    starts: Sequence[Any],
    ends: Sequence[Any],
    horizon: int,
) -> None:
    """Bound the live bytes of every group, in units that divide all sizes."""
    sizes = [h.bytes for t in graph.tasks for h in t.holds]
    unit = math.gcd(*sizes, *(t.working_bytes for t in graph.tasks)) or 1
    rows: dict[int, list[tuple[Any, int]]] = defaultdict(list)
    for i, task in enumerate(graph.tasks):
        for h, hold in enumerate((Hold(task.working_bytes, (i,)), *task.holds)):
            if h or hold.bytes:
                end = model.new_int_var(0, horizon, f"e{i}.{h}")
                for until in hold.until:
                    model.add(end >= ends[until])
                size = model.new_int_var(0, horizon, f"d{i}.{h}")
                interval = model.new_interval_var(starts[i], size, end, f"h{i}.{h}")
                rows[task.group].append((interval, hold.bytes // unit))
    for group, row in rows.items():
        room = (graph.limit_bytes[group] - graph.base_bytes[group]) // unit
        intervals, demands = zip(*row, strict=True)
        model.add_cumulative(intervals, demands, room)


def common_unit(durations: list[float]) -> float | None:
    """Return a time unit of which all durations are multiples; None if not found."""
    positive = [d for d in durations if d > 0]
    if not positive:
        return 1.0
    for part in (1, 2, 3, 4, 6, 10):
        unit = min(positive) / part
        ratios = [d / unit for d in positive]
        if max(ratios) < _UNITS and all(abs(r - round(r)) < 1e-6 for r in ratios):
            return unit
    return None
