"""Differences between two plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rhino_jax.errors import PlanFileError
from rhino_jax.ir.spec import format_spec
from rhino_jax.plan.fingerprint import first_change, outline_of
from rhino_jax.plan.plan import Leaf, PlanData
from rhino_jax.plan.records import Collective, Predicted
from rhino_jax.utils.keywords import brief


@dataclass(frozen=True, slots=True)
class SpecChange:
    """A value whose layout differs.

    Attributes:
      side: "input" or "output" of the program.
      path: tree path of the value.
      before, after: specs as text; empty if that plan has no such value.
      bytes_before, bytes_after: bytes of one device's shard.
      worth_s: how many seconds longer plan B's step is if this value has its layout of
        plan A and everything else is solved again; None if not requested.
    """

    side: str
    path: str
    before: str
    after: str
    bytes_before: int
    bytes_after: int
    worth_s: float | None = None


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


@dataclass(frozen=True, slots=True)
class TrafficChange:
    """Collectives of one kind over the same axes, in both plans."""

    kind: str
    axes: tuple[str, ...]
    before: Traffic
    after: Traffic


@dataclass(frozen=True, slots=True)
class PlanDiffData:
    """Differences between two plans. Pairs are (plan A, plan B).

    Attributes:
      programs: names of the programs.
      has_same_fingerprint: whether program and mesh are equal.
      change: description of the first op that differs; empty if unknown.
      meshes: (name, size) of their mesh axes.
      hardware: names of their targets.
      predicted: their predictions.
      specs: inputs and outputs whose specs differ, largest first.
      traffic: collectives by kind and axes, where they differ, slowest first.
      unchanged: number of inputs and outputs with equal specs.
      values: (number of values with different specs, number of values compared),
        intermediate values included; zeros if the programs differ.
      chosen: names of the program passes chosen for each plan, as micro-batches.
    """

    programs: tuple[str, str]
    has_same_fingerprint: bool
    change: str
    meshes: tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]
    hardware: tuple[str, str]
    predicted: tuple[Predicted, Predicted]
    specs: tuple[SpecChange, ...]
    traffic: tuple[TrafficChange, ...]
    unchanged: int
    values: tuple[int, int]
    chosen: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    @property
    def is_empty(self) -> bool:
        """Whether the plans are equal in all of these."""
        return (
            self.has_same_fingerprint
            and self.meshes[0] == self.meshes[1]
            and self.hardware[0] == self.hardware[1]
            and self.predicted[0] == self.predicted[1]
            and not self.specs
            and not self.traffic
            and not self.values[0]
            and self.chosen[0] == self.chosen[1]
        )


def diff(a: PlanData, b: PlanData) -> PlanDiffData:
    """Compare plan `a` with plan `b`; see `rhino.diff`."""
    for one in (a, b):
        if not hasattr(one, "mesh_axes"):
            raise PlanFileError(
                "`diff`: this is no plan.",
                where="the plan to compare with",
                numbers=f"got {brief(one)} ({type(one).__name__})",
                fix="give a Plan, as rhino.plan(…) and rhino.load_plan(…) return it.",
            )
    inputs, same_inputs = _spec_changes("input", a, b, a.inputs, b.inputs)
    outputs, same_outputs = _spec_changes("output", a, b, a.outputs, b.outputs)
    changes = sorted(
        inputs + outputs, key=lambda c: -max(c.bytes_before, c.bytes_after)
    )
    return PlanDiffData(
        programs=(a.program_name, b.program_name),
        has_same_fingerprint=a.fingerprint == b.fingerprint,
        change=""
        if a.fingerprint == b.fingerprint
        else first_change(outline_of(a), outline_of(b)),
        meshes=(tuple(a.mesh_axes), tuple(b.mesh_axes)),
        hardware=(a.hardware, b.hardware),
        predicted=(a.predicted, b.predicted),
        specs=tuple(changes),
        traffic=_traffic_changes(traffic_of(a.collectives), traffic_of(b.collectives)),
        unchanged=same_inputs + same_outputs,
        values=_values_changed(a, b),
        chosen=(_chosen(a), _chosen(b)),
    )


def _chosen(plan: PlanData) -> tuple[str, ...]:
    return tuple(t.name for t in plan.transforms if t.choice)


def _values_changed(a: PlanData, b: PlanData) -> tuple[int, int]:
    choices = [[t.choice for t in plan.transforms] for plan in (a, b)]
    if a.fingerprint != b.fingerprint or choices[0] != choices[1]:
        return 0, 0
    before, after = _specs_of(a), _specs_of(b)
    both = before.keys() & after.keys()
    return sum(before[v] != after[v] for v in both), len(both)


def _specs_of(plan: PlanData) -> dict[int, str]:
    """Return value id → spec as text, over all stages."""
    return {
        value: format_spec(spec, [name for name, _ in stage.mesh_axes])
        for stage in plan.stages
        for value, spec in stage.decisions.values.items()
    }


def traffic_of(
    collectives: Iterable[Collective],
) -> dict[tuple[str, tuple[str, ...]], Traffic]:
    """Sum collectives by kind and axes, slowest first."""
    sums: dict[tuple[str, tuple[str, ...]], Traffic] = {}
    for c in collectives:
        old = sums.get((c.kind, c.axes), Traffic())
        sums[c.kind, c.axes] = Traffic(
            old.count + c.count, old.bytes + c.bytes, old.seconds + c.seconds
        )
    order = sorted(sums.items(), key=lambda x: (-x[1].seconds, -x[1].bytes, x[0]))
    return dict(order)


def _spec_changes(
    side: str, a: PlanData, b: PlanData, old: Iterable[Leaf], new: Iterable[Leaf]
) -> tuple[list[SpecChange], int]:
    names_a = [name for name, _ in a.mesh_axes]
    names_b = [name for name, _ in b.mesh_axes]
    before = {x.path: (format_spec(x.spec, names_a), x) for x in old}
    after = {x.path: (format_spec(x.spec, names_b), x) for x in new}
    changes, same = [], 0
    for path in [*before, *(p for p in after if p not in before)]:
        text_a, leaf_a = before.get(path, ("", None))
        text_b, leaf_b = after.get(path, ("", None))
        if text_a == text_b:
            same += 1
            continue
        bytes_a = leaf_a.bytes_per_device if leaf_a else 0
        bytes_b = leaf_b.bytes_per_device if leaf_b else 0
        changes.append(SpecChange(side, path, text_a, text_b, bytes_a, bytes_b))
    return changes, same


def _traffic_changes(
    before: Mapping[tuple[str, tuple[str, ...]], Traffic],
    after: Mapping[tuple[str, tuple[str, ...]], Traffic],
) -> tuple[TrafficChange, ...]:
    changes = [
        TrafficChange(kind, axes, before.get((kind, axes), Traffic()), new)
        for (kind, axes), new in after.items()
    ]
    changes += [
        TrafficChange(kind, axes, old, Traffic())
        for (kind, axes), old in before.items()
        if (kind, axes) not in after
    ]
    changes = [c for c in changes if c.before != c.after]
    return tuple(sorted(changes, key=lambda c: -max(c.before.seconds, c.after.seconds)))
