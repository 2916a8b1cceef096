"""Options close to known plans, for meshes with too many axes to enumerate all options.

The number of an op's strategies is exponential in the number of mesh axes, and that of
pairs of them grows with its square. On a mesh of many axes, adjacent axes are merged so
that two are left; a plan for such a mesh gives, for every node, the position of each
axis of the whole mesh, and is a seed. Of a node's options, those are searched that
differ from a seed in the position of at most one mesh axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from rhino_jax.analysis.graph import Graph, Node, NodeKind
from rhino_jax.hardware.mesh import LaidMesh, MeshAxis
from rhino_jax.ir.factor import FactorKind
from rhino_jax.model.build import MeshModel
from rhino_jax.model.options import OptionBuilder, Options, is_pure_communication
from rhino_jax.model.strategies import Places, Strategy, count_assignments
from rhino_jax.solver.problem import Labels


Groups = tuple[tuple[int, ...], ...]
"""Axes of a mesh, grouped into the axes of a coarser mesh."""


def count_cells(graph: Graph, options: Sequence[Options]) -> int:
    """Return the number of entries of all distinct reshard tables between these
    options."""
    cells: dict[tuple[int, int, int], int] = {}
    for edge in graph.edges:
        source = options[edge.source.node].outs[edge.source.result]
        wanted = options[edge.target].ins[edge.operand]
        whole = graph.program.values[edge.value].bytes
        cells[source.key, wanted.key, whole] = len(source.index) * len(wanted.index)
    return sum(cells.values())


def least_cells(builder: OptionBuilder) -> int:
    """Return a lower bound on `count_cells` for all options, without enumerating them.

    For each type of value only the largest table counts, between two ops or arguments
    of which every sharding is an option.
    """
    graph, sizes = builder.graph, builder.mesh.sizes
    if is_pure_communication(builder.target):
        return 0
    counts: dict[tuple[object, ...], int] = {}
    cells: dict[tuple[tuple[int, ...], int], int] = {}

    def count(node: Node) -> int:
        dims = _plain_dims(graph, node)
        if dims is None or node.id in builder.pinned:
            return 0
        if dims not in counts:
            factors, cuttable = dims
            counts[dims] = count_assignments(factors, cuttable, sizes)
        return counts[dims]

    by_node = [count(node) for node in graph.nodes]
    for edge in graph.edges:
        whole = graph.program.values[edge.value]
        size = by_node[edge.source.node] * by_node[edge.target]
        key = whole.shape, whole.bytes
        cells[key] = max(cells.get(key, 0), size)
    return sum(cells.values())


def _plain_dims(
    graph: Graph, node: Node
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the sizes of a node's factors, and the positions of those that can be
    sharded; None where some of their shardings have no spec, or are left out."""
    op = node.op
    if op is None or node.kind is not NodeKind.OP:
        shape = graph.program.values[node.value].shape
        shape = shape[1:] if node.kind is NodeKind.STACK else shape
        return shape, tuple(i for i, n in enumerate(shape) if n > 1)
    rule = op.rule
    if rule is None or op.manual is not None:
        return None
    layouts = (*rule.operands, *rule.results)
    is_plain = all(len(dim) == 1 for layout in layouts for dim in layout)
    if not is_plain or any(f.kind is FactorKind.HALO for f in rule.factors):
        return None
    cuttable = tuple(i for i, f in enumerate(rule.factors) if f.is_cuttable)
    return tuple(f.size for f in rule.factors), cuttable


def groupings(num_axes: int) -> tuple[Groups, ...]:
    """Return the ways to group a mesh's axes into two, first that of the recipes: all
    but the last in one group."""
    every = tuple(range(num_axes))
    return tuple((every[:k], every[k:]) for k in range(num_axes - 1, 0, -1))


def taken_together(mesh: LaidMesh, groups: Groups) -> LaidMesh:
    """Return the mesh in which each group of axes is one axis."""
    joins = {}
    for count in range(2, len(groups) + 1):
        for chosen in combinations(range(len(groups)), count):
            links = mesh.over(a for k in chosen for a in groups[k])
            if len(links) == 1:
                joins[chosen] = links[0]
    return replace(mesh, axes=tuple(_as_one(mesh, g) for g in groups), joins=joins)


