"""Schedules by name, and one searched for the tasks at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from rhino_jax.errors import ScheduleError, nearest
from rhino_jax.pipeline.graph import graph_of
from rhino_jax.pipeline.schedules.family import FAMILIES, Placement, family
from rhino_jax.pipeline.schedules.listed import PriorityRule, bound_s, listed
from rhino_jax.pipeline.simulation import Simulation
from rhino_jax.pipeline.simulator import check_complete, check_memory, checked, simulate
from rhino_jax.pipeline.tasks import Schedule
from rhino_jax.pipeline.work import StepWork


SEARCHED = "searched"

MAX_TASKS_OF_CPSAT = 300
"""Largest number of tasks and transfers for which CP-SAT is run: for 4 stages and 16
micro-batches with split backward passes it found an order that meets the bound in 10 s;
for 8 stages and 32 micro-batches it found nothing in 35 s."""


@dataclass(frozen=True, slots=True)
class ScheduleCandidate:
    """A schedule that was simulated in the search.

    Attributes:
      name: name of its family, or of its priority rule.
      step_time_s: simulated seconds; None if it cannot run, or does not fit in memory.
      reason: reason for that; else empty.
    """

    name: str
    step_time_s: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Searched:
    """The result of a search.

    Attributes:
      simulation: simulation of the best schedule.
      tried: all candidates.
      bound_s: lower bound on the time of any order of the same tasks, in seconds.
    """

    simulation: Simulation
    tried: tuple[ScheduleCandidate, ...]
    bound_s: float

    @property
    def is_optimal(self) -> bool:
        return self.simulation.step_time_s <= self.bound_s * (1 + 1e-9)

    @property
    def schedule(self) -> Schedule:
        return self.simulation.schedule


@family(
    SEARCHED,
    "found for the tasks at hand",
    placements=tuple(Placement),
    is_split=True,
)
def searched(work: StepWork, **options: Any) -> Schedule:
    """Return the fastest schedule that fits, among the candidates of `search`.

    Args:
      work: costs of the stages.
      **options: as for `search`.
    """
    return replace(search(work, **options).schedule, name=SEARCHED)


def search(
    work: StepWork,
    *,
    samples: int = 8,
    seed: int = 0,
    effort: float = 1.0,
    splits: Sequence[bool] = (False, True),
) -> Searched:
    """Simulate named schedules and list schedules, and refine small ones with CP-SAT.

    Never slower than a named schedule that fits, since these are candidates. Backward
    passes are tried whole, and split into gradients of inputs and of weights.

    Args:
      work: costs of the stages.
      samples: number of list schedules with noisy priorities, whole and split each.
      seed: seed of the noise, and of CP-SAT.
      effort: limit on CP-SAT's deterministic seconds, which take up to ten times as
        long in wall time; 0: no CP-SAT.
      splits: whether to try whole (False) or split (True) backward passes, or both.
    Raises:
      ScheduleError: no schedule fits.
    """
    tried: list[ScheduleCandidate] = []
    best: Simulation | None = None
    for name, build in _candidates(work, samples, seed, splits):
        try:
            schedule = build()
            if schedule.is_split not in splits:
                continue
            simulation = simulate(schedule)
            check_memory(simulation)
        except ScheduleError as error:
            tried.append(ScheduleCandidate(name, None, error.what))
            continue
        tried.append(ScheduleCandidate(name, simulation.step_time_s))
        if best is None or simulation.step_time_s < best.step_time_s:
            best = simulation
    if best is None:
        raise ScheduleError(
            "`searched`: no schedule fits.",
            where="; ".join(sorted({t.reason for t in tried})),
            numbers=f"{len(tried)} schedules were tried",
            fix="allow more memory, or take smaller micro-batches or more stages.",
        )
    return _exact(best, tried, seed, effort)


def _candidates(
    work: StepWork, samples: int, seed: int, splits: Sequence[bool]
) -> Iterator[tuple[str, Callable[[], Schedule]]]:
    for name, known in FAMILIES.items():
        if known.has_backward and name != SEARCHED:
            yield name, partial(known.build, work)
    for is_split in splits:
        graph = graph_of(work, is_split=is_split)
        for rule in _rules(work, samples, seed):
            words = ["listed", "split" if is_split else "whole"]
            words.append("by path" if rule.by_path else "by kind")
            if rule.most_in_flight:
                words.append(f"{rule.most_in_flight[0]} in flight")
            if rule.noise:
                words.append(f"shaken {rule.seed}")
            yield ", ".join(words), partial(listed, "listed", graph, rule)


def _rules(work: StepWork, samples: int, seed: int) -> Iterator[PriorityRule]:
    groups, parts = work.groups, work.slices
    chunks = [len(c) * parts for c in work.chunks_of]
    as_1f1b = tuple(c * (groups - g) for g, c in enumerate(chunks))
    early = tuple(c * (2 * (groups - g) - 1) for g, c in enumerate(chunks))
    alike = tuple(c * groups for c in chunks)
    limits = (as_1f1b, alike, early, ())
    for limit, by_path in product(limits, (False, True)):
        yield PriorityRule(by_path=by_path, most_in_flight=limit)
    yield PriorityRule(most_in_flight=alike, is_reserved=False)
    shaken = partial(PriorityRule, by_path=True)
    for k in range(samples):
        noise = 0.02 * (1 + k // 4)
        yield shaken(most_in_flight=limits[k % 4], noise=noise, seed=seed + k)


def _exact(
    best: Simulation, tried: list[ScheduleCandidate], seed: int, effort: float
) -> Searched:
    """Return the best candidate, or CP-SAT's reordering of its tasks."""
    graph = best.schedule.graph
    found = Searched(best, tuple(tried), bound_s(graph))
    is_small = len(graph.tasks) + len(graph.transfers) <= MAX_TASKS_OF_CPSAT
    if found.is_optimal or effort <= 0 or not is_small:
        return found
    from rhino_jax.pipeline.schedules.cpsat import reorder

    orders, is_proved = reorder(best, seed=seed, effort=effort)
    if orders is not None:
        try:
            simulation = simulate(Schedule("CP-SAT", graph, orders))
            check_memory(simulation)
        except ScheduleError as error:
            # CP-SAT's model has the memory of tasks alone, without received transfers.
            failed = ScheduleCandidate("CP-SAT", None, error.what)
            return replace(found, tried=(*tried, failed))
        tried.append(ScheduleCandidate("CP-SAT", simulation.step_time_s))
        if simulation.step_time_s < best.step_time_s:
            best = simulation
    bound = max(found.bound_s, best.step_time_s if is_proved else 0.0)
    return Searched(best, tuple(tried), bound)


