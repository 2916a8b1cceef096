"""Experts' recipes on one model: the options of its nodes that they allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rhino_jax.analysis.dim_classes import DimClasses, Element
from rhino_jax.analysis.graph import Node, NodeKind
from rhino_jax.analysis.roles import Roles
from rhino_jax.ir.factor import Layout, Rule
from rhino_jax.ir.traits import OpKind
from rhino_jax.model.build import MeshModel
from rhino_jax.model.strategies import Strategy
from rhino_jax.recipes.recipes import (
    AxisPlaces,
    Kinds,
    NodeClass,
    NodeView,
    Recipe,
    Role,
)
from rhino_jax.solver.problem import Labels
from rhino_jax.solver.restricted import Restrictions


@dataclass(slots=True)
class RecipeBook:
    """Converter of recipes to restrictions of one model's options.

    Attributes:
      model: the search model.
      dim_classes, roles: classes of its dims, and roles of its dims and inputs.
      inner: dim classes that model axes shard, found by walking the matmuls.
      experts: dim classes of the experts of mixtures.
      views: [nodes], the properties of a node that recipes depend on; equal views are
        one object.
    """

    model: MeshModel
    dim_classes: DimClasses
    roles: Roles
    inner: frozenset[Element]
    experts: frozenset[Element]
    views: list[NodeView]
    _axes: dict[tuple[int, bool], AxisPlaces] = field(default_factory=dict)
    _kinds: dict[tuple[int, int], NodeClass] = field(default_factory=dict)
    _num_cut: dict[int, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, model: MeshModel) -> RecipeBook:
        dim_classes, roles = model.analysis.dim_classes, model.analysis.roles
        experts = _expert_dim_classes(model, dim_classes, roles)
        inner = _inner_dim_classes(model, dim_classes, roles, experts)
        role_of = {
            **dict.fromkeys(roles.sequence, Role.SEQUENCE),
            **dict.fromkeys(inner, Role.INNER),
            **dict.fromkeys(experts, Role.EXPERT),
            **dict.fromkeys(roles.batch, Role.BATCH),
        }
        of_class = np.full(len(dim_classes.names), Role.OTHER, dtype=np.uint8)
        of_class[list(role_of)] = list(role_of.values())
        every = of_class[dim_classes.names].tobytes()
        stored = _stored(model, roles)
        views = _Views(dim_classes, roles, every, stored)
        nodes = [*map(views.of, model.graph.nodes)]
        return cls(model, dim_classes, roles, inner, experts, nodes)

    def allows(self, recipe: Recipe) -> bool:
        """Whether the recipe is applicable to this model."""
        if not self.roles.batch or (recipe.experts and not self.experts):
            return False
        if recipe.model and not self.inner | self.experts:
            return False
        if recipe.shards_sequence and not self.roles.sequence:
            return False
        return bool(not recipe.shards_state or self.roles.params or self.roles.state)

    def restrict(
        self, recipes: Sequence[Recipe], nodes: Sequence[Node]
    ) -> Restrictions:
        """Return the nodes' options that applicable recipes allow."""
        numbers: dict[NodeClass, int] = {}
        kinds = [numbers.setdefault(self._kind(n), len(numbers)) for n in nodes]
        every = Kinds.of(list(numbers))
        permitted = np.array([every.permitted(recipe) for recipe in recipes])
        return Restrictions.of(permitted, every.first, np.array(kinds))

    def most_cut(self, nodes: Sequence[Node], left: Restrictions) -> Labels:
        """Return the allowed options with the most mesh axes in their results.

        Of several the one of lowest cost is chosen.

        Args:
          nodes: the nodes.
          left: the allowed options.

        Returns:
          [restrictions, nodes], positions among the allowed options.
        """
        # Equal nodes share one object of options, and one array of allowed ones.
        found: dict[tuple[int, int], np.ndarray] = {}
        chosen = []
        for node, places in zip(nodes, left.options, strict=True):
            options = self.model.options[node.id]
            key = id(options), id(places)
            if key not in found:
                num_cut = self._axes_of_results(options.strategies)
                order = np.lexsort((options.cost_s, -num_cut))
                found[key] = np.argsort(order)[places].argmin(axis=1)
            chosen.append(found[key])
        return np.array(chosen, dtype=np.int64).T

    def _axes_of_results(self, strategies: tuple[Strategy, ...]) -> np.ndarray:
        """Return the number of axes that shard the results under each strategy."""
        found = self._num_cut.get(id(strategies))
        if found is None:
            every = [sum(map(len, sum(s.results, ()))) for s in strategies]
            found = self._num_cut[id(strategies)] = np.array(every)
        return found

    def _kind(self, node: Node) -> NodeClass:
        # Ops that differ only in cost share their strategies.
        strategies = self.model.options[node.id].strategies
        view = self.views[node.id]
        key = id(strategies), id(view)
        kind = self._kinds.get(key)
        if kind is None:
            axes = self._axes.get((key[0], view.is_op))
            if axes is None:
                num_axes = len(self.model.mesh.axes)
                axes = AxisPlaces.of(strategies, num_axes, is_op=view.is_op)
                self._axes[key[0], view.is_op] = axes
            kind = self._kinds[key] = NodeClass.of(view, axes, self.model.mesh.long)
        return kind


