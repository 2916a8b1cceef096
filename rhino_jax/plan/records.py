"""The parts of a plan that are numbers: predictions, collectives, search, coverage."""

from __future__ import annotations

from dataclasses import dataclass


CUT_BY_CLOCK = "the time limit"
"""How a note begins that says that a wall clock decided, which differs from run to run
and from machine to machine."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """What one step costs, per device.

    Attributes:
      step_time_s: seconds per step.
      compute_s: seconds of compute and memory traffic.
      communication_s: seconds of collectives that compute does not hide.
      peak_bytes: largest sum of live bytes over the step.
      flops_per_device: floating-point operations of one device per step.
      slack_s: seconds of collectives beside which there is other work, hidden or not.
    """

    step_time_s: float
    compute_s: float
    communication_s: float
    peak_bytes: int
    flops_per_device: float
    slack_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Variant:
    """A program as it was planned beside others: with these passes done, or none.

    Attributes:
      name: as "4 micro-batches, recompute 1.2 GiB"; "as written" of none.
      step_time_s: predicted; infinite where it does not fit.
      peak_bytes: predicted; where it does not fit, the least that was found.
      is_chosen: it is the plan.
      is_brief: it was searched briefly: a full search may find a shorter step.
    """

    name: str
    step_time_s: float
    peak_bytes: int
    is_chosen: bool = False
    is_brief: bool = False


@dataclass(frozen=True, slots=True)
class LineTime:
    """Seconds of a step that one line of the user's takes, forward and backward.

    Of a plan in stages, the mean over all devices.

    Attributes:
      source: the line, as `model.py:61 (mlp)`; empty of what has none.
      matrix_s: matrix products and convolutions that the matrix units bound.
      memory_s: ops that memory bandwidth, or other arithmetic, bounds.
      launch_s: starts of kernels.
      communication_s: collectives, as far as nothing hides them.
      idle_s: waiting for other stages.
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
        """All of it."""
        return sum(seconds for _, seconds in self.parts)

    @property
    def bound(self) -> str:
        """What takes most of its time."""
        return max(self.parts, key=lambda part: part[1])[0]

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        """Seconds by what bounds them."""
        return (
            ("matrix units", self.matrix_s),
            ("memory bandwidth", self.memory_s),
            ("launches", self.launch_s),
            ("communication", self.communication_s),
            ("other stages", self.idle_s),
        )


@dataclass(frozen=True, slots=True)
class WhileLoop:
    """A `while` loop that data may end, and how often it is taken to run.

    Attributes:
      source: the user's line.
      trip_count: trips that the plan, and what is read of its compiled program, count.
      basis: "stated" by the user (`while_trips=`), its "bound", or "assumed".
    """

    source: str
    trip_count: int
    basis: str


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective, all its trips together.

    Attributes:
      kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or
        "collective-permute".
      axes: names of the mesh axes it runs over.
      bytes: bytes that one device puts on the wire, times `count`.
      count: how often it runs per step.
      seconds: predicted time of all its trips.
      op: the op that asks for it, as `dot_general %123`.
      source: the user's line.
      reason: in words, as "gradient of params['w']: sum over the batch".
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int
    seconds: float
    op: str
    source: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SearchReport:
    """How the plan was found.

    Attributes:
      status: "optimal" (bound met), "feasible" (bound not met), "recipe" (the
        best recipe, because the limit was too short for any search) or "pinned"
        (nothing to choose).
      objective_s: the plan's objective, in seconds.
      bound_s: proved lower bound on the objective, in seconds, over plans in which
        repeated layers are treated alike (see `planner.search.folding`).
      gap: (objective - bound) / objective.
      seconds: wall time of planning, tracing excluded.
      variables: Boolean variables of CP-SAT's largest model (0: it had none, but to
        put choices together).
      level: "fast" or "best".
      nodes: nodes of the search problem, before and after folding and reduction.
      reserve_share: share of the memory budget that was left free, as compiled programs
        hold more than predicted.
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
    """Share of the program that has rules, each in [0, 1].

    Attributes:
      ops: share of ops.
      flops: share of FLOPs.
      bytes: share of result bytes.
      unknown: (primitive, count) of those without a rule, most frequent first.
    """

    ops: float
    flops: float
    bytes: float
    unknown: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PeakValue:
    """One value that is live at the peak.

    Attributes:
      what: tree path, or op and source line.
      bytes: bytes on one device.
      source: the user's line.
      context: the scopes in which it is made, as "in encoder/attn", or what argument
        it is made of, as "reading params['w']".
    """

    what: str
    bytes: int
    source: str = ""
    context: str = ""

    @property
    def place(self) -> str:
        """Line and context, as `model.py:61 (attend), in encoder/attn`."""
        return ", ".join(part for part in (self.source, self.context) if part)


@dataclass(frozen=True, slots=True)
class CompiledCandidate:
    """One of the plans that the compiler was asked about when a plan was refined.

    Attributes:
      name: "best", a recipe's name, or what else it was, as "less communication".
      mesh: sizes of its mesh axes.
      predicted_s: predicted seconds per step.
      compiled_s: seconds per step of what the compiler made of it.
      peak_bytes: what that holds, per device.
      is_fitting: whether that is within the budget.
      rematerialised: values that the compiler had to replicate in full.
    """

    name: str
    mesh: tuple[int, ...]
    predicted_s: float
    compiled_s: float
    peak_bytes: int
    is_fitting: bool
    rematerialised: int = 0
