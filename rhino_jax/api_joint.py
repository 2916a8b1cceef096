"""Programs that share state, searched on one mesh, and a plan made of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rhino_jax.api_layout import WHAT, decided_layout
from rhino_jax.api_like import Kept
from rhino_jax.api_wishes import MeshAxes, Wishes
from rhino_jax.apply.meshes import axes_of_mesh, make_mesh
from rhino_jax.errors import InfeasiblePlanError, PinError
from rhino_jax.face.plan import Plan
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import Spec, format_spec, local_shape
from rhino_jax.plan.pin_trees import check_devices, expand_pins
from rhino_jax.plan.pins import ResolvedPins, resolve_pins
from rhino_jax.plan.plans import Plans
from rhino_jax.plan.shared import Slot, shared_places, staying_inputs, taken_with
from rhino_jax.plan.trees import axes_text
from rhino_jax.units import format_bytes


if TYPE_CHECKING:
    from rhino_jax.search.adding import Member


MOST_AXES = 2
"""Axes of the meshes that are compared where no mesh is given; a third seldom gains."""

GOOD_ENOUGH = 1e-3
"""Share above what all would take alone at which no other layout is tried."""


@dataclass(frozen=True, slots=True, eq=False)
class Together:
    """The programs, and what is asked of them."""

    traced: Mapping[str, Traced]
    weights: Mapping[str, float]
    wishes: Mapping[str, Wishes]
    mesh: Any
    started: float

    @property
    def names(self) -> list[str]:
        return list(self.traced)

    @property
    def programs(self) -> list[Program]:
        return [t.program for t in self.traced.values()]

    def plans(self) -> Plans[Plan]:
        wishes = next(iter(self.wishes.values()))
        target = wishes.target_of(self.mesh)
        shared = shared_places(self.programs)
        layout = decided_layout(self, target, shared)
        axes = layout.mesh_axes
        members = self.members(target, axes, shared)
        mesh = self.mesh if self.mesh is not None else make_mesh(axes, WHAT)
        specs = dict(zip(self.names, layout.specs, strict=True))
        held = self._held_bytes(members, shared, layout.specs, mesh)
        found = self._planned(specs, held, mesh, shared)
        alone: dict[str, float | None] = dict.fromkeys(self.names)
        if wishes.time_limit_s is None and wishes.level == "best":
            found, held, alone = self._compared(found, held, mesh, shared, members)
        return Plans(
            plans=found,
            weights=self.weights,
            shared=tuple(
                tuple((self.names[m], self._path(m, slot)) for m, slot in place)
                for place in shared
            ),
            held_bytes=held,
            bound_s=min(layout.bound_s, self._sum_s(found)),
            alone_s=alone,
        )

    def _path(self, member: int, slot: int) -> str:
        return self.programs[member].inputs[slot].path

    def _sum_s(self, plans: Mapping[str, Plan]) -> float:
        return sum(self.weights[n] * p.predicted.step_time_s for n, p in plans.items())

    def meshes(self, target: Target) -> list[MeshAxes]:
        """The meshes to compare: those on which the pins of all programs hold."""
        if self.mesh is not None:
            return [axes_of_mesh(self.mesh)]
        every = []
        for name, traced in self.traced.items():
            pinned = self._pinned(name)
            every.append(self.wishes[name].meshes_of(traced, target, pinned)[0])
        left = [axes for axes in every[0] if all(axes in others for others in every)]
        left = [axes for axes in left if len(axes) <= MOST_AXES] or left
        if not left:
            raise PinError(
                f"{WHAT}: no mesh suits the pins of all programs.",
                where="pins=",
                numbers="; ".join(
                    f"{name}: {', '.join(map(axes_text, meshes))}"
                    for name, meshes in zip(self.names, every, strict=True)
                ),
                fix="give mesh=, or use the same axes in all pins.",
            )
        return left

    def _pinned(self, name: str) -> Mapping[str, Any]:
        arguments = self.traced[name].arguments
        return expand_pins(self.wishes[name].pins, arguments.tree, arguments.paths)

    def members(
        self, target: Target, axes: MeshAxes, shared: list[list[Slot]]
    ) -> list[Member]:
        from rhino_jax.search.adding import Member

        pins = [
            resolve_pins(self._pinned(name), program, axes)
            for name, program in zip(self.names, self.programs, strict=True)
        ]
        if self.mesh is not None:
            for name in self.names:
                check_devices(self._pinned(name), self.mesh)
        inputs = self._pins_of_all(pins, shared, axes)
        return [
            Member(
                program,
                self.wishes[name].request_of(target, replace(p, inputs=mine)),
                self.weights[name],
                staying_inputs(program),
            )
            for name, program, p, mine in zip(
                self.names, self.programs, pins, inputs, strict=True
            )
        ]

    def _pins_of_all(
        self, pins: Sequence[ResolvedPins], shared: list[list[Slot]], axes: MeshAxes
    ) -> list[dict[int, Spec]]:
        """A pin of a shared array holds in all programs.

        Raises:
          PinError: two programs pin it differently.
        """
        found = [dict(p.inputs) for p in pins]
        names = [name for name, _ in axes]
        for place in shared:
            said = [(m, slot) for m, slot in place if slot in pins[m].inputs]
            specs = {pins[m].inputs[slot] for m, slot in said}
            if len(specs) > 1:
                raise PinError(
                    f"{WHAT}: two programs pin a shared array differently.",
                    where=" and ".join(
                        f"{self.names[m]}: {self._path(m, s)}" for m, s in said
                    ),
                    numbers=" and ".join(
                        format_spec(pins[m].inputs[s], names) for m, s in said
                    ),
                    fix="drop one of the two.",
                )
            for spec in specs:
                for m, slot in place:
                    found[m][slot] = spec
        return found

    def _held_bytes(
        self,
        members: Sequence[Member],
        shared: list[list[Slot]],
        specs: Sequence[Mapping[int, Spec]],
        mesh: Any,
    ) -> dict[str, int]:
        """What stays of the other programs while each runs, per device."""
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
        known: Mapping[str, Plan] | None = None,
    ) -> dict[str, Plan]:
        """A plan of each program, in which what is shared is as given."""
        found = {}
        for m, (name, traced) in enumerate(self.traced.items()):
            if known is not None and name in known:
                found[name] = known[name]
                continue
            mine = {slot for place in shared for k, slot in place if k == m}
            others = ", ".join(n for n in self.names if n != name)
            kept = {slot: s for slot, s in specs[name].items() if slot in mine}
            basis = Kept(f"together with {others}", mesh, kept, is_asked=False)
            try:
                found[name] = self._wishes_within(name, held).plan_with(
                    traced, mesh, basis
                )
            except InfeasiblePlanError as error:
                raise _with_held(error, name, held[name]) from None
        return found

    def _wishes_within(self, name: str, held: Mapping[str, int]) -> Wishes:
        wishes = self.wishes[name]
        budget = wishes.budget_bytes(wishes.target_of(self.mesh)) - held[name]
        limit = wishes.time_limit_s
        return replace(
            wishes,
            memory_budget_bytes=max(1, int(budget)),
            time_limit_s=limit and limit / (2 * len(self.names)),
        )

    def _compared(
        self,
        found: dict[str, Plan],
        held: dict[str, int],
        mesh: Any,
        shared: list[list[Slot]],
        members: Sequence[Member],
    ) -> tuple[dict[str, Plan], dict[str, int], dict[str, float | None]]:
        """The best of what was found and of each program's own best layout."""
        alone: dict[str, Plan] = {}
        for name, traced in self.traced.items():
            try:
                within = self._wishes_within(name, held)
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
        plan: Plan,
        mesh: Any,
        shared: list[list[Slot]],
        members: Sequence[Member],
    ) -> tuple[dict[str, Plan], dict[str, int]] | None:
        """Plans in which one program is as it would be alone; None: nothing fits."""
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


def _with_held(error: InfeasiblePlanError, name: str, held: int) -> InfeasiblePlanError:
    return InfeasiblePlanError(
        error.what,
        where=f"{name}; {format_bytes(held)} of the other programs' state stays in"
        f" memory; {error.where}",
        numbers=error.numbers,
        fix=error.fix,
    )
