"""Plans in which partial sums stay open: sites found in a first plan, planned again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from rhino_jax.cost.collectives import collective_s, wire_bytes
from rhino_jax.cost.combine import combine_steps
from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.layout import lay_out
from rhino_jax.hardware.mesh import LaidMesh
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Op, Program
from rhino_jax.ir.spec import Spec, replicated, share_of
from rhino_jax.ir.transform import Transform
from rhino_jax.plan.decisions import Decisions
from rhino_jax.plan.plan import Plan
from rhino_jax.transform.partial_sums import Site, accumulated, as_text, sites
from rhino_jax.transform.remade import remade


if TYPE_CHECKING:
    from rhino_jax.search.records import Request


NAME = "partial sums"
"""Of the pass, in `Plan.transforms`."""


@dataclass(frozen=True)
class PlannedPrices:
    """What a plan says of a program; see `transform.partial_sums.sites.Prices`."""

    program: Program
    decisions: Decisions
    mesh: LaidMesh
    target: Target

    @property
    def sizes(self) -> Sequence[int]:
        return self.mesh.sizes

    @cached_property
    def cuts(self) -> Mapping[int, tuple[tuple[int, ...], ...]]:
        return {op.id: self._cut(op) for op in self.program.ops if op.rule}

    def _cut(self, op: Op) -> tuple[tuple[int, ...], ...]:
        """The axes that cut every factor, as the op reads its operands."""
        assert op.rule is not None
        found: dict[int, tuple[int, ...]] = {}
        for i, layout in enumerate(op.rule.operands):
            held = self._spec(op.operands[i])
            spec = self.decisions.operands.get((op.id, i), held)
            if len(spec) == len(layout):
                for dim, axes in zip(layout, spec, strict=True):
                    if len(dim) == 1 and axes:
                        found[dim[0]] = axes
        return tuple(found.get(f, ()) for f in range(len(op.rule.factors)))

    def _spec(self, value: int) -> Spec:
        rank = self.program.values[value].rank
        spec = self.decisions.values.get(value)
        return spec if spec is not None and len(spec) == rank else replicated(rank)

    def _made(self, value: int, axes: Sequence[int]) -> tuple[Spec, float]:
        """How a value is laid out while it is a sum over mesh axes, and the bytes of it
        on one device."""
        spec = tuple(
            tuple(a for a in dim if a not in axes) for dim in self._spec(value)
        )
        whole = self.program.values[value]
        return spec, whole.bytes * share_of(spec, whole.shape, self.mesh.sizes)

    def close(self, value: int, axes: tuple[int, ...]) -> tuple[float, float]:
        made, local = self._made(value, axes)
        steps = combine_steps(made, self._spec(value), axes, local, self.mesh)
        seconds = sum(
            s.runs * collective_s(s.kind, s.local_bytes, self.mesh.over(s.axes))
            for s in steps
        )
        sent = sum(
            s.runs
            * wire_bytes(
                s.kind, s.local_bytes, math.prod(self.mesh.sizes[a] for a in s.axes)
            )
            for s in steps
        )
        return seconds, sent

    def held_s(self, op: Op, axes: tuple[int, ...]) -> float:
        value, device = op.results[0], self.target.device
        whole, sizes = self.program.values[value], self.mesh.sizes
        made, local = self._made(value, axes)
        less = whole.bytes * share_of(self._spec(value), whole.shape, sizes)
        memory_s = (local - less) / (device.hbm_bytes_per_s * device.memory_efficiency)
        if not op.traits.is_contraction:
            return memory_s
        shares = [share_of(s, whole.shape, sizes) for s in (made, self._spec(value))]
        peak = device.matmul_efficiency * max(f for _, f in device.peak_flops_per_s)
        return memory_s + op.flops * (shares[0] - shares[1]) / peak


def sites_of(program: Program, plan: Plan, target: Target) -> list[Site]:
    """Where a plan of a program sums what could stay open; the most useful first."""
    mesh = lay_out(target, plan.mesh_axes)
    return sites(program, PlannedPrices(program, plan.decisions, mesh, target))


def with_delayed_sums(
    traced: Traced,
    mesh_axes: Sequence[tuple[str, int]],
    target: Target,
    asked: Callable[[Program], Request],
    first: Plan | None = None,
) -> tuple[Traced, Plan]:
    """A plan in which partial sums stay open, where one is faster.

    Sums that the first plan has are left open by that plan; sums of loops whatever it
    has, since a plan that sums in every trip has none.

    Args:
      traced: the function.
      mesh_axes: (name, size), major first.
      target: the hardware.
      asked: what is asked for, of a program: pins on values go by its ids.
      first: the plan to beat, made for the same; None: it is made here.
    Returns:
      Of the plans the one with the lowest predicted step, and the function that it is a
      plan of: `traced`, or what `remade` makes of it by the plan's transforms.
    """
    from rhino_jax.search.driver import make_plan

    program = traced.program
    if first is None:
        first = make_plan(program, mesh_axes, target, asked(program))
    plans = [(traced, first)]

    def plan_with(found: Sequence[Site]) -> tuple[Traced, Plan] | None:
        if not found:
            return None
        again = remade(traced, [_transform(program, found)])
        request = replace(asked(again.program), level="fast")
        try:
            plan = make_plan(again.program, mesh_axes, target, request)
        except InfeasiblePlanError:
            return None
        plans.append((again, plan))
        return plans[-1]

    plan_with(sites_of(program, first, target))
    sizes = [size for _, size in mesh_axes]
    supposed = plan_with(accumulated(program, [math.prod(sizes)]))
    if supposed is not None:
        used = _axes_of_pieces(supposed[0].program, supposed[1], math.prod(sizes))
        if 0 < math.prod(sizes[a] for a in used) < math.prod(sizes):
            plan_with(accumulated(program, [sizes[a] for a in used]))
    return min(plans, key=lambda found: found[1].predicted.step_time_s)


def _transform(program: Program, found: Sequence[Site]) -> Transform:
    size = len(program.ops)
    return Transform(NAME, size, size, as_text(site.group for site in found))


def _axes_of_pieces(program: Program, plan: Plan, count: int) -> tuple[int, ...]:
    """The mesh axes by which most of what is summed over `count` pieces is cut."""
    weights: Counter[tuple[int, ...]] = Counter()
    values, held = program.values, plan.decisions.values
    for op in program.ops:
        value = values[op.operands[0]] if op.operands else None
        if op.name == "reduce_sum" and value and value.shape[0] == count:
            spec = held.get(value.id)
            if spec:
                weights[tuple(sorted(spec[0]))] += value.bytes
    return weights.most_common(1)[0][0] if weights else ()
