"""Match the planned seconds of source lines with those of compiled kernels.

A kernel computes ops of several lines; `division` divides its seconds among them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rhino_jax.ir.program import USERS_CONSTRAINT
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.records import Predicted
from rhino_jax.units import format_bytes, format_flops, format_ratio
from rhino_jax.verify.hlo.records import CompiledKernel
from rhino_jax.verify.matching.division import divide


Place = tuple[str, bool]
"""A source line, and whether differentiation produced what it computes."""

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
    has_passes = bool(plan.timeline.spans)
    if not has_passes:
        ops = {(source, False): name for (source, _), name in ops.items()}

    def places_of(kernel: CompiledKernel) -> tuple[Place, ...]:
        places = (
            (source, has_passes and direction != "forward")
            for source, direction, _ in kernel.ops
            if source
        )
        return tuple(dict.fromkeys(places)) or (NO_LINE,)

    made = divide(kernels, places_of, expected)
    lines = []
    for place in dict.fromkeys((*expected, *made)):
        touching = made.get(place, [])
        own = [k for _, k in touching if places_of(k)[0] == place]
        planned = expected[place], flops[place], ops.get(place, "")
        lines.append(_line(place, planned, touching, own))
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


Share = tuple[float, CompiledKernel]
"""Seconds of a kernel that belong to a line."""


def _line(
    place: Place,
    planned: tuple[float, float, str],
    touching: Sequence[Share],
    own: Sequence[CompiledKernel],
) -> TimeDifference:
    """Compare one line.

    Args:
      place: the line.
      planned: its seconds and FLOPs, and the op with the most work.
      touching: kernels that compute anything of the line.
      own: those of which it is the main line.
    """
    (source, is_backward), (expected_s, flops, op) = place, planned
    longest = sorted(touching, key=lambda x: (-x[0], x[1].name))
    computing = [k for seconds, k in longest if seconds]
    named = [k.ops[0][2] for k in computing if k in own]
    if flops and op:
        named.insert(0, op)
    return TimeDifference(
        source=source,
        is_backward=is_backward,
        op=next((n for n in named if n not in UNNAMED), op) if source else "copies",
        predicted_s=expected_s,
        compiled_s=sum(seconds for seconds, _ in touching),
        kernels=tuple(k.name for k in computing),
        cause=_cause(place, planned, touching, sum(k.flops for k in own)),
    )


def _cause(
    place: Place,
    planned: tuple[float, float, str],
    touching: Sequence[Share],
    computed: float,
) -> str:
    """Return why a line takes other seconds than planned, as far as that is certain."""
    (expected_s, flops, op), took_s = planned, sum(seconds for seconds, _ in touching)
    if place == NO_LINE:
        return "of no source line"
    if not touching:
        return "not in the compiled program"
    if took_s <= NO_SHARE * expected_s:
        return "fused, though predicted stored"
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
    stored = "stored, though predicted fused" if op else "not in the plan"
    return f"{stored}: {moves}"
