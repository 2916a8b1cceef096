"""Simulated steps with noise, slow devices, and one-off delays: a schedule as a network
of dependencies, in many samples of its durations at once.

As in MPI programs, groups of devices synchronise only through data that they send and
receive: a delay of one group travels to others as a wave of idle time, and decays where
groups idle anyway.

Source: Afzal, Hager and Wellein, "Propagation and decay of injected one-off delays on
clusters" (CLUSTER 2019); on desynchronised programs, arXiv 2205.13963.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from rhino_jax.errors import ScheduleError
from rhino_jax.pipeline.simulation import Simulation
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.pipeline.tasks import Schedule
from rhino_jax.units import format_seconds
from rhino_jax.utils.keywords import brief, read_count, real


def times_with(
    simulation: Simulation, seconds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return start and end of every node of a simulated step with other durations.

    A link carries its transfers in the same order as in the simulation. If several
    groups send over one link this is an approximation; if a single one does, it is the
    order in which that group computes them.

    Args:
      simulation: the simulated step.
      seconds: durations of the nodes, numbered as in `TaskGraph`, in samples.

    Shapes:
      seconds, and both results: [nodes, samples]
    """
    graph = simulation.schedule.graph
    count = len(graph.tasks)
    start, end = np.zeros(seconds.shape), np.zeros(seconds.shape)
    previous = {
        b: a for order in simulation.schedule.orders for a, b in pairwise(order)
    }
    last: dict[int, int] = {}  # link → the transfer before
    for node in simulation.sequence:
        ends = list(graph.before[node])
        if node in previous:
            ends.append(previous[node])
        if node >= count:
            link = graph.transfers[node - count].link
            ends += [last[link]] if link in last else []
            last[link] = node
        for other in ends:
            np.maximum(start[node], end[other], out=start[node])
        np.add(start[node], seconds[node], out=end[node])
    return start, end


@dataclass(frozen=True, slots=True)
class Delay:
    """Extra seconds of a single task.

    Attributes:
      group: position of the group that runs the task.
      place: position of the task in the group's order.
      seconds: extra seconds.
    """

    group: int
    place: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Random variation of task and transfer durations from step to step.

    Factors are lognormal with mean 1, so that averages of tasks stay as predicted.

    Attributes:
      task_sigma, link_sigma: standard deviation of the logarithm of durations, drawn
        for every task and every transfer.
      group_sigma: standard deviation of the logarithm of a factor drawn once per step
        for all tasks of a group, as for a hot device.
      slow: group → factor on the duration of all its tasks, in every step.
      delays: delays added in every step.
      samples: number of simulated steps.
      seed: seed of the random numbers.
    """

    task_sigma: float = 0.05
    link_sigma: float = 0.1
    group_sigma: float = 0.0
    slow: Mapping[int, float] = field(default_factory=dict)
    delays: tuple[Delay, ...] = ()
    samples: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
          ScheduleError: a sigma or factor is not a finite number of at least 0, or
            there are no samples.
        """
        sigmas = {"task_sigma", "link_sigma", "group_sigma"}
        given = {name: getattr(self, name) for name in sorted(sigmas)}
        given |= {f"slow[{group}]": factor for group, factor in self.slow.items()}
        for name, value in given.items():
            number = real(value)
            if number is None or not 0 <= number < math.inf:
                raise ScheduleError(
                    f"noise: {name} must be a finite number, 0 or more.",
                    where=f"{name}=",
                    numbers=f"got {brief(value)} ({type(value).__name__})",
                    fix="write a sigma as 0.05 for durations that differ by some 5 %,"
                    " and 1.3 for a group that takes 30 % longer.",
                )
        read_count("noise", "samples", self.samples, least=1)


@dataclass(frozen=True)
class Jittered:
    """Simulated steps of one schedule under noise.

    Attributes:
      schedule: the simulated schedule.
      nominal_s: seconds of a step without noise.
      step_times_s: seconds of every sampled step, in order, [samples].
    """

    schedule: Schedule
    nominal_s: float
    step_times_s: np.ndarray

    def quantile_s(self, share: float) -> float:
        """Return the seconds that this share of steps does not exceed."""
        return float(np.quantile(self.step_times_s, share))

    @property
    def step_time_s(self) -> float:
        """Mean seconds of all samples."""
        return float(self.step_times_s.mean())

    @property
    def p50_s(self) -> float:
        return self.quantile_s(0.5)

    @property
    def p95_s(self) -> float:
        return self.quantile_s(0.95)

    def table(self) -> str:
        """Return step times as text: without noise, then mean and quantiles."""
        steps = self.step_times_s
        rows = {
            "by the clock": self.nominal_s,
            "mean": self.step_time_s,
            "fastest": float(steps.min()),
            **{f"p{p}": self.quantile_s(p / 100) for p in (5, 50, 95)},
            "slowest": float(steps.max()),
        }
        head = f"{self.schedule.name}, {len(steps)} steps with noise"
        return "\n".join(
            [head]
            + [
                f"  {name:12}  {format_seconds(t):>8}  {t / self.nominal_s:.2f}x"
                for name, t in rows.items()
            ]
        )

    def __repr__(self) -> str:
        return f"Jittered({self}, {len(self.step_times_s)} steps)"

    def __str__(self) -> str:
        times = (self.nominal_s, self.p50_s, self.p95_s)
        nominal, median, late = map(format_seconds, times)
        return f"{self.schedule.name}: {nominal} by the clock, p50 {median}, p95 {late}"


def jittered(schedule: Schedule, noise: Noise) -> Jittered:
    """Simulate steps of a schedule under noise; equal seeds give equal results."""
    simulation = simulate(schedule)
    _, ends = times_with(simulation, _samples(schedule, noise))
    step_times = ends[: len(schedule.graph.tasks)].max(axis=0)
    return Jittered(schedule, simulation.step_time_s, step_times)


def _samples(schedule: Schedule, noise: Noise) -> np.ndarray:
    """Return durations of all nodes in all samples, [nodes, samples]."""
    graph, orders = schedule.graph, schedule.orders
    rng = np.random.default_rng(noise.seed)
    count, seconds = len(graph.tasks), np.array(graph.seconds)

    def lognormal(sigma: np.ndarray) -> np.ndarray:
        """Return factors with mean 1, by sigma and sample."""
        normal = rng.standard_normal((len(sigma), noise.samples))
        return np.exp(normal * sigma[:, None] - np.square(sigma[:, None]) / 2)

    sigma = np.full(len(seconds), noise.link_sigma)
    sigma[:count] = noise.task_sigma
    factors = lognormal(sigma)
    of_group = lognormal(np.full(graph.groups, noise.group_sigma))
    for group, factor in noise.slow.items():
        if group not in range(len(of_group)):
            raise ScheduleError(
                "A group is slow that is not there.",
                where=f"slow={brief(dict(noise.slow))}",
                numbers=f"group {brief(group)} of {len(of_group)}",
                fix=f"name a group from 0 to {len(of_group) - 1}.",
            )
        of_group[group] *= factor
    factors[:count] *= of_group[[task.group for task in graph.tasks]]
    found = seconds[:, None] * factors
    for delay in noise.delays:
        group, place = delay.group, delay.place
        if not 0 <= group < len(orders) or not 0 <= place < len(orders[group]):
            raise ScheduleError(
                "A delay is of a task that is not there.",
                where=f"{delay}",
                numbers=f"tasks of every group: {[len(order) for order in orders]}",
                fix="name a group, and a place among its tasks, from 0.",
            )
        found[orders[group][place]] += delay.seconds
    return found
