"""Split a step into the tasks of its plan."""

from __future__ import annotations

from rhino_jax.passes.staged.apart import take_apart
from rhino_jax.passes.staged.in_slices import staged_in_slices
from rhino_jax.passes.staged.remat import StagedRemat
from rhino_jax.passes.staged.sides import apart_as_planned
from rhino_jax.passes.staged.stacks import Unstacked
from rhino_jax.passes.staged.staging import staged
from rhino_jax.passes.staged.step import StagedStep
from rhino_jax.plan.stages import Pipeline


def step_of(of_step: Unstacked, pipeline: Pipeline) -> StagedStep:
    """Return the tasks of a plan.

    Args:
      of_step: the function, with layer stacks split as planned.
      pipeline: pipeline of its plan.
    Raises:
      PlanFileError: the plan is of a version that splits micro-batches otherwise.
    """
    step = of_step.closed, of_step.program
    count, places = pipeline.micro_batches, pipeline.per_microbatch
    remat = StagedRemat.of(pipeline.recomputed, (x.choice for x in pipeline.made_again))
    if pipeline.slices:
        groups = pipeline.groups
        return staged_in_slices(
            take_apart(*step, count, places),
            pipeline.stage_of,
            groups[: len(groups) // len(pipeline.slices)],
            pipeline.slices,
            remat=remat,
            together=of_step.together,
        )
    planned = len(pipeline.stage_of), bool(pipeline.between)
    return staged(
        apart_as_planned(*step, count, places, planned),
        pipeline.stage_of,
        pipeline.group_of,
        is_split=pipeline.is_split,
        remat=remat,
        is_twice=pipeline.is_twice,
        together=of_step.together,
    )
