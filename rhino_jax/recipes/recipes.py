"""The experts' recipes, as restrictions of the search space.

A recipe specifies which dim classes each mesh axis may shard, for activations,
parameters and optimizer state. The cheapest plan within the restriction is the
recipe at its best; it is costed by the same model, is a hint for the search, and a
row of the plan's table.

Source: of every recipe in `rhino_jax.recipes.table`.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from rhino_jax.hardware.mesh import LaidMesh
from rhino_jax.model.strategies import Strategy
from rhino_jax.recipes.table import EXPERTS


NOWHERE = -1
"""Stands for no factor and no dim; as an index, it selects the last one."""


@dataclass(frozen=True, slots=True, eq=False)
class AxisPlaces:
    """The positions of mesh axes in the strategies of a node, NOWHERE where an axis is
    unused.

    Attributes:
      cut: [strategies, axes], the factor of an op that each axis shards; for a node
        that is no op, the dim.
      scattered: for every result, [strategies, axes], the dim that each axis shards
        only once partial results are combined (reduce-scatter).
    """

    cut: np.ndarray
    scattered: tuple[np.ndarray, ...]

    @property
    def all(self) -> range:
        """All axes of the mesh."""
        return range(self.cut.shape[1])

    @classmethod
    def of(
        cls, strategies: Sequence[Strategy], num_axes: int, *, is_op: bool
    ) -> AxisPlaces:
        """Build the arrays for the strategies of one node."""
        size = len(strategies), num_axes
        cut = np.full(size, NOWHERE, np.int64)
        num_results = len(strategies[0].results)
        scattered = tuple(np.full(size, NOWHERE, np.int64) for _ in range(num_results))
        for k, strategy in enumerate(strategies):
            for place, axes in enumerate(
                strategy.cut if is_op else strategy.results[0]
            ):
                for axis in axes:
                    cut[k, axis] = place
            if strategy.made == strategy.results:
                continue
            for r, (made, done) in enumerate(
                zip(strategy.made, strategy.results, strict=True)
            ):
                for dim, (before, after) in enumerate(zip(made, done, strict=True)):
                    for axis in after[len(before) :]:
                        scattered[r][k, axis] = dim
        return cls(cut, scattered)


@dataclass(frozen=True, slots=True)
class Recipe:
    """An expert's recipe on one mesh.

    Attributes:
      name: name that users know.
      data: mesh axes that shard the batch.
      model: mesh axes that shard heads, hidden widths, vocabulary, and experts where
        no others do.
      experts: mesh axes among `data` that shard experts in products of their tokens.
      shards_params: whether data axes also shard stored parameters (ZeRO-3, FSDP),
        which loops read as stored, and gather where they use them.
      shards_state: whether data axes also shard optimizer state (ZeRO-1).
      shards_sequence: whether model axes shard the sequence between matmuls.
      is_plain: whether data axes shard all that they may, cheaper or not.
    """

    name: str
    data: tuple[int, ...]
    model: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    shards_params: bool = False
    shards_state: bool = False
    shards_sequence: bool = False
    is_plain: bool = False


def plain_recipes(mesh: LaidMesh) -> tuple[Recipe, ...]:
    """Return DP, ZeRO-1 and FSDP over the whole mesh, as people type them."""
    return tuple(
        replace(r, is_plain=True)
        for r in recipes_for(mesh)
        if not r.model and not r.experts and not r.shards_sequence
    )


def recipes_for(mesh: LaidMesh) -> tuple[Recipe, ...]:
    """Return the recipes that a mesh allows.

    The model axis is the last one that has several devices.
    """
    every = mesh.long
    if not every:
        return ()
    found = []
    for expert in EXPERTS:
        model = every[-1:] if expert.has_model_axis else ()
        data = every[: len(every) - len(model)]
        others = data[int(expert.needs_data_axis) :]
        experts = others if expert.has_expert_axis else ()
        if experts if expert.has_expert_axis else data or not expert.needs_data_axis:
            found.append(
                Recipe(
                    expert.name,
                    data,
                    model,
                    experts,
                    shards_params=expert.shards_params,
                    shards_state=expert.shards_state,
                    shards_sequence=expert.shards_sequence,
                )
            )
    return tuple(found)


class Role(enum.IntEnum):
    """Role of a dim class in a recipe."""

    BATCH = 0
    SEQUENCE = 1
    INNER = 2
    EXPERT = 3
    OTHER = 4
    NONE = 5
    """Role of an axis that shards no dim."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """Properties of a node that recipes depend on: equal views allow equal options.

    Attributes:
      cut: role of every factor (op) or dim (border node).
      results: role of every dim of every result.
      is_op, is_heavy: whether it is an op; whether it is one that is neither
        elementwise nor a reduction.
      is_data, is_param: whether it is an input that is data; that is not optimizer
        state.
      is_state: whether it is an input that is optimizer state.
      is_stored: whether it is a parameter, perhaps cast, as a loop reads it.
      is_grouped: whether it is a product of each expert's tokens with its matrix.
    """

    cut: tuple[Role, ...]
    results: tuple[tuple[Role, ...], ...]
    is_op: bool
    is_heavy: bool
    is_data: bool
    is_param: bool
    is_state: bool = False
    is_stored: bool = False
    is_grouped: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class NodeClass:
    """Nodes with the same strategies and equal views.

    Attributes:
      view: their view.
      cut: [strategies, axes], the `Role` of the factor (op) or dim (border node) that
        each mesh axis shards.
      scattered: for every result, [strategies, axes], the `Role` of the dim that an
        axis shards only when partial sums are combined (reduce-scatter).
      is_one_dim: [strategies], whether all axes shard the same dim.
    """

    view: NodeView
    cut: np.ndarray
    scattered: tuple[np.ndarray, ...]
    is_one_dim: np.ndarray

    @classmethod
    def of(cls, view: NodeView, axes: AxisPlaces, long: tuple[int, ...]) -> NodeClass:
        # As an index, NOWHERE is -1, the last entry.
        cut = np.array([*(view.cut if view.is_op else view.results[0]), Role.NONE])
        scattered = zip(view.results, axes.scattered, strict=False)
        return cls(
            view,
            cut[axes.cut],
            tuple(np.array([*roles, Role.NONE])[dims] for roles, dims in scattered),
            (axes.cut[:, long] == axes.cut[:, long[:1]]).all(axis=1),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Kinds:
    """All node classes of a model, with their strategies concatenated.

    Attributes:
      first: position of every class's first strategy.
      cut: [strategies, axes], as in `NodeClass`.
      scattered: for every result likewise; `Role.NONE` if a class has fewer results.
      looks: [strategies, 3], whether the node is heavy, has a batch dim, and is a
        parameter.
      is_batched: for every result, [strategies]: whether it has a batch dim.
      is_data, is_param, is_state, is_stored, is_grouped: [strategies], as in
        `NodeView`.
      is_one_dim: as in `NodeClass`.
    """

    first: np.ndarray
    cut: np.ndarray
    scattered: tuple[np.ndarray, ...]
    looks: np.ndarray
    is_batched: tuple[np.ndarray, ...]
    is_data: np.ndarray
    is_param: np.ndarray
    is_state: np.ndarray
    is_stored: np.ndarray
    is_grouped: np.ndarray
    is_one_dim: np.ndarray

    @classmethod
    def of(cls, kinds: Sequence[NodeClass]) -> Kinds:
        sizes = np.array([len(k.cut) for k in kinds])
        views = [k.view for k in kinds]
        looks = [(p.is_heavy, Role.BATCH in p.cut, p.is_param) for p in views]
        # For every result its scattered roles, and the roles of its dims.
        rows = [list(zip(k.scattered, k.view.results, strict=False)) for k in kinds]
        most = max(map(len, rows))
        for k, row in zip(kinds, rows, strict=True):
            row += [(np.full(k.cut.shape, Role.NONE), ())] * (most - len(row))
        each = list(zip(*rows, strict=True))
        return cls(
            np.cumsum(sizes) - sizes,
            np.concatenate([k.cut for k in kinds]),
            tuple(np.concatenate([dims for dims, _ in column]) for column in each),
            np.repeat(np.array(looks, dtype=np.int64), sizes, axis=0),
            tuple(
                np.repeat([Role.BATCH in roles for _, roles in column], sizes)
                for column in each
            ),
            np.repeat([p.is_data for p in views], sizes),
            np.repeat([p.is_param for p in views], sizes),
            np.repeat([p.is_state for p in views], sizes),
            np.repeat([p.is_stored for p in views], sizes),
            np.repeat([p.is_grouped for p in views], sizes),
            np.concatenate([k.is_one_dim for k in kinds]),
        )

    def permitted(self, recipe: Recipe) -> np.ndarray:
        """Return [strategies], those that a recipe permits; a class's first if none."""
        axes = np.arange(self.cut.shape[1])
        looks = [x[:, None] for x in self.looks.T]
        cuts, scatters = _tables(recipe, len(axes))
        found = cuts[*looks, axes, self.cut].all(axis=1)
        for is_batched, scattered in zip(self.is_batched, self.scattered, strict=True):
            found &= scatters[is_batched[:, None].astype(int), axes, scattered].all(
                axis=1
            )
        # Data is sharded over all data axes, where possible.
        is_cut = found & (self.cut[:, list(recipe.data)] != Role.NONE).all(axis=1)
        must_be_cut = self.is_data | (self.is_stored & recipe.shards_params)
        if recipe.is_plain:
            # So are values with a batch, and parameters and state, in one dim.
            is_cut &= self.is_one_dim
            must_be_cut |= self.looks[:, 1] == 1
            must_be_cut |= self.is_param & recipe.shards_params
            must_be_cut |= self.is_state & recipe.shards_state
        found = np.where(must_be_cut & self._any(is_cut), is_cut, found)
        if recipe.experts:
            of_experts = self.cut[:, list(recipe.experts)] == Role.EXPERT
            is_cut = found & of_experts.all(axis=1)
            found = np.where(self.is_grouped & self._any(is_cut), is_cut, found)
        found[self.first] |= ~self._any(found)[self.first]
        return found

    def _any(self, found: np.ndarray) -> np.ndarray:
        """Return [strategies], whether any of the class is among those found."""
        sizes = np.diff(self.first, append=len(found))
        return np.repeat(np.logical_or.reduceat(found, self.first), sizes)


