"""Arrays that several programs share, and state that stays while other programs run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import Spec
from rhino_jax.plan.kept import ArrayLeaf, keys_of, same_leaves


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

    def to_json(self) -> Any:
        specs = [list(of_one.items()) for of_one in self.specs]
        return [list(self.mesh_axes), specs, self.bound_s]

    @classmethod
    def from_json(cls, data: Any) -> SharedLayout:
        axes, specs, bound_s = data
        return cls(
            tuple((name, size) for name, size in axes),
            tuple({slot: tuple(map(tuple, s)) for slot, s in one} for one in specs),
            bound_s,
        )


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
    root: dict[Slot, Slot] = {(m, i): (m, i) for m, a in enumerate(arrays) for i in a}

    def find(slot: Slot) -> Slot:
        while root[slot] != slot:
            slot = root[slot]
        return slot

    for q, wanted in enumerate(arrays):
        for p, known in enumerate(arrays[:q]):
            slots = list(known)
            # All specs differ, so that ambiguous matches are not shared.
            apart: list[Spec] = [((k,),) for k in range(len(slots))]
            for i, k in same_leaves(wanted, list(known.values()), apart).items():
                a, b = find((p, slots[k])), find((q, i))
                root[max(a, b)] = min(a, b)
    places: dict[Slot, list[Slot]] = {}
    for slot in root:
        places.setdefault(find(slot), []).append(slot)
    return [place for place in places.values() if len(place) > 1]


def taken_with(shared: Sequence[Sequence[Slot]], k: int, m: int) -> set[int]:
    """Return the inputs of program `k` that are inputs of program `m`, too."""
    both = [place for place in shared if {k, m} <= {member for member, _ in place}]
    return {slot for place in both for member, slot in place if member == k}
