"""Pipeline stages: parts of a program with devices of their own; one if not divided."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rhino_jax.plan.decisions import Decisions
from rhino_jax.plan.records import Predicted
from rhino_jax.utils.codec import OF_PROCESS


STAGE_AXIS = "stage"
"""Name of the mesh axis of the stages."""

IN_ONE_PROGRAM = "one-program"
"""`schedule=` of an SPMD pipeline, whose stages have no programs of their own."""


@dataclass(frozen=True, slots=True)
class StageSend:
    """A value that one stage sends to another.

    Attributes:
      to: position of the receiving stage.
      what: description of the value: tree path, or op and source line.
      bytes: bytes per step, over all devices.
      seconds: predicted seconds per step.
    """

    to: int
    what: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Costs of a chunk of a stage, or of one sequence slice of it, per device.

    Costs of the stage as a whole are on its first chunk.

    Attributes:
      forward_s: seconds of the forward pass of one micro-batch.
      backward_s: seconds of its backward pass, without `weights_s`.
      weights_s: seconds of its weight gradients, if a separate task computes them or
        may do; None: not known, half of the backward pass where it is split.
      update_s: of the stage, seconds of the update, once per step.
      activation_bytes: residuals that the forward pass of a micro-batch saves for its
        backward pass, received values included.
      weight_residual_bytes: the part of `activation_bytes` that the weight-gradient
        task reads; None: all.
      output_gradient_bytes: further bytes that the input-gradient task saves for the
        weight-gradient task, computed or received.
      offloaded_bytes: the part of `activation_bytes` that is offloaded to host memory.
      working_bytes: largest temporary memory of a micro-batch's task, in addition to
        these.
      fixed_bytes: of the stage, bytes live throughout the step: state, and gradient
        accumulators.
      update_bytes: of the stage, largest temporary memory of the tasks that run once
        per step, in addition to `fixed_bytes`.
    """

    forward_s: float
    backward_s: float = 0.0
    weights_s: float | None = None
    update_s: float = 0.0
    activation_bytes: int = 0
    weight_residual_bytes: int | None = None
    output_gradient_bytes: int = 0
    offloaded_bytes: int = 0
    working_bytes: int = 0
    fixed_bytes: int = 0
    update_bytes: int = 0

    @property
    def whole_backward_s(self) -> float:
        """Seconds of the backward pass in one task."""
        return self.backward_s + (self.weights_s or 0.0)

    @property
    def split_s(self) -> tuple[float, float]:
        """Seconds of the input gradients and of the weight gradients."""
        if self.weights_s is None:
            return self.backward_s / 2, self.backward_s / 2
        return self.backward_s, self.weights_s

    @property
    def split_bytes(self) -> tuple[int, int]:
        """Residuals freed after the input gradients, and after the weight gradients."""
        late = self.weight_residual_bytes
        late = self.activation_bytes if late is None else late
        return self.activation_bytes - late, late


@dataclass(frozen=True, slots=True)
class StageHop:
    """Transfers between two chunks, and their link.

    Attributes:
      source, target: positions of the chunks, the earlier one first.
      forward_bytes, backward_bytes: bytes of one device for one micro-batch.
      bytes_per_s, latency_s: bandwidth and latency of the link, one way.
    """

    source: int
    target: int
    forward_bytes: int
    backward_bytes: int
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Between:
    """The task of a stage between all forward and all backward passes, once per step.

    It exists if values of the whole batch couple micro-batches.

    Attributes:
      seconds: seconds of the task.
      receives: (stage, bytes of one device) of the values that it reads from forward
        passes of other stages.
    """

    seconds: float = 0.0
    receives: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRemat:
    """Rematerialization and offload between the passes of a stage, value by value.

    Attributes:
      choice: the choice, as text of `passes.staged.remat.StagedRemat`.
      count: number of recomputed values.
      saved_bytes: bytes of one device by which the micro-batches in flight hold less.
      added_s: seconds added to a micro-batch's forward and backward pass, relative to
        saving all values. Negative if the memory traffic avoided is worth more.
      offloaded: number of values offloaded to host memory.
    """

    choice: str = ""
    count: int = 0
    saved_bytes: int = 0
    added_s: float = 0.0
    offloaded: int = 0


