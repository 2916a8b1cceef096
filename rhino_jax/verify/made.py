"""What compilers made of a plan, whether it is one program or several."""

from __future__ import annotations

from dataclasses import dataclass

from rhino_jax.plan.records import Predicted
from rhino_jax.plan.stages import StageCost
from rhino_jax.verify.hlo.collectives.repeated_sums import RepeatedSum
from rhino_jax.verify.hlo.records import CompiledCollective, MemoryUse, OutOfMemory
from rhino_jax.verify.matching.causes import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """Attributes:
    platform: "cpu", "tpu" or "gpu".
    compiled: what a step takes; None where it does not fit.
    collectives: of a step.
    memory: the compiler's account, of one program.
    stage_peak_bytes: what each of several stages holds at its peak.
    out_of_memory: the compiler's word that something does not fit, or None.
    rematerialised: the compiler's lines on values that it replicated in full.
    repeated_sums: sums over devices that count the same parts several times.
    evidence: what is known of the causes of differences.
    stages: of a pipeline, each chunk's cost as planned and as compiled.
    between: of each chunk, seconds of what its group does once a step between forward
      and backward passes, as planned and as compiled; 0 but of a group's first chunk,
      and empty where micro-batches are not coupled.
    notes: what could not be read, and more, in sentences.
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
