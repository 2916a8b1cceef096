"""The cut problem: a graph of ops, devices of the stages, links between neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from rhino_jax.errors import StageError, StageOrderError
from rhino_jax.pipeline.tasks import TransferLink


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOp:
    """An op, or several that stay together, with its share of the backward pass.

    Both parts are in one stage: the backward part reads the residuals of the forward
    part.

    Attributes:
      name: name for people.
      forward_s, backward_s: seconds for one micro-batch, on devices of speed 1.
      activation_bytes: residuals that the forward part saves for the backward part.
    """

    name: str = ""
    forward_s: float = 0.0
    backward_s: float = 0.0
    activation_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CutValue:
    """A value that one op computes and others read.

    It crosses every hop between its source and its last reader, once, however many ops
    read it: stages forward what later ones need.

    Attributes:
      source: the op that computes it.
      readers: the ops that read it.
      forward_bytes: bytes for one micro-batch.
      backward_bytes: bytes of its gradient; 0 if there is none.
    """

    source: int
    readers: tuple[int, ...]
    forward_bytes: int
    backward_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter, which ops read in every micro-batch.

    Attributes:
      readers: the ops that read it. If they are in several stages, each stage stores
        it.
      held_bytes: bytes, including its gradient and optimizer state.
      gradient_bytes: bytes that every hop between its first and its last reader carries
        once a step to sum its gradients; one way, and as much back.
    """

    readers: tuple[int, ...]
    held_bytes: int
    gradient_bytes: int = 0


@dataclass(frozen=True)
class CutOps:
    """A program as a graph.

    Attributes:
      ops: ops in a topological order.
      values: values between them.
      parameters: parameters that they read.
    """

    ops: tuple[CutOp, ...]
    values: tuple[CutValue, ...] = ()
    parameters: tuple[Parameter, ...] = ()

    def __post_init__(self) -> None:
        for value in self.values:
            if any(reader <= value.source for reader in value.readers):
                raise StageError(
                    "An op reads a value before it is made.",
                    where=f"value of op {value.source}, readers {value.readers}",
                    fix="number ops in an order in which they can run.",
                )


@dataclass(frozen=True, slots=True)
class StageDevices:
    """The devices that run one stage.

    Attributes:
      limit_bytes: memory limit of one device; None: no limit.
      speed: relative speed, by which seconds of ops are divided.
    """

    limit_bytes: int | None = None
    speed: float = 1.0


@dataclass(frozen=True, kw_only=True)
class CutProblem:
    """A program, devices, and constraints of a cut into stages.

    Attributes:
      ops: the program as a graph.
      groups: devices of every stage, along the forward pass.
      hops: links between neighbouring stages, symmetric.
      micro_batches: number of micro-batches, m.
      in_flight: by stage, the number of micro-batches whose residuals it holds; see
        `IN_FLIGHT`.
      pins: op → its fixed stage.
      chains: chains of links, each a set of ops: the ops of a link are in one stage,
        and the next link's in the next stage, as the parts of a stack of layers.
    """

    ops: CutOps
    groups: tuple[StageDevices, ...]
    hops: tuple[TransferLink, ...]
    micro_batches: int
    in_flight: tuple[int, ...]
    pins: Mapping[int, int] = field(default_factory=dict)
    chains: tuple[tuple[tuple[int, ...], ...], ...] = ()

    def __post_init__(self) -> None:
        stages = len(self.groups)
        if len(self.hops) != stages - 1 or len(self.in_flight) != stages:
            raise StageError(
                "Groups, hops and micro-batches in flight do not match.",
                numbers=f"{stages} groups, {len(self.hops)} hops, {len(self.in_flight)}"
                " stages in flight",
                fix="give one hop less than groups, and one number for every stage.",
            )
        for chain in self.chains:
            for before, after in pairwise(chain):
                first, second = max(before), min(after)
                if first >= second:
                    raise StageOrderError(
                        "Layers of one loop would be in stages the other way round.",
                        where=f"op {second} {self.ops.ops[second].name}".strip(),
                        numbers=f"op {first} has to be in the stage before it",
                        fix="write the layers one by one instead of in a loop.",
                    )
        wrong = {op: s for op, s in self.pins.items() if not 0 <= s < stages}
        if wrong:
            op, stage = next(iter(wrong.items()))
            raise StageError(
                "An op is pinned to a stage that is not there.",
                where=f"op {op} {self.ops.ops[op].name}",
                numbers=f"stage {stage} of {stages}",
                fix=f"pin it to a stage from 0 to {stages - 1}.",
            )

    @property
    def stages(self) -> int:
        return len(self.groups)


IN_FLIGHT: Mapping[str, Callable[[int, int], tuple[int, ...]]] = {
    "gpipe": lambda stages, m: (m,) * stages,
    "1f1b": lambda stages, m: tuple(min(m, stages - s) for s in range(stages)),
    "zero-bubble": lambda stages, m: (min(m, stages),) * stages,
    "forward-only": lambda stages, m: (1,) * stages,
}
"""Schedule → function from stages and micro-batches to micro-batches in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCut:
    """A stage for every op, with the predicted cost.

    Attributes:
      stages: stage of every op.
      step_time_s: predicted step time: (m - 1) times the bottleneck, plus every stage
        and hop once.
      held_bytes: peak bytes of a device of every stage.
      bound_s: lower bound on the step time of any cut; 0 if nothing was proved.
    """

    stages: tuple[int, ...]
    step_time_s: float
    held_bytes: tuple[int, ...]
    bound_s: float = 0.0

    @property
    def is_optimal(self) -> bool:
        return self.bound_s >= self.step_time_s