def _as_one(mesh: LaidMesh, group: tuple[int, ...]) -> MeshAxis:
    """Return the axis of a group; where links are stated per axis, as fast as the
    slowest."""
    links = mesh.over(group)
    if len(links) == 1:
        return links[0]
    axes = [mesh.axes[a] for a in group]
    topologies = {a.topology for a in axes}
    # Closing a ring over several rings takes a path back through all of them.
    is_one = topologies <= {"switch"} or topologies <= {"barrier"}
    return MeshAxis(
        name="+".join(a.name for a in axes),
        size=math.prod(a.size for a in axes),
        alpha_s=max(a.alpha_s for a in axes),
        bytes_per_s=min(a.bytes_per_s for a in axes),
        topology=axes[-1].topology if is_one else "line",
        tier=axes[0].tier,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Seed:
    """A solution for a mesh of fewer axes.

    Attributes:
      model: the model of that mesh, for the same graph.
      labels: [nodes], the chosen option of each.
      groups: for each axis of that mesh, the axes of the whole mesh that it groups.
    """

    model: MeshModel
    labels: Labels
    groups: Groups

    def strategy(self, node: int) -> tuple[Key, Key]:
        """Return the seed's factor assignment and result specs at a node, in the whole
        mesh's axes."""
        mine = self.model.options[node].strategies[self.labels[node]]
        cut = [self._lift(axes) for axes in mine.cut]
        specs = [tuple(self._lift(axes) for axes in spec) for spec in mine.results]
        return _key(cut), _key(dim for spec in specs for dim in spec)

    def _lift(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(a for group in axes for a in self.groups[group])


Key = tuple[tuple[int, ...], ...]


def _key(dims: Iterable[tuple[int, ...]]) -> Key:
    """Return dims without the order of their axes: on meshes of many axes only one
    order exists."""
    return tuple([dim if len(dim) < 2 else tuple(sorted(dim)) for dim in dims])


@dataclass(slots=True, eq=False)
class _Full:
    """All options of a node, indexed by their axis assignment.

    Attributes:
      places: [options, axes], a number for the factor that each axis shards, and the
        dim of the results.
      by_key, by_cut: factor assignment and result specs, or factor assignment alone →
        option.
    """

    places: np.ndarray
    by_key: dict[tuple[Key, Key], int] = field(default_factory=dict)
    by_cut: dict[Key, int] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Options, num_axes: int) -> _Full:
        found = cls(np.array([_places(s, num_axes) for s in options.strategies]))
        for k, s in enumerate(options.strategies):
            cut, results = _key(s.cut), _key([d for spec in s.results for d in spec])
            found.by_key.setdefault((cut, results), k)
            found.by_cut.setdefault(cut, k)
        return found

    def find(self, cut: Key, results: Key) -> int | None:
        """Return the option with this assignment and these results, else one with this
        assignment, else None."""
        exact = self.by_key.get((cut, results))
        return self.by_cut.get(cut) if exact is None else exact


def _places(strategy: Strategy, num_axes: int) -> list[int]:
    found = [0] * num_axes
    for factor, axes in enumerate(strategy.cut, start=1):
        for a in axes:
            found[a] = 100 * factor
    dims = [axes for spec in strategy.results for axes in spec]
    for dim, axes in enumerate(dims, start=1):
        for a in axes:
            found[a] += dim
    return found


def centres_of(
    graph: Graph, axes: Sequence[int], seeds: Sequence[Seed]
) -> list[frozenset[Places]]:
    """Return [nodes], the positions that the seeds give to mesh axes there: the factor
    or dim of each, and for every node also the replicated assignment.

    Args:
      graph: the program.
      axes: the mesh axes of several devices.
      seeds: solutions for meshes of fewer axes.
    """
    nothing: Places = (-1,) * len(axes)

    def places(seed: Seed, node: Node) -> Places:
        cut, results = seed.strategy(node.id)
        if node.kind is not NodeKind.OP:
            rank = graph.program.values[node.value].rank
            cut = results[node.kind is NodeKind.STACK : rank]
        at = {a: i for i, mine in enumerate(cut) for a in mine}
        return tuple(at.get(a, -1) for a in axes)

    return [
        frozenset({nothing, *(places(seed, node) for seed in seeds)})
        for node in graph.nodes
    ]


def neighbourhood(
    builder: OptionBuilder, options: Sequence[Options], seeds: Sequence[Seed]
) -> list[Options]:
    """Return, for every node, the options that move at most one axis of a seed, or of
    the replicated option.

    Args:
      builder: the builder of the options.
      options: [nodes], all options of each.
      seeds: solutions for meshes of fewer axes.
    """
    num_axes = len(builder.mesh.axes)
    full: dict[int, _Full] = {}
    kept: dict[tuple[int, frozenset[int]], Options] = {}
    found: list[Options] = []
    for node, mine in enumerate(options):
        index = full.get(id(mine))
        if index is None:
            index = full[id(mine)] = _Full.of(mine, num_axes)
        places = (index.find(*seed.strategy(node)) for seed in seeds)
        centres = frozenset(k for k in places if k is not None) | {0}
        small = kept.get((id(mine), centres))
        if small is None:
            moved = [(index.places != index.places[k]).sum(axis=1) for k in centres]
            allowed = np.flatnonzero(np.min(moved, axis=0) <= 1)
            small = kept[id(mine), centres] = builder.restricted(mine, allowed)
        found.append(small)
    return found
