"""The compiled form of a plan, of one program or of several tasks."""

from __future__ import annotations

from dataclasses import dataclass

from rhino_jax.plan.records import Predicted
from rhino_jax.plan.stages import StageCost
from rhino_jax.verify.hlo.collectives.repeated_sums import RepeatedSum
from rhino_jax.verify.hlo.records import CompiledCollective, MemoryUse, OutOfMemory
from rhino_jax.verify.matching.causes import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """Properties of the compiled program or tasks of a plan.

    Attributes:
      platform: "cpu", "tpu" or "gpu".
      compiled: cost of a step; None where it does not fit.
      collectives: collectives of a step.
      memory: the compiler's memory statistics, where the plan is one program.
      stage_peak_bytes: peak memory of each stage, bytes per device; empty for one
        stage.
      out_of_memory: the compiler's error that a program does not fit, or None.
      rematerialised: the compiler's messages on values that it replicated in full.
      repeated_sums: reductions over devices that add the same parts several times.
      evidence: evidence on the causes of differences; None for several tasks.
      stages: (planned, compiled) cost of each chunk of a pipeline.
      between: (planned, compiled) seconds of each chunk for the task that its group
        runs once a step between forward and backward; 0 but for a group's first chunk,
        and empty where micro-batches are not coupled.
      notes: notes for the user, such as on what could not be read, one sentence each.
      seconds: wall time of compiling.
    """

    platform: str
    compiled: Predicted | None
    collectives: tuple[CompiledCollective, ...]
    memory: MemoryUse | None = None
    stage_peak_bytes: tuple[int, ...] = ()
    out_of_memory: OutOfMemory | None = None
    rematerialised: tuple[str, ...] = ()
    repeated_sums: tuple[RepeatedSum, ...] = ()
    evidence: Evidence | None = None
    stages: tuple[tuple[StageCost, StageCost], ...] = ()
    between: tuple[tuple[float, float], ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