def _tables(recipe: Recipe, num_axes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return whether an axis may shard a dim, directly or by reduce-scatter.

    Returns:
      [*looks, axes, `Role`] and [is batched, axes, `Role`].
    """

    def table(may: Callable[[int, Role], bool]) -> list[list[bool]]:
        return [[r is Role.NONE or may(a, r) for r in Role] for a in range(num_axes)]

    either = (False, True)
    looks = itertools.product(either, either, either)
    cuts = np.array([table(partial(_may_cut, recipe, some)) for some in looks])
    scatters = np.array([table(partial(_may_scatter, recipe, b)) for b in either])
    shape = num_axes, len(Role)
    return cuts.reshape(2, 2, 2, *shape), scatters.reshape(2, *shape)


def _may_cut(
    recipe: Recipe, looks: tuple[bool, bool, bool], axis: int, role: Role
) -> bool:
    is_heavy, is_batched, is_param = looks
    if role is Role.EXPERT and axis in (recipe.experts or recipe.model):
        return True
    if axis in recipe.model:
        if role is Role.INNER:
            return True
        return recipe.shards_sequence and role is Role.SEQUENCE and not is_heavy
    if role is Role.BATCH:
        return True
    if is_batched:
        return False
    return recipe.shards_params if is_param else recipe.shards_state


def _may_scatter(recipe: Recipe, is_batched: bool, axis: int, role: Role) -> bool:
    if axis in recipe.model:
        return recipe.shards_sequence and role is Role.SEQUENCE
    return recipe.shards_state and not is_batched
