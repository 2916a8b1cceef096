"""The experts' recipes, as restrictions of the search space.

A recipe says which classes of dims each mesh axis may cut, for activations,
parameters and optimizer state. The cheapest plan within the restriction is the
recipe at its best; it is costed by the same model, starts the search, and stands
in the plan's table.

Source: dp, zero1, fsdp: Rajbhandari et al., "ZeRO" (SC 2020), section 5;
megatron: Shoeybi et al., "Megatron-LM" (2019), section 3; its sequence
parallelism: Korthikanti et al. (2022), section 4.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from rhino_jax.hardware.mesh import LaidMesh
from rhino_jax.search.axis_places import AxisPlaces


@dataclass(frozen=True, slots=True)
class Recipe:
    """Attributes:
    name: as users know it.
    data: mesh axes that cut the batch.
    model: mesh axes that cut heads, hidden widths, experts, vocabulary.
    cuts_params: data axes also cut stored parameters (ZeRO-3, FSDP).
    cuts_state: data axes also cut optimizer state (ZeRO-1).
    cuts_sequence: model axes cut the sequence between matmuls.
    """

    name: str
    data: tuple[int, ...]
    model: tuple[int, ...] = ()
    cuts_params: bool = False
    cuts_state: bool = False
    cuts_sequence: bool = False


def recipes_for(mesh: LaidMesh) -> tuple[Recipe, ...]:
    """The recipes that a mesh allows: the model axis is its last."""
    every = tuple(range(len(mesh.axes)))
    if not every:
        return ()
    data, model = every[:-1], every[-1:]
    found = [
        Recipe("dp", every),
        Recipe("zero1", every, cuts_state=True),
        Recipe("fsdp", every, cuts_params=True, cuts_state=True),
        Recipe("megatron", data, model),
        Recipe("megatron+sp", data, model, cuts_sequence=True),
    ]
    if data:
        found += [
            Recipe("megatron+fsdp", data, model, cuts_params=True, cuts_state=True),
            Recipe(
                "megatron+fsdp+sp",
                data,
                model,
                cuts_params=True,
                cuts_state=True,
                cuts_sequence=True,
            ),
        ]
    return tuple(found)


class Role(enum.IntEnum):
    """What an expert calls a class of dims."""

    BATCH = 0
    SEQUENCE = 1
    INNER = 2
    OTHER = 3
    NONE = 4
    """Of an axis that cuts nothing."""


@dataclass(frozen=True, slots=True)
class Place:
    """All that a recipe looks at in a node: equal places allow equal options.

    Attributes:
      cut: role of every factor (op) or dim (border node).
      results: role of every dim of every result.
      is_op, is_heavy: an op; one that is neither elementwise nor a reduction.
      is_data, is_param: an input that is data; one that is not optimizer state.
    """

    cut: tuple[Role, ...]
    results: tuple[tuple[Role, ...], ...]
    is_op: bool
    is_heavy: bool
    is_data: bool
    is_param: bool


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """Nodes with the same strategies that look alike to recipes.

    Attributes:
      place: what recipes look at.
      cut: [strategies, axes], the `Role` of the factor (op) or dim (border node) that
        each mesh axis cuts.
      scattered: for every result the same, of the dim that an axis cuts only when
        partial sums are combined.
    """

    place: Place
    cut: np.ndarray
    scattered: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, place: Place, axes: AxisPlaces) -> Kind:
        # As an index, NOWHERE is the last.
        cut = np.array([*(place.cut if place.is_op else place.results[0]), Role.NONE])
        scattered = zip(place.results, axes.scattered, strict=False)
        return cls(
            place,
            cut[axes.cut],
            tuple(np.array([*roles, Role.NONE])[dims] for roles, dims in scattered),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Allowance:
    """What a recipe allows, as [axes, `Role`] arrays.

    Attributes:
      recipe: it.
      cuts: by whether a node is heavy, holds a dim of the batch, and is a parameter:
        whether an axis may cut a dim of a role.
      scatters: by whether a result holds a dim of the batch: likewise.
    """

    recipe: Recipe
    cuts: dict[tuple[bool, bool, bool], np.ndarray]
    scatters: dict[bool, np.ndarray]

    @classmethod
    def of(cls, recipe: Recipe, num_axes: int) -> Allowance:
        def table(may: Callable[[int, Role], bool]) -> np.ndarray:
            rows = [
                [r is Role.NONE or may(a, r) for r in Role] for a in range(num_axes)
            ]
            return np.array(rows, dtype=bool).reshape(num_axes, len(Role))

        either = (False, True)
        return cls(
            recipe,
            {
                looks: table(partial(_may_cut, recipe, looks))
                for looks in itertools.product(either, either, either)
            },
            {b: table(partial(_may_scatter, recipe, b)) for b in either},
        )

    def options(self, kind: Kind) -> np.ndarray:
        """The strategies left to nodes of a kind; the first where none is allowed."""
        place = kind.place
        each = np.arange(kind.cut.shape[1])
        looks = place.is_heavy, Role.BATCH in place.cut, place.is_param
        permitted = self.cuts[looks][each, kind.cut].all(1)
        for roles, scattered in zip(place.results, kind.scattered, strict=False):
            permitted &= self.scatters[Role.BATCH in roles][each, scattered].all(1)
        if place.is_data:
            # Data enters cut over all data axes, where it can be.
            data = kind.cut[:, list(self.recipe.data)]
            cut = permitted & (data != Role.NONE).all(1)
            permitted = cut if cut.any() else permitted
        keep = np.flatnonzero(permitted)
        return keep if len(keep) else np.zeros(1, np.int64)


def _may_cut(
    recipe: Recipe, looks: tuple[bool, bool, bool], axis: int, role: Role
) -> bool:
    is_heavy, is_batched, is_param = looks
    if axis in recipe.model:
        if role is Role.INNER:
            return True
        return recipe.cuts_sequence and role is Role.SEQUENCE and not is_heavy
    if role is Role.BATCH:
        return True
    if is_batched:
        return False
    return recipe.cuts_params if is_param else recipe.cuts_state


def _may_scatter(recipe: Recipe, is_batched: bool, axis: int, role: Role) -> bool:
    if axis in recipe.model:
        return recipe.cuts_sequence and role is Role.SEQUENCE
    return recipe.cuts_state and not is_batched
