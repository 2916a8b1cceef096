"""What is cut: a graph of ops, groups of devices in a row, links between neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from rhino_jax.errors import StageError, StageOrderError


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOp:
    """An op, or several that stay together, with its part of the backward pass.

    Both parts are in one stage: the backward part reads what the forward part leaves.

    Attributes:
      name: for people.
      forward_s, backward_s: for one micro-batch, on a group of speed 1.
      activation_bytes: what the forward part leaves for the backward part.
    """

    name: str = ""
    forward_s: float = 0.0
    backward_s: float = 0.0
    activation_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CutValue:
    """What one op makes and others read.

    Crosses every hop between its source and its last reader, once, however many read
    it there: groups pass on what later ones need.

    Attributes:
      source: the op that makes it.
      readers: ops.
      forward_bytes: for one micro-batch.
      backward_bytes: of its gradient; 0 where there is none.
    """

    source: int
    readers: tuple[int, ...]
    forward_bytes: int
    backward_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Parameter:
    """What ops read in every micro-batch.

    Attributes:
      readers: ops. Where they are in several stages, each has it.
      held_bytes: with its gradient and what the optimizer keeps of it.
      gradient_bytes: what every hop between its first and its last reader carries once
        a step, so that its gradients meet; one way, and as much back.
    """

    readers: tuple[int, ...]
    held_bytes: int
    gradient_bytes: int = 0


@dataclass(frozen=True)
class CutOps:
    """A program as a graph.

    Attributes:
      ops: numbered so that each reads values of earlier ones.
      values: between them.
      parameters: that they read.
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
    """Devices that run one stage.

    Attributes:
      limit_bytes: of one of them; None for no limit.
      speed: seconds of ops are divided by it.
    """

    limit_bytes: int | None = None
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class GroupHop:
    """The link between a group and the next, as much one way as the other.

    Attributes:
      bytes_per_s: one way.
      latency_s: of what a micro-batch sends, all together.
    """

    bytes_per_s: float = float("inf")
    latency_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CutProblem:
    """Where may this program be cut?

    Attributes:
      ops: the program.
      groups: one for every stage, along the forward pass.
      hops: between neighbours; one less.
      micro_batches: m.
      in_flight: of every stage, how many micro-batches it holds activations of; see
        `IN_FLIGHT`.
      pins: op → stage.
      chains: of each its links, and of each link its ops: these are in one stage, and
        the next link's in the next stage, as the parts of a stack of layers.
    """

    ops: CutOps
    groups: tuple[StageDevices, ...]
    hops: tuple[GroupHop, ...]
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
"""Schedule → from stages and micro-batches to what every stage holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCut:
    """A stage for every op, and what it costs.

    Attributes:
      stages: of every op.
      step_time_s: (m - 1) times the bottleneck, plus every stage and hop once.
      bottleneck_s: what sets the pace: the slowest stage or hop, of one micro-batch.
      stage_s: of every stage, for one micro-batch, there and back.
      sent_s: of every hop, for one micro-batch: (forward, backward).
      once_s: gradients of shared parameters, once a step.
      held_bytes: of every stage.
      bound_s: no cut takes less; 0 where nothing was proved.
      considered: nodes that were left after contracting what never separates.
    """

    stages: tuple[int, ...]
    step_time_s: float
    bottleneck_s: float
    stage_s: tuple[float, ...]
    sent_s: tuple[tuple[float, float], ...]
    once_s: float
    held_bytes: tuple[int, ...]
    bound_s: float = 0.0
    considered: int = 0

    @property
    def is_optimal(self) -> bool:
        return self.bound_s >= self.step_time_s