KEPT = StageRemat()
"""No rematerialization."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePass:
    """One pass of all micro-batches through an SPMD pipeline.

    With m micro-batches and S stages, m + S - 1 ticks, on each of which all stages do
    the same work.

    Attributes:
      tick_s: seconds of a stage's layers, for one micro-batch.
      send_s, send_bytes: seconds and bytes (of one device) of the transfer to the
        next stage after every tick, for which all stages wait.
      before_s: seconds of the work that all stages do once per step between the
        previous pass and this one.
      is_backward: whether it is a backward pass.
      is_reversed: whether it runs from the last stage to the first.
    """

    tick_s: float
    send_s: float
    send_bytes: int
    before_s: float = 0.0
    is_backward: bool = False
    is_reversed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Schedule and costs of a pipeline.

    Attributes:
      micro_batches: number of micro-batches.
      schedule: name of the schedule's family.
      runs: (chunk, number of consecutive forward ops in it), in program order.
      costs: costs by chunk.
      hops: transfers between chunks.
      per_microbatch: places in the program where a sum over the batch becomes one over
        a micro-batch.
      group_of: stage by chunk; empty if each stage has one chunk.
      is_split: whether weight gradients are separate tasks (Zero Bubble).
      orders: tasks by stage, as `F0.2` for the forward pass of chunk 0 and micro-batch
        2; empty if the schedule's name determines them.
      between: by stage, the task between forward and backward passes; empty if
        micro-batches are not coupled.
      recomputed: chunks whose backward passes recompute their whole forward passes.
      remat: by stage, selective remat and offload; empty if there is none.
      passes: passes of an SPMD pipeline, in order; `between` is then the work before
        and between them, and `update_s` of costs the work after the last.
      slices: lengths of the sequence slices (TeraPipe); empty if sequences are whole.
        With slices, `costs` lists all parts of the model for the first slice, then for
        the next; `runs` refers to parts.
      unrolled_trips: loops over layers of up to so many trips are unrolled in every
        stage; 0: none are.
      host_bytes_per_s: bandwidth of a device's link to host memory, one way; 0 without
        offload.
    """

    micro_batches: int
    schedule: str
    runs: tuple[tuple[int, int], ...]
    costs: tuple[StageCost, ...]
    hops: tuple[StageHop, ...]
    per_microbatch: tuple[str, ...] = ()
    group_of: tuple[int, ...] = ()
    is_split: bool = False
    orders: tuple[str, ...] = ()
    between: tuple[Between, ...] = ()
    recomputed: tuple[int, ...] = ()
    remat: tuple[StageRemat, ...] = ()
    passes: tuple[PipelinePass, ...] = ()
    slices: tuple[int, ...] = ()
    unrolled_trips: int = 0
    host_bytes_per_s: float = 0.0

    @property
    def ticks(self) -> int:
        """Number of ticks of a pass of an SPMD pipeline."""
        return self.micro_batches + len(self.costs) - 1

    @property
    def is_recomputed(self) -> bool:
        """Whether any backward pass recomputes values or loads offloaded ones."""
        return bool(self.recomputed or self.remat)

    @property
    def is_offloaded(self) -> bool:
        """Whether any values are offloaded to host memory."""
        return any(cost.offloaded_bytes for cost in self.costs)

    @property
    def groups(self) -> tuple[int, ...]:
        """The stage of every chunk."""
        return self.group_of or tuple(range(len(self.costs)))

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds per step in which each stage runs tasks."""
        busy = [0.0] * (1 + max(self.groups))
        for stage, cost in zip(self.groups, self.costs, strict=True):
            once_s = cost.forward_s + cost.whole_backward_s
            busy[stage] += self.micro_batches * once_s + cost.update_s
        for stage, one in enumerate(self.between):
            busy[stage] += one.seconds
        return tuple(busy)

    @property
    def stage_of(self) -> tuple[int, ...]:
        """The chunk of every forward op; with slices, its part of the model."""
        return tuple(stage for stage, count in self.runs for _ in range(count))


def runs_of(stages: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return (stage, number of consecutive ops in it)."""
    return tuple((s, len(list(group))) for s, group in itertools.groupby(stages))


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """The layout of a stage over its devices, and its predicted cost.

    Attributes:
      mesh_axes: (name, size) of the axes of its mesh, major first.
      devices: positions of its devices among those of the plan's mesh, in the order of
        its own mesh.
      decisions: specs of the values that it computes and reads, by the program's value
        ids.
      predicted: predicted cost of its share of a step.
      sends: values that it sends to other stages.
      layers: in an SPMD pipeline, [first, end) of its layers, by nesting depth of
        stacks `[L, …]`.
      mesh: its JAX mesh; None if the plan has none.
    """

    mesh_axes: tuple[tuple[str, int], ...]
    devices: tuple[int, ...]
    decisions: Decisions
    predicted: Predicted
    sends: tuple[StageSend, ...] = ()
    layers: tuple[tuple[int, int], ...] = ()
    mesh: Any = field(default=None, compare=False, metadata=OF_PROCESS)

    @property
    def places(self) -> int:
        """Its number of places along the stage axis; 1 for stages of equal size."""
        return dict(self.mesh_axes).get(STAGE_AXIS, 1)

    @property
    def compute_s(self) -> float:
        """Predicted seconds of arithmetic and memory traffic, per step."""
        return self.predicted.compute_s

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of one of its devices, in bytes."""
        return self.predicted.peak_bytes
