"""The parts of a program that run on devices of their own; one, if it is not cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rhino_jax.plan.decisions import Decisions
from rhino_jax.plan.records import Predicted


STAGE_AXIS = "stage"
"""Name of the mesh axis along which groups lie."""

IN_ONE_PROGRAM = "one-program"
"""`schedule=` of stages that are not groups with programs of their own."""


@dataclass(frozen=True, slots=True)
class StageSend:
    """A value that one stage sends to another.

    Attributes:
      to: the other's position among the stages.
      what: the value, for people: tree path, or op and source line.
      bytes: per step, of all devices together.
      seconds: predicted, per step.
      is_ahead: whether tasks ahead of forward passes make it (`Pipeline.is_twice`).
    """

    to: int
    what: str
    bytes: int
    seconds: float
    is_ahead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """What a chunk of a stage costs, of one device; what is the stage's as a whole is
    with its first chunk.

    Attributes:
      forward_s, backward_s: seconds for one micro-batch.
      update_s: of the stage, seconds once a step.
      activation_bytes: what a micro-batch leaves for the backward pass.
      fixed_bytes: of the stage, held all the time: state, and sums of gradients.
      working_bytes: the most that a task of a micro-batch takes beyond these while it
        runs.
      weights_s: of the backward pass, what is in a task apart.
      kept_bytes: of `activation_bytes`, what that task reads.
      handed_bytes: what it reads beyond, made or received by the rest of the pass.
      update_bytes: of the stage, the most that what runs once a step takes beyond
        `fixed_bytes`.
      ahead_s: seconds of what runs ahead of a forward pass (`Pipeline.is_twice`).
      offloaded_bytes: of `activation_bytes`, what waits in the host's memory.
    """

    forward_s: float
    backward_s: float
    update_s: float
    activation_bytes: int
    fixed_bytes: int
    working_bytes: int
    weights_s: float = 0.0
    kept_bytes: int = 0
    handed_bytes: int = 0
    update_bytes: int = 0
    ahead_s: float = 0.0
    offloaded_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StageHop:
    """What passes between two chunks, and over what.

    Attributes:
      source, target: chunks, the earlier one first.
      forward_bytes, backward_bytes: for one micro-batch, of one device.
      bytes_per_s, latency_s: of the link, one way.
      ahead_bytes: as forward, of what runs ahead of forward passes.
    """

    source: int
    target: int
    forward_bytes: int
    backward_bytes: int
    bytes_per_s: float
    latency_s: float
    ahead_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Between:
    """What a stage does once a step between forward and backward passes, where values
    of the whole batch couple micro-batches: all forward passes come first.

    Attributes:
      seconds: of its task.
      receives: (stage, bytes of one device): what forward passes left there and the
        task reads.
    """

    seconds: float = 0.0
    receives: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeAgain:
    """What a stage's backward passes make again of its forward passes, and what waits
    for them in the host's memory, where values are chosen for that.

    Attributes:
      choice: as `passes.staged.remat.StagedRemat` has it.
      count: values that are made again.
      saved_bytes: of one device, that micro-batches in flight hold less.
      added_s: to a micro-batch's forward and backward pass, compared with the plan that
        keeps all. Negative where what is not written any more saves more.
      offloaded: values that wait in the host's memory.
    """

    choice: str = ""
    count: int = 0
    saved_bytes: int = 0
    added_s: float = 0.0
    offloaded: int = 0


KEPT = MadeAgain()
"""Nothing is made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePass:
    """How all micro-batches pass through stages that are one program: of m of them and
    S stages in m + S - 1 ticks, on each of which every stage does the same.

    Attributes:
      tick_s: seconds of a stage's layers, for one micro-batch.
      handed_s, handed_bytes: of what it then hands on to its neighbour, which all wait
        for; bytes of one device.
      before_s: seconds of what all do once a step, since the pass before.
      is_backward: whether differentiation made it.
      is_reversed: whether it goes from the last stage to the first.
    """

    tick_s: float
    handed_s: float
    handed_bytes: int
    before_s: float = 0.0
    is_backward: bool = False
    is_reversed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """How micro-batches pass through the stages.

    Attributes:
      micro_batches: how many.
      schedule: name of its family.
      runs: (chunk, how many ops): the chunks of the forward ops, in their order.
      costs: of every chunk.
      hops: between chunks.
      per_microbatch: places where sums over the batch are those of a micro-batch.
      group_of: of every chunk its stage; empty where each has its own.
      is_split: whether what of a backward pass nothing waits for is a task apart.
      orders: of every stage its tasks, as `F0.2` for the forward pass of chunk 0 and
        micro-batch 2; empty where the schedule's name says it all.
      between: of every stage, where micro-batches are coupled; empty elsewhere.
      recomputed: chunks whose backward passes run their forward passes again.
      made_again: of every stage, what others make again; empty where none does.
      is_twice: whether what couples them is made ahead of all forward passes, which do
        it again.
      passes: of stages that are one program, in their order; `between` then has what
        all do before and between them, and `update_s` of costs what they do after.
      slices: lengths of the slices of sequences that run one after the other; empty
        where sequences are whole. Then chunks are of a slice: of all parts of the model
        those of the first slice, then those of the next. `runs` are by parts.
      host_bytes_per_s: of a device's link to the host's memory, one way; 0 where
        nothing waits there.
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
    made_again: tuple[MadeAgain, ...] = ()
    is_twice: bool = False
    passes: tuple[PipelinePass, ...] = ()
    slices: tuple[int, ...] = ()
    host_bytes_per_s: float = 0.0

    @property
    def ticks(self) -> int:
        """Of every pass of stages that are one program."""
        return self.micro_batches + len(self.costs) - 1

    @property
    def is_remade(self) -> bool:
        """Whether any backward pass makes anything again, or has it from the host."""
        return bool(self.recomputed or self.made_again)

    @property
    def is_offloaded(self) -> bool:
        """Whether anything waits in the host's memory."""
        return any(cost.offloaded_bytes for cost in self.costs)

    @property
    def groups(self) -> tuple[int, ...]:
        """Of every chunk its stage."""
        return self.group_of or tuple(range(len(self.costs)))

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Of every stage, the seconds that its tasks take in a step."""
        busy = [0.0] * (1 + max(self.groups))
        for stage, cost in zip(self.groups, self.costs, strict=True):
            once_s = cost.ahead_s + cost.forward_s + cost.backward_s + cost.weights_s
            busy[stage] += self.micro_batches * once_s + cost.update_s
        for stage, one in enumerate(self.between):
            busy[stage] += one.seconds
        return tuple(busy)

    @property
    def stage_of(self) -> tuple[int, ...]:
        """Of every forward op its chunk; of sequences in slices its part of the
        model."""
        return tuple(stage for stage, count in self.runs for _ in range(count))


def runs_of(stages: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """(stage, how many in a row)."""
    return tuple((s, len(list(group))) for s, group in itertools.groupby(stages))


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """How a stage is laid out over its devices, and what that costs.

    Attributes:
      mesh_axes: (name, size) of the axes of its mesh, major first.
      devices: its devices, as positions among those of the plan's mesh, in the order of
        its own mesh.
      decisions: specs of the values that it makes and reads, by the program's ids.
      predicted: predicted cost of its part of one step.
      sends: what it sends to other stages.
      layers: of stages that are one program, of every depth of stacks `[L, …]` the
        first layer that is its own, and the one after its last.
      mesh: its JAX mesh, where the plan has one.
    """

    mesh_axes: tuple[tuple[str, int], ...]
    devices: tuple[int, ...]
    decisions: Decisions
    predicted: Predicted
    sends: tuple[StageSend, ...] = ()
    layers: tuple[tuple[int, int], ...] = ()
    mesh: Any = field(default=None, compare=False)

    @property
    def places(self) -> int:
        """Its part of the axis of the stages; groups of equal size have 1."""
        return dict(self.mesh_axes).get(STAGE_AXIS, 1)

    @property
    def compute_s(self) -> float:
        """Predicted seconds of compute and memory traffic, per step."""
        return self.predicted.compute_s

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of one of its devices."""
        return self.predicted.peak_bytes
