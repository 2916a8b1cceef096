"""The SPMD pipeline pass: from a micro-batched step to the function of one stage."""

from __future__ import annotations

import json
from typing import Any

from jax import lax

from rhino_jax._compat import (
    close_jaxpr,
    consts_as_inputs,
    jaxpr_consts,
    last_as_consts,
    open_jaxpr,
    without_dead_code,
)
from rhino_jax.frontend.regions import PLAIN_CALLS
from rhino_jax.ir.program import Program
from rhino_jax.ir.transform import ONE_PROGRAM, num_microbatches
from rhino_jax.passes.program_pass import ProgramPass
from rhino_jax.passes.spmd_pipeline.spread import StageAxis
from rhino_jax.passes.spmd_pipeline.step import OnStage, find, step_of
from rhino_jax.rewrite.flatten import flatten
from rhino_jax.rewrite.retraced import without_captured


AXIS = "stage"
"""Name of the mesh axis of stages, which the collectives of a stage are over."""


def on_stage(closed: Any, program: Program, choice: str) -> Any:
    """Return what each of several stages runs of a micro-batched step.

    Results are those of the original step but for the order in which floats are added.
    All micro-batches pass forward through all stages, then back (as in GPipe): a stage
    holds the residuals of all of them. Equations outside of layers each stage runs for
    some of the micro-batches, and updates of stacks for its layers.

    Args:
      closed: closed jaxpr of the step in micro-batches.
      program: imported from it.
      choice: JSON, as `{"stages": 2}`.
    Returns:
      A closed jaxpr of the same inputs and results, stacks of layers `[L, …]` as `[L /
        stages, …]`, to be run inside of `shard_map` over the axis `stage`: it has
        collectives over it.
    Raises:
      StageError: it has no scan over layers that divides; see `found.find`.
    """
    stages = int(json.loads(choice)["stages"])
    flat = flatten(program, closed, lambda op: op.name in PLAIN_CALLS)
    body = find(flat, stages, num_microbatches(program.transforms))
    step = step_of(flat, body)

    def run(*arrays: Any) -> list[Any]:
        axis = StageAxis(AXIS, stages, body.loop.call.trip_count, lax.axis_index(AXIS))
        return OnStage(step, axis, arrays).results()

    consts, opened = jaxpr_consts(closed), consts_as_inputs(open_jaxpr(closed))
    new = without_captured(run, opened, step.shapes(stages), {AXIS: stages})
    return without_dead_code(last_as_consts(close_jaxpr(new, ()), consts))


PASS = ProgramPass(ONE_PROGRAM, on_stage)
