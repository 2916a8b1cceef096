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
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rhino_jax.hardware.mesh import LaidMesh
from rhino_jax.search.axis_places import NOWHERE, AxisPlaces
from rhino_jax.search.build import Model
from rhino_jax.search.classes import Classes, Element, Roles, find_roles
from rhino_jax.search.graph import Node, NodeKind
from rhino_jax.search.strategies import Strategy


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


class Role(enum.Enum):
    """What an expert calls a class of dims."""

    BATCH = "batch"
    SEQUENCE = "sequence"
    INNER = "inner"
    OTHER = "other"


@dataclass(slots=True)
class RecipeBook:
    """Turns recipes into restrictions of one model's options.

    Attributes:
      model: the search model.
      classes, roles: what its dims and inputs are.
      inner: classes that model axes cut, found by walking the matmuls.
    """

    model: Model
    classes: Classes
    roles: Roles
    inner: frozenset[Element]
    _cache: dict[object, np.ndarray] = field(default_factory=dict)
    _places: dict[int, Place] = field(default_factory=dict)
    _roles: dict[Element, Role] = field(default_factory=dict)
    _num_cut: dict[int, np.ndarray] = field(default_factory=dict)
    _axes: dict[int, AxisPlaces] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Model) -> RecipeBook:
        classes = model.classes
        roles = find_roles(model.graph, classes)
        return cls(model, classes, roles, _inner_classes(model, classes, roles))

    def restrict(
        self, recipe: Recipe, nodes: Sequence[Node]
    ) -> list[np.ndarray] | None:
        """Allowed options of these nodes, or None where the recipe has no meaning."""
        if not self.roles.batch or (recipe.model and not self.inner):
            return None
        if recipe.cuts_sequence and not self.roles.sequence:
            return None
        if recipe.cuts_state and not (self.roles.params or self.roles.state):
            return None
        return [self._allowed(recipe, node) for node in nodes]

    def most_cut(self, node: Node, allowed: np.ndarray) -> int:
        """The place of the allowed option whose results are cut by most mesh axes, and
        that then costs least."""
        options = self.model.options[node.id]
        axes = self._num_cut.get(id(options.strategies))
        if axes is None:
            every = [sum(map(len, sum(s.results, ()))) for s in options.strategies]
            axes = self._num_cut[id(options.strategies)] = np.array(every)
        return int(np.lexsort((options.cost_s[allowed], -axes[allowed]))[0])

    def _allowed(self, recipe: Recipe, node: Node) -> np.ndarray:
        options = self.model.options[node.id]
        place = self.place(node)
        # Ops that differ in cost only share their strategies.
        key = (recipe, id(options.strategies), place)
        found = self._cache.get(key)
        if found is None:
            axes = self._axis_places(options.strategies, is_op=place.is_op)
            permitted = _permits(recipe, place, axes)
            if place.is_data:
                # Data enters cut over all data axes, where it can be.
                data = axes.cut[:, list(recipe.data)]
                cut = permitted & (data != NOWHERE).all(1)
                permitted = cut if cut.any() else permitted
            keep = np.flatnonzero(permitted)
            found = self._cache[key] = keep if len(keep) else np.zeros(1, np.int64)
        return found

    def _axis_places(
        self, strategies: tuple[Strategy, ...], *, is_op: bool
    ) -> AxisPlaces:
        found = self._axes.get(id(strategies))
        if found is None:
            found = AxisPlaces.of(strategies, len(self.model.mesh.sizes), is_op=is_op)
            self._axes[id(strategies)] = found
        return found

    def _role(self, where: Element | None) -> Role:
        if where is None:
            return Role.OTHER
        found = self._roles.get(where)
        if found is None:
            if where in self.roles.batch:
                found = Role.BATCH
            elif where in self.inner:
                found = Role.INNER
            else:
                found = Role.SEQUENCE if where in self.roles.sequence else Role.OTHER
            self._roles[where] = found
        return found

    def place(self, node: Node) -> Place:
        """What recipes look at in a node."""
        place = self._places.get(node.id)
        if place is None:
            place = self._places[node.id] = self._place(node)
        return place

    def _place(self, node: Node) -> Place:
        op = node.op if node.kind is NodeKind.OP else None
        if op is None:
            cut = tuple(self._role(e) for e in self.classes.results(node, 0))
            results: tuple[tuple[Role, ...], ...] = (cut,)
        else:
            assert op.rule is not None
            cut = tuple(
                self._role(self.classes.find((node.id, f)))
                for f in range(len(op.rule.factors))
            )
            results = tuple(
                tuple(cut[dim[0]] if dim else Role.OTHER for dim in layout)
                for layout in op.rule.results
            )
        is_input = node.kind is NodeKind.INPUT
        return Place(
            cut=cut,
            results=results,
            is_op=op is not None,
            is_heavy=op is not None
            and not (op.is_fusible or op.flops == 0 or op.name.startswith("reduce_")),
            is_data=is_input and node.slot in self.roles.data,
            is_param=is_input and node.slot not in self.roles.state,
        )


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


