"""Programs that share state, with the options of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rhino_jax.errors import PinError
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import Spec, axes_text, format_spec
from rhino_jax.plan.pin_trees import check_devices, expand_pins
from rhino_jax.plan.resolved_pins import ResolvedPins, resolve_pins
from rhino_jax.plan.shared import Slot, staying_inputs
from rhino_jax.planner.meshes import MeshAxes
from rhino_jax.planner.options import PlanOptions
from rhino_jax.runtime.meshes import axes_of_mesh


if TYPE_CHECKING:
    from rhino_jax.planner.search.together import Member


WHAT = "`rhino.plan_together`"

MAX_AXES = 2
"""Maximum number of axes of candidate meshes; a third axis seldom gains."""


@dataclass(frozen=True, slots=True, eq=False)
class JointPrograms:
    """Programs that share state, with the options of each.

    Attributes:
      traced: name → the traced function.
      weights: name → how often it runs, relative to the others.
      plan_options: name → the options of its plan.
      mesh: the mesh of all programs; None: rhino chooses.
      started: when planning began, in seconds of `time.monotonic`.
    """

    traced: Mapping[str, Traced]
    weights: Mapping[str, float]
    plan_options: Mapping[str, PlanOptions]
    mesh: Any
    started: float

    @property
    def names(self) -> list[str]:
        return list(self.traced)

    @property
    def programs(self) -> list[Program]:
        return [t.program for t in self.traced.values()]

    def meshes(self, target: Target) -> list[MeshAxes]:
        """Return the candidate meshes: those on which the pins of all programs hold."""
        if self.mesh is not None:
            return [axes_of_mesh(self.mesh)]
        every = []
        for name, traced in self.traced.items():
            pinned = self._pinned(name)
            every.append(self.plan_options[name].meshes_of(traced, target, pinned)[0])
        left = [axes for axes in every[0] if all(axes in others for others in every)]
        left = [axes for axes in left if len(axes) <= MAX_AXES] or left
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
        return expand_pins(self.plan_options[name].pins, self.traced[name])

    def members(
        self, target: Target, axes: MeshAxes, shared: list[list[Slot]]
    ) -> list[Member]:
        """Return each program with its search request and the pins of shared arrays."""
        from rhino_jax.planner.search.together import Member

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
                self.plan_options[name].request_of(target, replace(p, inputs=mine)),
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
        """Extend a pin of a shared array to all programs.

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
                        f"{self.names[m]}: {self.path(m, s)}" for m, s in said
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

    def path(self, member: int, slot: int) -> str:
        """Return the tree path of a program's input."""
        return self.programs[member].inputs[slot].path
