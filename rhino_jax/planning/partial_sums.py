"""Plans in which partial sums stay open: sites found in a first plan, planned again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rhino_jax.cost.collectives import collective_s, wire_bytes
from rhino_jax.cost.combine import combine_steps
from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.hardware.layout import lay_out
from rhino_jax.hardware.mesh import LaidMesh
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Op, Program
from rhino_jax.ir.spec import Spec, replicated, share_of
from rhino_jax.ir.transform import PARTIAL_SUMS, Transform
from rhino_jax.plan.decisions import Decisions
from rhino_jax.plan.plan import Plan
from rhino_jax.planning.search import Search
from rhino_jax.transform.partial_sums import Site, as_text, sites


LEAST_GAIN = 0.005
"""Share of the predicted step that open sums must gain: plans at level "best" are
proved to within 0.4 % (`bench plan`)."""


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


def with_open_sums(search: Search, plan: Plan) -> tuple[Search, Plan]:
    """The plan in which partial sums stay open, where one is predicted to be faster.

    Args:
      search: what was planned.
      plan: its plan.
    Returns:
      The search of the program with open sums, and its plan; or what was given.
    """
    found = sites_of(search.running.program, plan, search.target)
    if not found:
        return search, plan
    choice = as_text(site.group for site in found)
    again = search.after([Transform(PARTIAL_SUMS, 0, 0, choice)]).on(plan.mesh_axes)
    try:
        second = replace(
            again.asking(has_recipes=False).plan(),
            recipes=plan.recipes,
            meshes=plan.meshes,
        )
    except InfeasiblePlanError:
        return search, plan
    least_s = (1 - LEAST_GAIN) * plan.predicted.step_time_s
    return (again, second) if second.predicted.step_time_s < least_s else (search, plan)
