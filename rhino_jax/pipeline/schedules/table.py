"""Schedules by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rhino_jax.errors import ScheduleError, nearest
from rhino_jax.pipeline.check import check_complete, check_memory, checked
from rhino_jax.pipeline.schedules.family import Family
from rhino_jax.pipeline.schedules.named import NAMED, TRAINING
from rhino_jax.pipeline.schedules.searched import searched
from rhino_jax.pipeline.simulation import Simulation
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.pipeline.tasks import Schedule
from rhino_jax.pipeline.work import StepWork


TABLE: Mapping[str, Family] = {
    **NAMED,
    "searched": Family("searched", "found for the tasks at hand", "", searched),
}
"""All families by name; a new one is a new line here, or in `named`."""


def make(name: str, work: StepWork, **options: Any) -> Schedule:
    """Build a schedule by name, and check it.

    Args:
      name: a key of `TABLE`.
      work: costs of the stages.
      **options: options of the family, as `k` of `kfkb`.
    Raises:
      ScheduleError: the name is unknown, or the family does not support these stages.
      ScheduleMemoryError: it does not fit in memory.
    """
    if name not in TABLE:
        raise ScheduleError(
            f"There is no schedule {name!r}.{nearest(name, TABLE)}",
            where="`schedule=`",
            numbers=f"known: {', '.join(TABLE)}",
            fix="take one of the known names.",
        )
    return checked(TABLE[name].build(work, **options))


def fastest(work: StepWork, names: Iterable[str] = TRAINING) -> Simulation:
    """Simulate named schedules; return the fastest that suits the stages and fits.

    Raises:
      ScheduleError: none does; the message tells why for each.
    """
    found: list[Simulation] = []
    wrong: list[str] = []
    for name in names:
        try:
            schedule = TABLE[name].build(work)
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
