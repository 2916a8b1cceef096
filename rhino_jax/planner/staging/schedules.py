"""Schedules of a cut step, compared by simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from rhino_jax.errors import ScheduleError
from rhino_jax.pipeline.memory import in_flight
from rhino_jax.pipeline.of_plan import written_orders
from rhino_jax.pipeline.schedules.family import FAMILIES, Placement
from rhino_jax.pipeline.schedules.searched import SEARCHED, fastest, searched
from rhino_jax.pipeline.simulator import check_memory, simulate
from rhino_jax.pipeline.tasks import Schedule
from rhino_jax.pipeline.work import StepWork, work_of
from rhino_jax.plan.stages import Pipeline
from rhino_jax.planner.decision import MIN_GAIN, Decision
from rhino_jax.planner.meshes import AUTO


WHOLE = tuple(name for name, family in FAMILIES.items() if family.is_whole)
"""Schedules of one chunk per submesh, with whole backward passes."""

USUAL = "1f1b"
"""The default schedule of one chunk per submesh."""

COUPLED = "gpipe"
"""The default schedule of coupled micro-batches: backward passes wait for all forward
passes."""

RUN = tuple(name for name, family in FAMILIES.items() if family.has_backward)
"""Schedules that stages can run. "auto" considers `token-slices` only where
micro-batches are fewer than stages: it needs causal sequences, and a submesh's program
is longer by the number of slices, as is planning."""

DISPATCH_S = 1e-4
"""Seconds that any task takes in addition to its work, where schedules are compared: a
jitted call on four devices took 18 µs, with 128 arrays 370 µs (JAX 0.12, CPU). With
tasks as short as that the schedule with the most tasks is the slowest, whatever its
bubble."""

SAMPLES = 4
"""Number of perturbed list schedules for each way to run backward passes, where
schedules are compared."""


@dataclass(frozen=True, slots=True)
class EstimatedSchedule:
    """A schedule for one of several cuts.

    Attributes:
      cut: position of the cut.
      name: name of the schedule.
      is_split: whether backward passes are split into two tasks.
      step_time_s: simulated step in seconds, from the estimated costs of the cut.
      fits: whether it fits in memory, by the same estimate.
      in_flight: for each submesh, the number of micro-batches whose residuals are live.
      recomputed_s: as `step_time_s`, with all forward passes recomputed in backward
        passes; infinite where they cannot be.
      is_usual: whether it is the default, which others have to be clearly faster than.
      slices: number of slices of every sequence.
    """

    cut: int
    name: str
    is_split: bool
    step_time_s: float
    fits: bool
    in_flight: tuple[int, ...]
    recomputed_s: float = math.inf
    is_usual: bool = False
    slices: int = 1

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key: the default schedule unless another is clearly faster; each
        doubling of the slices, whose programs are longer in proportion, has to be
        clearly faster too."""
        steps = 2.0 if self.name == SEARCHED else float(not self.is_usual)
        steps += math.log2(self.slices)
        return not self.fits, self.step_time_s * (1 + MIN_GAIN * steps)


def may_split(schedule: str) -> bool:
    """Whether a schedule may split backward passes."""
    return schedule == AUTO or FAMILIES[schedule].is_split


def has_several(schedule: str) -> bool:
    """Whether a schedule is of several chunks per submesh."""
    return schedule != AUTO and Placement.ONE not in FAMILIES[schedule].placements


def placements(schedule: str, groups: int) -> list[tuple[int, ...]]:
    """Return the placements that suit a schedule: the submesh of each chunk."""
    suited = Placement if schedule == AUTO else FAMILIES[schedule].placements
    return [placement.of(groups) for placement in suited]


def compare(works: Sequence[StepWork], schedule: str) -> list[EstimatedSchedule]:
    """Return the schedules of all cuts, best first.

    Args:
      works: estimated work of each cut.
      schedule: its name, or "auto".
    Raises:
      ScheduleError: no schedule suits any cut.
    """

    def estimate(option: tuple[int, str]) -> EstimatedSchedule:
        cut, name = option
        work = replace(works[cut], dispatch_s=DISPATCH_S)
        free = replace(work, limit_bytes=())
        built: Schedule | None = None
        for held in (work, free) if name == SEARCHED else ():
            with suppress(ScheduleError):
                built = built or searched(held, samples=SAMPLES, effort=0)
        built = built or FAMILIES[name].build(free)
        simulation, fits = simulate(built), False
        limited = replace(built.graph, limit_bytes=work.limit_bytes)
        with suppress(ScheduleError):
            check_memory(replace(simulation, schedule=replace(built, graph=limited)))
            fits = True
        again_s = math.inf
        if not fits and not built.is_split:
            # Forward passes run again in backward passes.
            chunks = (
                replace(
                    chunk,
                    costs=tuple(
                        replace(c, backward_s=c.forward_s + c.backward_s)
                        for c in chunk.costs
                    ),
                )
                for chunk in free.chunks
            )
            again = replace(free, chunks=tuple(chunks))
            again_s = simulate(FAMILIES[name].build(again)).step_time_s
        return EstimatedSchedule(
            cut,
            name,
            built.is_split,
            simulation.step_time_s,
            fits,
            flights_of(built, len(work.chunks) * work.slices),
            again_s,
            name == usual(work),
            work.slices,
        )

    tried = Decision(estimate, (ScheduleError,))
    for cut, work in enumerate(works):
        for name, family in FAMILIES.items():
            if schedule in (AUTO, name) and family.suits(work):
                tried.plan((cut, name))
    if not tried.plans:
        raise next(iter(tried.left.values()))
    return sorted(tried.plans.values(), key=lambda candidate: candidate.rank)


def usual(work: StepWork) -> str:
    """Return the default schedule of one chunk per submesh."""
    return COUPLED if work.between else USUAL


def flights_of(schedule: Schedule, chunks: int) -> tuple[int, ...]:
    """Return, for each submesh, the number of micro-batches whose residuals are live.

    Args:
      schedule: the schedule of all submeshes.
      chunks: number of chunks of all submeshes together, each counted once for each
        sequence slice.
    """
    found = in_flight(schedule)
    return tuple(-(-count // (chunks // len(found))) for count in found)


def settle(pipeline: Pipeline, schedule: str, limit_bytes: float) -> Pipeline:
    """Return a pipeline with known costs in its final schedule.

    Args:
      pipeline: by the schedule that was chosen before its submeshes were planned.
      schedule: the requested schedule.
      limit_bytes: the memory budget of a device.
    Raises:
      ScheduleError: a searched schedule does not fit.
    """
    limit = int(limit_bytes) if math.isfinite(limit_bytes) else 0
    work = work_of(pipeline, limit)
    if pipeline.schedule == SEARCHED:
        effort = 1.0 if schedule == SEARCHED else 0.0
        found = searched(work, effort=effort, splits=(pipeline.is_split,))
        return replace(pipeline, orders=written_orders(found))
    if schedule != AUTO or pipeline.is_split or pipeline.group_of or pipeline.between:
        return pipeline
    usual_s = simulate(FAMILIES[USUAL].build(work)).step_time_s
    try:
        best = fastest(work, WHOLE)
    except ScheduleError:
        return replace(pipeline, schedule=USUAL)
    is_clear = best.step_time_s < (1 - MIN_GAIN) * usual_s
    name = best.schedule.name if is_clear else USUAL
    return replace(pipeline, schedule=name)
