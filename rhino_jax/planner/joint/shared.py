"""Plans of programs that share state, on one mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.ir.spec import Spec, local_shape
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.shared import Plans, Slot, shared_places, taken_with
from rhino_jax.planner.joint.layout import decided_layout
from rhino_jax.planner.joint.programs import WHAT, JointPrograms
from rhino_jax.planner.like import ReusedSpecs
from rhino_jax.planner.options import PlanOptions
from rhino_jax.runtime.meshes import axes_of_mesh, make_mesh
from rhino_jax.units import format_bytes


if TYPE_CHECKING:
    from rhino_jax.planner.search.together import Member


GOOD_ENOUGH = 1e-3
"""Share above the programs' own best steps from which other layouts are tried."""


@dataclass(frozen=True, slots=True, eq=False)
class Together(JointPrograms):
    """Programs that share state, and their plans."""

    def plans(self) -> Plans[PlanData]:
        """Return a plan of each program, with one layout of the shared state."""
        plan_options = next(iter(self.plan_options.values()))
        target = plan_options.target_of(self.mesh)
        shared = shared_places(self.programs)
        layout = decided_layout(self, target, shared)
        axes = layout.mesh_axes
        members = self.members(target, axes, shared)
        mesh = self.mesh if self.mesh is not None else make_mesh(axes, WHAT)
        specs = dict(zip(self.names, layout.specs, strict=True))
        held = self._held_bytes(members, shared, layout.specs, mesh)
        found = self._planned(specs, held, mesh, shared)
        alone: dict[str, float | None] = dict.fromkeys(self.names)
        if plan_options.time_limit_s is None and plan_options.level == "best":
            found, held, alone = self._compared(found, held, mesh, shared, members)
        return Plans(
            plans=found,
            weights=self.weights,
            shared=tuple(
                tuple((self.names[m], self.path(m, slot)) for m, slot in place)
                for place in shared
            ),
            held_bytes=held,
            bound_s=min(layout.bound_s, self._sum_s(found)),
            alone_s=alone,
        )

    def _sum_s(self, plans: Mapping[str, PlanData]) -> float:
        return sum(self.weights[n] * p.predicted.step_time_s for n, p in plans.items())

    def _held_bytes(
        self,
        members: Sequence[Member],
        shared: list[list[Slot]],
        specs: Sequence[Mapping[int, Spec]],
        mesh: Any,
    ) -> dict[str, int]:
        """Return the bytes per device of the other programs' state that stay allocated
        while each program runs."""
        found = dict.fromkeys(self.names, 0)
        sizes = [size for _, size in axes_of_mesh(mesh)]
        for m, name in enumerate(self.names):
            for k, other in enumerate(members):
                left = other.stays - taken_with(shared, k, m) if k != m else ()
                for slot in left:
                    value = other.program.values[other.program.inputs[slot].value]
                    spec = specs[k].get(slot, ((),) * value.rank)
                    local = math.prod(local_shape(spec, value.shape, sizes))
                    whole = max(1, math.prod(value.shape))
                    found[name] += math.ceil(value.bytes * local / whole)
        return found

    def _planned(
        self,
        specs: Mapping[str, Mapping[int, Spec]],
        held: Mapping[str, int],
        mesh: Any,
        shared: list[list[Slot]],
        known: Mapping[str, PlanData] | None = None,
    ) -> dict[str, PlanData]:
        """Return a plan of each program, with the given layout of the shared state."""
        found = {}
        for m, (name, traced) in enumerate(self.traced.items()):
            if known is not None and name in known:
                found[name] = known[name]
                continue
            mine = {slot for place in shared for k, slot in place if k == m}
            others = ", ".join(n for n in self.names if n != name)
            kept = {slot: s for slot, s in specs[name].items() if slot in mine}
            basis = ReusedSpecs(f"together with {others}", mesh, kept, is_asked=False)
            try:
                found[name] = self._options_within(name, held).plan_with(
                    traced, mesh, basis
                )
            except InfeasiblePlanError as error:
                raise InfeasiblePlanError(
                    error.what,
                    where=f"{name}; {format_bytes(held[name])} of the other programs'"
                    f" state stays in memory; {error.where}",
                    numbers=error.numbers,
                    fix=error.fix,
                ) from None
        return found

    def _options_within(self, name: str, held: Mapping[str, int]) -> PlanOptions:
        plan_options = self.plan_options[name]
        budget = (
            plan_options.budget_bytes(plan_options.target_of(self.mesh)) - held[name]
        )
        limit = plan_options.time_limit_s
        return replace(
            plan_options,
            memory_budget_bytes=max(1, int(budget)),
            time_limit_s=limit and limit / (2 * len(self.names)),
        )

    def _compared(
        self,
        found: dict[str, PlanData],
        held: dict[str, int],
        mesh: Any,
        shared: list[list[Slot]],
        members: Sequence[Member],
    ) -> tuple[dict[str, PlanData], dict[str, int], dict[str, float | None]]:
        """Return the better of the joint layout and each program's own best layout."""
        alone: dict[str, PlanData] = {}
        for name, traced in self.traced.items():
            try:
                within = self._options_within(name, held)
                alone[name] = within.plan_with(traced, mesh, None)
            except InfeasiblePlanError:
                continue
        steps = {
            n: alone[n].predicted.step_time_s if n in alone else None for n in held
        }
        if len(alone) < len(found):
            return found, held, steps
        for name, plan in alone.items():
            if self._sum_s(found) <= (1 + GOOD_ENOUGH) * self._sum_s(alone):
                break
            other = self._like(name, plan, mesh, shared, members)
            if other is not None and self._sum_s(other[0]) < self._sum_s(found):
                found, held = other
        return found, held, steps

    def _like(
        self,
        name: str,
        plan: PlanData,
        mesh: Any,
        shared: list[list[Slot]],
        members: Sequence[Member],
    ) -> tuple[dict[str, PlanData], dict[str, int]] | None:
        """Return plans in which one program has the layout that it would have alone;
        None where nothing fits."""
        first = self.names.index(name)
        specs: list[dict[int, Spec]] = [{} for _ in self.names]
        for place in shared:
            own = [slot for m, slot in place if m == first]
            for m, slot in place:
                if own:
                    specs[m][slot] = plan.inputs[own[0]].spec
        nothing = dict.fromkeys(self.names, 0)
        by_name = dict(zip(self.names, specs, strict=True))
        try:
            found = self._planned(by_name, nothing, mesh, shared, {name: plan})
        except InfeasiblePlanError:
            return None
        every = [
            dict(enumerate(leaf.spec for leaf in found[n].inputs)) for n in self.names
        ]
        held = self._held_bytes(members, shared, every, mesh)
        budget = min(m.request.memory_budget_bytes for m in members)
        if any(p.predicted.peak_bytes + held[n] > budget for n, p in found.items()):
            return None
        return found, held
