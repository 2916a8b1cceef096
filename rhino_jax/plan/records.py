"""Numeric records of a plan: predictions, collectives, search, coverage."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar


Key = TypeVar("Key", bound=tuple[Any, ...])

CUT_BY_CLOCK = "the time limit"
"""First words of a note that a wall-clock limit affected the plan, so that it may
differ between runs and machines."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predicted cost of one step, per device.

    Attributes:
      step_time_s: seconds per step.
      compute_s: seconds of arithmetic and memory traffic.
      communication_s: seconds of collectives that compute does not hide (exposed
        communication).
      peak_bytes: largest sum of live bytes over the step.
      flops_per_device: floating-point operations of one device per step.
      slack_s: seconds of collectives that are independent of some compute, hidden or
        not.
    """

    step_time_s: float
    compute_s: float
    communication_s: float
    peak_bytes: int
    flops_per_device: float
    slack_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Variant:
    """A candidate program: the user's program with some passes applied.

    Attributes:
      name: as "4 micro-batches, recompute 1.2 GiB"; "baseline" without passes.
      step_time_s: predicted seconds per step; infinite if it does not fit in memory.
      peak_bytes: predicted peak, per device; the smallest found if it does not fit.
      is_chosen: whether the plan uses it.
      is_brief: whether its search was shortened: a full search may find a shorter step.
    """

    name: str
    step_time_s: float
    peak_bytes: int
    is_chosen: bool = False
    is_brief: bool = False


@dataclass(frozen=True, slots=True)
class LineTime:
    """Predicted seconds of a step that one source line takes, forward and backward.

    For a plan in stages, the mean over all devices.

    Attributes:
      source: the source line, as `model.py:61 (mlp)`; empty for ops without one.
      matrix_s: seconds of matrix products and convolutions that are bound by the matrix
        units.
      memory_s: seconds of ops that are bound by memory bandwidth, or by other
        arithmetic.
      launch_s: seconds of kernel launches.
      communication_s: seconds of exposed communication.
      idle_s: seconds of waiting for other stages.
      flops: floating-point operations of one device.
    """

    source: str
    matrix_s: float = 0.0
    memory_s: float = 0.0
    launch_s: float = 0.0
    communication_s: float = 0.0
    idle_s: float = 0.0
    flops: float = 0.0

    @property
    def seconds(self) -> float:
        """Total seconds of the line."""
        return sum(seconds for _, seconds in self.parts)

    @property
    def bound(self) -> str:
        """Name of the part that takes the most time."""
        return max(self.parts, key=lambda part: part[1])[0]

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        """(name of the bottleneck, seconds that it bounds)."""
        return (
            ("matrix units", self.matrix_s),
            ("memory bandwidth", self.memory_s),
            ("launches", self.launch_s),
            ("communication", self.communication_s),
            ("other stages", self.idle_s),
        )


@dataclass(frozen=True, slots=True)
class LineSpan:
    """Consecutive ops of one source line in a predicted step.

    Attributes:
      source: the source line, as in `LineTime`.
      is_backward: whether differentiation produced the ops.
      first_op, last_op: ids of the first and of the last op, both included.
      seconds: seconds of their compute, of all trips of the loops around them.
      flops: floating-point operations of one device, of all trips.
      live_bytes: largest sum of live bytes of one device while they run.
    """

    source: str
    is_backward: bool
    first_op: int
    last_op: int
    seconds: float
    flops: float
    live_bytes: int


@dataclass(frozen=True, slots=True)
class LoopSpan:
    """A loop in a predicted step.

    Attributes:
      source: the source line.
      trip_count: number of trips.
      first_op, last_op: ids of the first and of the last op inside, both included.
    """

    source: str
    trip_count: int
    first_op: int
    last_op: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Compute and live memory of a predicted step, in program order.

    Attributes:
      spans: the ops by source line; the body of a loop has one span per line, of all
        its trips.
      loops: the loops, outer ones first.
    """

    spans: tuple[LineSpan, ...] = ()
    loops: tuple[LoopSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class WhileLoop:
    """A `while` loop whose trip count depends on data, and its assumed trip count.

    Attributes:
      source: the source line.
      trip_count: trips that the plan, and the analysis of its compiled program, count.
      basis: origin of the trip count: "stated" by the user (`while_trips=`), its
        "bound", or "assumed".
    """

    source: str
    trip_count: int
    basis: str


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective, summed over all its trips.

    Attributes:
      kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or
        "collective-permute".
      axes: names of the mesh axes it runs over.
      bytes: bytes that one device puts on the wire, times `count`.
      count: how often it runs per step.
      seconds: predicted time of all its trips.
      op: the op that requires it, as `dot_general #123`.
      source: the source line.
      reason: explanation, as "gradient of params['w']: sum over the batch".
      is_rounded: whether it moves bfloat16 in place of float32, as compilers do with
        operands of products (`LoweringPolicy.rounds_products`).
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int
    seconds: float
    op: str
    source: str
    reason: str = ""
    is_rounded: bool = False

    @property
    def op_id(self) -> int | None:
        """Id of the op; None: the end of the program."""
        found = _OP.search(self.op)
        return None if found is None else int(found[1])


_OP = re.compile(r" #(\d+)$")
"""Matches the op id at the end of a collective's `op`."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one kind over the same axes, summed.

    Attributes:
      count: number of collectives per step.
      bytes: bytes that one device puts on the wire per step.
      seconds: predicted seconds of all of them.
    """

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0


def traffic_by(
    key: Callable[[Collective], Key], collectives: Iterable[Collective]
) -> dict[Key, Traffic]:
    """Sum collectives by a key, slowest first."""
    sums: dict[Key, Traffic] = {}
    for c in collectives:
        old = sums.get(at := key(c), Traffic())
        sums[at] = Traffic(
            old.count + c.count, old.bytes + c.bytes, old.seconds + c.seconds
        )
    order = sorted(sums.items(), key=lambda x: (-x[1].seconds, -x[1].bytes, x[0]))
    return dict(order)


def traffic_of(
    collectives: Iterable[Collective],
) -> dict[tuple[str, tuple[str, ...]], Traffic]:
    """Sum collectives by kind and axes, slowest first."""
    return traffic_by(lambda c: (c.kind, c.axes), collectives)


@dataclass(frozen=True, slots=True)
class SearchReport:
    """Status, bound and size of the search that found a plan.

    Attributes:
      status: "optimal" (bound met), "feasible" (bound not met), "recipe" (the best
        recipe, because the limit was too short for any search) or "pinned" (no choice
        left).
      objective_s: the plan's objective, in seconds.
      bound_s: proved lower bound on the objective, in seconds, over plans in which
        repeated layers are treated equally (see `planner.search.folding`).
      gap: (objective - bound) / objective.
      seconds: wall time of planning, without tracing.
      variables: Boolean variables of CP-SAT's largest model; 0: CP-SAT was used only to
        combine solutions, or not at all.
      level: "fast" or "best".
      nodes: nodes of the search problem, before and after folding and reduction.
      reserve_share: share of the memory budget that was left unused, as compiled
        programs need more memory than predicted.
    """

    status: str
    objective_s: float
    bound_s: float
    gap: float
    seconds: float
    variables: int
    level: str = "best"
    nodes: tuple[int, int] = (0, 0)
    reserve_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Coverage:
    """Shares of the program that have rules, each in [0, 1].

    Attributes:
      ops: share of ops.
      flops: share of FLOPs.
      bytes: share of result bytes.
      unknown: (primitive, count) of primitives without a rule, most frequent first.
    """

    ops: float
    flops: float
    bytes: float
    unknown: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PeakValue:
    """A value that is live at the predicted peak.

    Attributes:
      what: description: tree path, or op and source line.
      bytes: bytes on one device.
      source: the source line.
      context: scopes of the op that makes it, as "in encoder/attn", or the argument it
        is made of, as "reading params['w']".
      shard: type of one device's shard, as `bf16[24,2,512]`; of one value, if there are
        several.
      spec: its spec as text.
    """

    what: str
    bytes: int
    source: str = ""
    context: str = ""
    shard: str = ""
    spec: str = ""

    @property
    def place(self) -> str:
        """Source line and context, as `model.py:61 (attend), in encoder/attn`."""
        return ", ".join(part for part in (self.source, self.context) if part)


@dataclass(frozen=True, slots=True)
class CompiledCandidate:
    """A plan that was compiled for comparison when a plan was refined.

    Attributes:
      name: "best", a recipe's name, or a description, as "less communication".
      mesh: sizes of its mesh axes.
      predicted_s: predicted seconds per step.
      compiled_s: seconds per step, estimated from the compiled program.
      peak_bytes: memory of the compiled program, per device.
      is_fitting: whether that is within the memory budget.
      rematerialised: number of values that the compiler had to replicate in full
        ("involuntary full rematerialization").
    """

    name: str
    mesh: tuple[int, ...]
    predicted_s: float
    compiled_s: float
    peak_bytes: int
    is_fitting: bool
    rematerialised: int = 0
