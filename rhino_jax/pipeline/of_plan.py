"""The pipeline of a plan: its work, its schedule, and a simulated step."""

from __future__ import annotations

from rhino_jax.errors import ScheduleError
from rhino_jax.pipeline.jitter import Jittered, Noise, jittered
from rhino_jax.pipeline.schedules.table import make
from rhino_jax.pipeline.simulation import Simulation
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.pipeline.tasks import Link, Schedule
from rhino_jax.pipeline.work import Chunk, Cost, Edge, Work
from rhino_jax.plan.plan import Plan
from rhino_jax.plan.stages import Pipeline


FORWARD_ONLY = "forward-only"


def work_of(pipeline: Pipeline, limit_bytes: int = 0) -> Work:
    """What the stages of a plan cost.

    Args:
      pipeline: of the plan.
      limit_bytes: of every device; 0 for none.
    """
    links: list[Link] = []
    routes: dict[tuple[int, int], int] = {}
    for hop in pipeline.hops:
        for a, b in ((hop.source, hop.target), (hop.target, hop.source)):
            routes[a, b] = len(links)
            links.append(Link(f"{a} → {b}", hop.bytes_per_s, hop.latency_s))
    updates = tuple(cost.update_s for cost in pipeline.costs)
    is_forward_only = pipeline.schedule == FORWARD_ONLY
    return Work(
        chunks=tuple(
            Chunk(
                stage,
                (
                    Cost(
                        forward_s=cost.forward_s,
                        backward_s=cost.backward_s,
                        activation_bytes=cost.activation_bytes,
                        working_bytes=cost.working_bytes,
                    ),
                ),
            )
            for stage, cost in enumerate(pipeline.costs)
        ),
        edges=tuple(
            Edge(h.source, h.target, (h.forward_bytes,), (h.backward_bytes,))
            for h in pipeline.hops
            if h.forward_bytes or h.backward_bytes
        ),
        micro_batches=pipeline.micro_batches,
        links=tuple(links),
        routes=routes,
        update_s=() if is_forward_only else updates,
        fixed_bytes=tuple(cost.fixed_bytes for cost in pipeline.costs),
        limit_bytes=(limit_bytes,) * len(pipeline.costs) if limit_bytes else (),
    )


def schedule_of(pipeline: Pipeline) -> Schedule:
    """In which order every stage runs its tasks."""
    return make(pipeline.schedule, work_of(pipeline))


def simulated(plan: Plan, jitter: Noise | float | None = None) -> Simulation | Jittered:
    """One step of a plan by the clock, or many with noise.

    Args:
      plan: of several stages.
      jitter: None: none. A number: sigma of the logarithm of the duration of every
        task, transfers twice that. Or `rhino_jax.pipeline.jitter.Noise`.
    Raises:
      ScheduleError: the plan has one stage.
    """
    if plan.pipeline is None:
        raise ScheduleError(
            f"the plan of `{plan.program_name}` has one stage: there is nothing to"
            " simulate.",
            where="`plan.simulate`",
            numbers="stages: 1",
            fix="plan with `stages=2` or more.",
        )
    schedule = schedule_of(plan.pipeline)
    if jitter is None:
        return simulate(schedule)
    if not isinstance(jitter, Noise):
        jitter = Noise(task_sigma=float(jitter), link_sigma=2 * float(jitter))
    return jittered(schedule, jitter)
