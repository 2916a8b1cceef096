"""Plans of several programs that share state.

Arrays that several programs have are shared; the state that one program needs later
stays allocated while others run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import Spec, axes_text
from rhino_jax.plan.kept import ArrayLeaf, keys_of, same_leaves
from rhino_jax.plan.plan import AnyPlan
from rhino_jax.units import format_bytes, format_seconds
from rhino_jax.utils.union_find import DisjointSets


@dataclass(frozen=True, kw_only=True, repr=False)
class Plans(Mapping[str, AnyPlan]):
    """Plans by program name, all on one mesh; see `rhino.plan_together`.

    Attributes:
      plans: program name → its plan.
      weights: program name → how often it runs, relative to the others.
      shared: for every array that several programs take, its (program name, tree path)
        in each.
      held_bytes: program name → bytes per device of the other programs' state that
        stays in memory while it runs and that it does not take itself.
      bound_s: lower bound on the weighted sum of step times, in seconds, assuming that
        collectives of one program do not hide behind compute of another.
      alone_s: program name → seconds of its step if planned alone on this mesh; None if
        not requested.
    """

    plans: Mapping[str, AnyPlan]
    weights: Mapping[str, float]
    shared: tuple[tuple[tuple[str, str], ...], ...]
    held_bytes: Mapping[str, int]
    bound_s: float
    alone_s: Mapping[str, float | None]

    def __getitem__(self, name: str) -> AnyPlan:
        return self.plans[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)

    @property
    def mesh(self) -> Any:
        """The mesh of all programs."""
        return next(iter(self.plans.values())).mesh

    @property
    def mesh_axes(self) -> tuple[tuple[str, int], ...]:
        """(name, size) of every mesh axis, major first."""
        return next(iter(self.plans.values())).mesh_axes

    @property
    def objective_s(self) -> float:
        """The weighted sum of predicted steps, in seconds."""
        return sum(
            self.weights[name] * plan.predicted.step_time_s
            for name, plan in self.plans.items()
        )

    @property
    def peak_bytes(self) -> int:
        """Largest peak of any program with the others' state, in bytes per device."""
        return max(
            plan.predicted.peak_bytes + self.held_bytes[name]
            for name, plan in self.plans.items()
        )

    def __repr__(self) -> str:
        axes = axes_text(self.mesh_axes, " × ")
        lines = [
            f"Plans on {axes}: arrays shared {len(self.shared)},"
            f" {format_seconds(self.objective_s)} in all,"
            f" peak {format_bytes(self.peak_bytes)}"
        ]
        lines += [self._line(name, plan) for name, plan in self.plans.items()]
        return "\n".join(lines)

    def _line(self, name: str, plan: AnyPlan) -> str:
        alone = self.alone_s.get(name)
        beside = "" if alone is None else f" ({format_seconds(alone)} alone)"
        return (
            f"  {self.weights[name]:g} × {name}:"
            f" {format_seconds(plan.predicted.step_time_s)}{beside}, peak"
            f" {format_bytes(plan.predicted.peak_bytes)} and"
            f" {format_bytes(self.held_bytes[name])} allocated for the others"
        )


Slot = tuple[int, int]
"""(position of a program, position of one of its inputs)."""


@dataclass(frozen=True, slots=True)
class SharedLayout:
    """The layout that was chosen for several programs together.

    Attributes:
      mesh_axes: (name, size) of the mesh axes, major first.
      specs: by program, input position → spec.
      bound_s: lower bound on the weighted sum of step times, in seconds.
    """

    mesh_axes: tuple[tuple[str, int], ...]
    specs: tuple[Mapping[int, Spec], ...]
    bound_s: float


def staying_inputs(program: Program) -> frozenset[int]:
    """Return the positions of the inputs that the next call needs.

    All inputs but the arrays of the last argument, unless these are fed back.
    """
    roots = [keys_of(e.path)[0] for e in program.inputs if not e.is_const]
    fed_back = {o.state_of for o in program.outputs}
    last = roots[-1] if len(set(roots)) > 1 else None
    return frozenset(
        i
        for i, e in enumerate(program.inputs)
        if e.is_const or keys_of(e.path)[0] != last or i in fed_back
    )


def shared_places(programs: Sequence[Program]) -> list[list[Slot]]:
    """Group inputs of several programs that are one array; groups of two or more."""
    arrays = [
        {
            i: ArrayLeaf(keys_of(e.path), p.values[e.value].shape)
            for i, e in enumerate(p.inputs)
            if not e.is_const
        }
        for p in programs
    ]
    every: list[Slot] = [(m, i) for m, a in enumerate(arrays) for i in a]
    number = {slot: n for n, slot in enumerate(every)}
    places = DisjointSets(len(every))
    for q, wanted in enumerate(arrays):
        for p, known in enumerate(arrays[:q]):
            slots = list(known)
            # All specs differ, so that ambiguous matches are not shared.
            apart: list[Spec] = [((k,),) for k in range(len(slots))]
            for i, k in same_leaves(wanted, list(known.values()), apart).items():
                places.union(number[p, slots[k]], number[q, i])
    found: dict[int, list[Slot]] = {}
    for slot, place in zip(every, places.names(), strict=True):
        found.setdefault(place, []).append(slot)
    return [place for place in found.values() if len(place) > 1]


def taken_with(shared: Sequence[Sequence[Slot]], k: int, m: int) -> set[int]:
    """Return the inputs of program `k` that are inputs of program `m`, too."""
    both = [place for place in shared if {k, m} <= {member for member, _ in place}]
    return {slot for place in both for member, slot in place if member == k}