def make(name: str, work: StepWork, **options: Any) -> Schedule:
    """Build a schedule by name, and check it.

    Args:
      name: a key of `FAMILIES`.
      work: costs of the stages.
      **options: options of the family, as `k` of `kfkb`.
    Raises:
      ScheduleError: the name is unknown, or the family does not support these stages.
      ScheduleMemoryError: it does not fit in memory.
    """
    if name not in FAMILIES:
        raise ScheduleError(
            f"There is no schedule {name!r}.{nearest(name, FAMILIES)}",
            where="`schedule=`",
            numbers=f"known: {', '.join(FAMILIES)}",
            fix="take one of the known names.",
        )
    return checked(FAMILIES[name].build(work, **options))


def fastest(work: StepWork, names: Iterable[str] | None = None) -> Simulation:
    """Simulate named schedules; return the fastest that suits the stages and fits.

    Raises:
      ScheduleError: none does; the message tells why for each.
    """
    if names is None:
        names = [n for n in FAMILIES if FAMILIES[n].has_backward and n != SEARCHED]
    found: list[Simulation] = []
    wrong: list[str] = []
    for name in names:
        try:
            schedule = FAMILIES[name].build(work)
            check_complete(schedule)
            simulation = simulate(schedule)
            check_memory(simulation)
        except ScheduleError as error:
            wrong.append(error.what)
        else:
            found.append(simulation)
    if not found:
        raise ScheduleError(
            "No schedule suits these stages and fits.",
            where=" ".join(wrong),
            fix="try `searched`, smaller micro-batches, or more stages.",
        )
    return min(found, key=lambda simulation: simulation.step_time_s)
