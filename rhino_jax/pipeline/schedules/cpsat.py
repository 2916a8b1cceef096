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

from ortools.sat.python import cp_model

from rhino_jax.pipeline.simulation import Simulation
from rhino_jax.pipeline.tasks import TaskGraph


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
    model = _ScheduleModel(known)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, status == cp_model.INFEASIBLE and model.is_exact
    starts = [solver.value(s) for s in model.starts]
    return model.orders(starts), status == cp_model.OPTIMAL and model.is_exact


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


class _ScheduleModel:
    def __init__(self, known: Simulation) -> None:
        self.known = known
        self.graph = graph = known.schedule.graph
        times = [t.seconds for t in graph.tasks]
        times += [t.seconds for t in graph.transfers]
        unit = common_unit(times)
        self.is_exact = unit is not None and not any(k.buffers for k in graph.links)
        self.unit_s = unit or known.step_time_s / _UNITS
        self.horizon = math.ceil(known.step_time_s / self.unit_s - 1e-6)
        self.model = cp_model.CpModel()
        self.starts: list[cp_model.IntVar] = []
        self.ends: list[cp_model.LinearExpr] = []
        self._tasks()
        self._transfers()
        self._memory()
        self._symmetry()
        last = self.model.new_int_var(0, self.horizon, "step")
        for end in self.ends:
            self.model.add(end <= last)
        self.model.minimize(last)

    def _units(self, seconds: float) -> int:
        return round(seconds / self.unit_s)

    def _tasks(self) -> None:
        by_group = defaultdict(list)
        for i, task in enumerate(self.graph.tasks):
            length = self._units(task.seconds)
            start = self.model.new_int_var(0, self.horizon - length, f"t{i}")
            self.model.add_hint(start, self._units(self.known.task_start_s[i]))
            self.starts.append(start)
            self.ends.append(start + length)
            by_group[task.group].append(
                self.model.new_fixed_size_interval_var(start, length, f"i{i}")
            )
        for i, task in enumerate(self.graph.tasks):
            for earlier in task.after:
                self.model.add(self.starts[i] >= self.ends[earlier])
        for intervals in by_group.values():
            self.model.add_no_overlap(intervals)

    def _transfers(self) -> None:
        by_link = defaultdict(list)
        for i, transfer in enumerate(self.graph.transfers):
            length = self._units(transfer.seconds)
            start: cp_model.LinearExprT = self.ends[transfer.source]
            if length:
                start = variable = self.model.new_int_var(0, self.horizon, f"s{i}")
                known = self._units(self.known.transfer_start_s[i])
                self.model.add_hint(variable, known)
                self.model.add(variable >= self.ends[transfer.source])
                by_link[transfer.link].append(
                    self.model.new_fixed_size_interval_var(variable, length, f"j{i}")
                )
            for target in transfer.targets:
                self.model.add(self.starts[target] >= start + length)
        for intervals in by_link.values():
            self.model.add_no_overlap(intervals)

    def _memory(self) -> None:
        graph = self.graph
        if not graph.limit_bytes:
            return
        sizes = [h.bytes for t in graph.tasks for h in t.holds]
        sizes += [t.working_bytes for t in graph.tasks]
        unit = math.gcd(*sizes) or 1
        rows = defaultdict(list)
        for i, task in enumerate(graph.tasks):
            if task.working_bytes:
                length = self._units(task.seconds)
                interval = self.model.new_fixed_size_interval_var(
                    self.starts[i], length, f"w{i}"
                )
                rows[task.group].append((interval, task.working_bytes // unit))
            for h, hold in enumerate(task.holds):
                end = self.model.new_int_var(0, self.horizon, f"e{i}.{h}")
                for until in hold.until:
                    self.model.add(end >= self.ends[until])
                size = self.model.new_int_var(0, self.horizon, f"d{i}.{h}")
                interval = self.model.new_interval_var(
                    self.starts[i], size, end, f"h{i}.{h}"
                )
                rows[task.group].append((interval, hold.bytes // unit))
        for group, row in rows.items():
            room = (graph.limit_bytes[group] - graph.base_bytes[group]) // unit
            intervals, demands = zip(*row, strict=True)
            self.model.add_cumulative(intervals, demands, room)

    def _symmetry(self) -> None:
        tasks = self.graph.tasks
        for i, task in enumerate(tasks):
            place = (task.kind, task.chunk, task.micro_batch + 1, task.slice)
            later = self.graph.by_key.get(place)
            if later is not None:
                self.model.add(self.starts[later] >= self.ends[i])

    def orders(self, starts: list[int]) -> tuple[tuple[int, ...], ...]:
        """Return each group's tasks by start; tasks of no duration keep their order."""
        graph: TaskGraph = self.graph
        found = []
        for order in self.known.schedule.orders:
            place = {task: k for k, task in enumerate(order)}
            found.append(
                tuple(
                    sorted(
                        order,
                        key=lambda i: (
                            starts[i],
                            self._units(graph.tasks[i].seconds),
                            place[i],
                        ),
                    )
                )
            )
        return tuple(found)