def _permits(recipe: Recipe, place: Place, axes: AxisPlaces) -> np.ndarray:
    """For every strategy of a node, whether a recipe allows it."""
    roles = place.cut if place.is_op else place.results[0]
    cuts = [[_may_cut(recipe, a, role, place) for role in roles] for a in axes.all]
    allowed = _all_of(cuts, axes.cut)
    for of_result, scattered in zip(place.results, axes.scattered, strict=False):
        is_batched = Role.BATCH in of_result
        dims = [
            [_may_scatter(recipe, a, role, is_batched=is_batched) for role in of_result]
            for a in axes.all
        ]
        allowed &= _all_of(dims, scattered)
    return allowed


def _all_of(may: list[list[bool]], places: np.ndarray) -> np.ndarray:
    """Whether every axis may be where it is; nowhere it always may."""
    found = np.ones(len(places), dtype=bool)
    for axis, row in enumerate(may):
        found &= np.array([*row, True])[places[:, axis]]
    return found


def _may_cut(recipe: Recipe, axis: int, role: Role, place: Place) -> bool:
    if axis in recipe.model:
        if role is Role.INNER:
            return True
        return recipe.cuts_sequence and role is Role.SEQUENCE and not place.is_heavy
    if role is Role.BATCH:
        return True
    if Role.BATCH in place.cut:
        return False
    return recipe.cuts_params if place.is_param else recipe.cuts_state


def _may_scatter(recipe: Recipe, axis: int, role: Role, *, is_batched: bool) -> bool:
    if axis in recipe.model:
        return recipe.cuts_sequence and role is Role.SEQUENCE
    return recipe.cuts_state and not is_batched


def _inner_classes(model: Model, classes: Classes, roles: Roles) -> frozenset[Element]:
    """Walk the matmuls in order: a weight whose contracted class is already cut is
    cut by rows; otherwise its largest free class that nothing claims is cut by
    columns, and what it contracts stays whole."""
    graph, sizes = model.graph, model.mesh.sizes
    smallest = sizes[-1] if sizes else 1
    inner: set[Element] = set()
    whole: set[Element] = set()
    for node in graph.nodes:
        op = node.op
        if node.kind is not NodeKind.OP or op is None or op.rule is None:
            continue
        is_lookup = op.name == "gather"
        if op.name not in ("dot_general", "conv_general_dilated") and not is_lookup:
            continue
        for o in range(len(op.rule.operands)):
            dims = classes.operands(node, o)
            if not dims or any(d is None or d in roles.batch for d in dims):
                continue
            if is_lookup and o > 0:
                continue
            made = set(classes.results(node, 0))
            contracted = {d for d in dims if d is not None and d not in made}
            free = [d for d in dims if d is not None and d in made]
            if is_lookup:
                whole |= {d for d in free if d not in inner}
                continue
            if contracted & inner:
                whole |= {d for d in free if d not in inner}
                continue
            whole |= contracted - inner
            shape = graph.program.values[op.operands[o]].shape
            claimed = [
                (shape[i], -i, d)
                for i, d in enumerate(dims)
                if d in free
                and d is not None
                and d not in whole
                and d not in roles.sequence
                and shape[i] % smallest == 0
            ]
            if any(d in inner for _, _, d in claimed) or not claimed:
                continue
            # Heads before head width: the first that divides, unless it is tiny.
            inner.add(min(claimed, key=lambda c: -c[1])[2])
    return frozenset(inner)