@dataclass(frozen=True, slots=True, eq=False)
class _Views:
    """Factory of node views, with sharing of equal ones.

    Attributes:
      dim_classes, roles: see `RecipeBook`.
      role: the `Role` of every element of the dim classes.
      stored: ids of border nodes through which loops read parameters.
    """

    dim_classes: DimClasses
    roles: Roles
    role: bytes
    stored: frozenset[int]
    _shared: dict[object, NodeView] = field(default_factory=dict)
    _of_ops: dict[tuple[bytes, int, bool], NodeView] = field(default_factory=dict)

    def of(self, node: Node) -> NodeView:
        """Return the view of a node; equal views are one object."""
        if node.kind is not NodeKind.OP:
            return self._of_border(node)
        op = node.op
        assert op is not None and op.rule is not None
        begin = self.dim_classes.first[node.id]
        codes = self.role[begin : begin + len(op.rule.factors)]
        is_reduction = op.traits.kind is OpKind.REDUCTION
        is_light = node.is_fusible or op.flops == 0 or is_reduction
        # Equal rules are one object.
        key = codes, id(op.rule), is_light
        view = self._of_ops.get(key)
        if view is None:
            cut = tuple(map(Role, codes))
            results = tuple(
                tuple(cut[dim[0]] if dim else Role.OTHER for dim in layout)
                for layout in op.rule.results
            )
            is_grouped = node.is_matmul and any(
                cut[f] is Role.EXPERT for f in _batch_factors(op.rule)
            )
            view = self._share(
                NodeView(
                    cut,
                    results,
                    is_op=True,
                    is_heavy=not is_light,
                    is_data=False,
                    is_param=False,
                    is_grouped=is_grouped,
                )
            )
            self._of_ops[key] = view
        return view

    def _of_border(self, node: Node) -> NodeView:
        dims = self.dim_classes.results(node, 0)
        cut = tuple(Role.OTHER if d is None else Role(self.role[d]) for d in dims)
        is_input = node.kind is NodeKind.INPUT
        is_data = is_input and node.slot in self.roles.data
        is_state = is_input and node.slot in self.roles.state
        is_param = is_input and not is_state
        is_stored = node.id in self.stored
        return self._share(
            NodeView(cut, (cut,), False, False, is_data, is_param, is_state, is_stored)
        )

    def _share(self, view: NodeView) -> NodeView:
        return self._shared.setdefault(view, view)


