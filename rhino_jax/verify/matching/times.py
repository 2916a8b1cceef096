"""Match the planned seconds of source lines with those of compiled kernels.

A kernel computes ops of several lines, and is named by one of them. Its seconds go to
the lines that the plan still expects seconds of, so that fusion alone is no difference:
kernels of few lines first; what exceeds all that is expected goes to its main line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rhino_jax.ir.program import USERS_CONSTRAINT
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.records import Predicted
from rhino_jax.units import format_bytes, format_flops, format_ratio
from rhino_jax.verify.hlo.records import CompiledKernel
from rhino_jax.verify.hlo.work import Place
from rhino_jax.verify.matching.ledger import primitive_of


NO_LINE: Place = ("", False)
"""Compute without a source line: copies between layouts, and what passes add."""

UNNAMED = ("", USERS_CONSTRAINT)
"""Names of operations that say nothing of what a kernel computes."""

Amounts = defaultdict[Place, float]

NO_SHARE = 0.05
"""Share of a line's other seconds below which one side has none of its own."""

SAME_FLOPS = 0.8
"""Smallest ratio of FLOPs, either way, that is no difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeDifference:
    """The seconds of a source line in a step, as predicted and as compiled.

    Attributes:
      source: source line, as `gpt.py:70 (mlp)`; empty for what has none.
      is_backward: whether differentiation produced it; for a plan of several tasks
        False, with both passes in one.
      op: the op that takes longest, as `dot_general`, as far as it is known.
      predicted_s, compiled_s: seconds of a device.
      kernels: names of its compiled kernels, the longest first.
      cause: why they differ, in a few words; empty where it is not known.
    """

    source: str
    is_backward: bool
    op: str
    predicted_s: float
    compiled_s: float
    kernels: tuple[str, ...] = ()
    cause: str = ""

    @property
    def seconds(self) -> float:
        """Change of seconds: compiled minus predicted."""
        return self.compiled_s - self.predicted_s


def time_differences(
    plan: PlanData,
    compiled: Predicted,
    kernels: Sequence[CompiledKernel],
    ops: Mapping[Place, str],
) -> tuple[TimeDifference, ...]:
    """Return the seconds of every line on both sides, those that differ most first.

    They add up to both step times. Communication that compute does not hide, and
    waiting for other stages, are one entry.

    Args:
      plan: the plan.
      compiled: the compiled step.
      kernels: the kernels of the compiled step.
      ops: op with the most work by place, of the planned program.
    """
    expected, flops = _expected(plan)
    if not plan.timeline.spans:
        kernels = [_without_pass(k) for k in kernels]
        ops = {(source, False): name for (source, _), name in ops.items()}
    made = _Attribution(Amounts(float, expected))
    for kernel in sorted(kernels, key=lambda k: (len(k.places), -k.seconds, k.name)):
        made.add(kernel)
    lines = [
        _line(place, expected[place], flops[place], made, ops.get(place, ""))
        for place in dict.fromkeys((*expected, *made.seconds, *made.touching))
    ]
    rest = TimeDifference(
        source="",
        is_backward=False,
        op="communication" + (" and other stages" if plan.has_tasks else ""),
        predicted_s=plan.predicted.step_time_s - sum(x.predicted_s for x in lines),
        compiled_s=compiled.step_time_s - sum(x.compiled_s for x in lines),
        cause="not hidden by compute",
    )
    return tuple(
        sorted(
            (x for x in (*lines, rest) if x.predicted_s or x.compiled_s),
            key=lambda x: (-abs(x.seconds), x.source, x.is_backward),
        )
    )


def _expected(plan: PlanData) -> tuple[Amounts, Amounts]:
    """Return planned seconds of compute, and FLOPs, by place."""
    seconds, flops = Amounts(float), Amounts(float)
    for span in plan.timeline.spans:
        place = _place(span.source, span.is_backward)
        seconds[place] += span.seconds
        flops[place] += span.flops
    if plan.timeline.spans:
        rest = plan.predicted.compute_s - sum(seconds.values())
        seconds[NO_LINE] += max(rest, 0.0)
        return seconds, flops
    for line in plan.line_times:
        place = _place(line.source, False)
        seconds[place] += line.matrix_s + line.memory_s + line.launch_s
        flops[place] += line.flops
    return seconds, flops


def _place(source: str, is_backward: bool) -> Place:
    # Ops without a file are named by their scopes, of which no kernel tells.
    return (source, is_backward) if source.endswith(")") else NO_LINE


def _without_pass(kernel: CompiledKernel) -> CompiledKernel:
    places = dict.fromkeys((source, False) for source, _ in kernel.places)
    return replace(kernel, places=tuple(places))


@dataclass(slots=True)
class _Attribution:
    """Seconds of kernels by place.

    Attributes:
      left: planned seconds of a place that no kernel has been attributed to.
      seconds, flops: attributed seconds, and FLOPs of the main place of kernels.
      touching: kernels that compute anything of a place, with their seconds there.
    """

    left: Amounts
    seconds: Amounts = field(default_factory=lambda: Amounts(float))
    flops: Amounts = field(default_factory=lambda: Amounts(float))
    touching: dict[Place, list[tuple[float, CompiledKernel]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, kernel: CompiledKernel) -> None:
        places = kernel.places or (NO_LINE,)
        wanted = [max(self.left[p], 0.0) for p in places]
        whole = sum(wanted)
        share = min(1.0, kernel.seconds / whole) if whole else 0.0
        took = [share * x for x in wanted]
        took[0] += max(0.0, kernel.seconds - sum(took))
        self.flops[places[0]] += kernel.flops
        for place, seconds in zip(places, took, strict=True):
            self.seconds[place] += seconds
            self.left[place] -= seconds
            self.touching[place].append((seconds, kernel))


def _line(
    place: Place, expected_s: float, flops: float, made: _Attribution, op: str
) -> TimeDifference:
    kernels = sorted(made.touching[place], key=lambda x: (-x[0], x[1].name))
    computing = [k for seconds, k in kernels if seconds]
    named = [primitive_of(k.op) for k in computing if k.places[:1] == (place,)]
    if flops and op:
        named.insert(0, op)
    source, is_backward = place
    return TimeDifference(
        source=source,
        is_backward=is_backward,
        op=next((n for n in named if n not in UNNAMED), op) if source else "copies",
        predicted_s=expected_s,
        compiled_s=made.seconds[place],
        kernels=tuple(k.name for k in computing),
        cause=_cause(place, expected_s, flops, made, is_known=bool(op)),
    )


def _cause(
    place: Place, expected_s: float, flops: float, made: _Attribution, *, is_known: bool
) -> str:
    """Return why a line takes other seconds than planned, as far as that is certain."""
    touching, took_s = made.touching[place], made.seconds[place]
    if place == NO_LINE:
        return "of no source line"
    if not touching:
        return "not in the compiled program"
    if took_s <= NO_SHARE * expected_s:
        return "fused, though predicted stored"
    computed = made.flops[place]
    if flops and computed and expected_s:
        ratio = computed / flops
        if not SAME_FLOPS < ratio < 1 / SAME_FLOPS:
            return f"computes {format_ratio(ratio)} the FLOPs"
        rates = (format_flops(x) for x in (computed / took_s, flops / expected_s))
        return "{}/s, predicted {}/s".format(*rates)
    moved = sum(k.bytes * seconds / k.seconds for seconds, k in touching if seconds)
    moves = f"moves {format_bytes(moved)}, {format_bytes(moved / took_s)}/s"
    if expected_s > NO_SHARE * took_s:
        return moves
    stored = "stored, though predicted fused" if is_known else "not in the plan"
    return f"{stored}: {moves}"