def _stored(model: MeshModel, roles: Roles) -> frozenset[int]:
    """Return the border nodes through which loops read parameters.

    These are constants, slices of stacked layers, and carries.
    """
    graph = model.graph
    own = {
        n.id
        for n in graph.nodes
        if n.kind is NodeKind.INPUT and n.slot in roles.params - roles.data
    }
    found: set[int] = set()
    for edge in sorted(graph.edges, key=lambda e: e.target):
        node = graph.nodes[edge.target]
        if edge.source.node not in own or node.kind is NodeKind.INPUT:
            continue
        op = node.op
        if node.kind in (NodeKind.CONST, NodeKind.SLICE, NodeKind.CARRY):
            found.add(node.id)
        elif node.kind is not NodeKind.OP or op is None:
            continue
        elif not (op.is_fusible and op.traits.keeps_data) or len(op.operands) > 1:
            continue
        own.add(node.id)
    return frozenset(found)


def _expert_dim_classes(
    model: MeshModel, dim_classes: DimClasses, roles: Roles
) -> frozenset[Element]:
    """Return the dim classes of experts: each has a matrix for its tokens, and results
    of all are added up, or their scores.

    The first are batch dims of products of data with weights: of dispatched tokens, or
    of groups in parts. Heads may be, too, but only weights contract these.
    """
    graph, is_active = model.graph, set[int]()
    grouped, added = set[Element](), set[Element]()
    for node in graph.run_order:
        active = {
            e.operand for e in graph.incoming[node.id] if e.source.node in is_active
        }
        if active or (node.kind is NodeKind.INPUT and node.slot in roles.data):
            is_active.add(node.id)
        op = node.op
        if node.kind is not NodeKind.OP or op is None or op.rule is None:
            continue
        names = dim_classes.factors(node)
        if node.is_matmul and len({0, 1} & active) == 1:
            grouped |= {names[f] for f in _batch_factors(op.rule)}
        elif active and (node.is_matmul or op.traits.kind is OpKind.REDUCTION):
            every, made = _factors(op.rule.operands), _factors(op.rule.results)
            added |= {names[f] for f in every - made}
    return frozenset(grouped & added) - roles.batch


def _batch_factors(rule: Rule) -> set[int]:
    """Return the factors that both operands of a product and its result have."""
    if len(rule.operands) < 2:
        return set()
    first, second, made = map(
        _factors, (*([x] for x in rule.operands[:2]), rule.results)
    )
    return first & second & made


def _factors(layouts: Sequence[Layout]) -> set[int]:
    return {f for layout in layouts for dim in layout for f in dim}


def _inner_dim_classes(
    model: MeshModel,
    dim_classes: DimClasses,
    roles: Roles,
    experts: frozenset[Element],
) -> frozenset[Element]:
    """Return the dim classes that model axes shard, by walking the matmuls.

    A weight whose contracted class is already sharded is sharded by rows. Otherwise its
    largest free class that no other claims is sharded by columns, and its contracted
    class is not. Experts are left out.
    """
    graph, sizes = model.graph, [n for n in model.mesh.sizes if n > 1]
    smallest = sizes[-1] if sizes else 1
    inner: set[Element] = set()
    whole: set[Element] = set()
    for node in graph.nodes:
        op = node.op
        if node.kind is not NodeKind.OP or op is None or op.rule is None:
            continue
        is_lookup = op.traits.kind is OpKind.LOOKUP
        if not node.is_matmul and not is_lookup:
            continue
        for o in range(len(op.rule.operands)):
            dims = dim_classes.operands(node, o)
            if not dims or any(d is None or d in roles.batch for d in dims):
                continue
            if is_lookup and o > 0:
                continue
            made = set(dim_classes.results(node, 0))
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
                and d not in roles.sequence | experts
                and shape[i] % smallest == 0
            ]
            if any(d in inner for _, _, d in claimed) or not claimed:
                continue
            # Heads precede head width: the first that divides, unless it is tiny.
            inner.add(min(claimed, key=lambda c: -c[1])[2])
    return frozenset(inner)
