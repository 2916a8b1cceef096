"""Dim classes: sets of dims, across the program, that are the same index range.

Two dims belong to one class when some op gives them the same factor, or when they are
the same dim of a value at both ends of an edge. In a transformer the residual width,
the heads, the hidden width, the vocabulary, batch and sequence come out as classes. The
experts' recipes are stated in these terms; the search itself needs none.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from rhino_jax.analysis.graph import Graph, Node, NodeKind
from rhino_jax.ir.factor import Layout
from rhino_jax.ir.traits import OpKind
from rhino_jax.utils.union_find import groups, number, number_rows, united


Element = int
"""A factor of an op or a dim of a border node's inner value, numbered over the
graph."""


@dataclass(slots=True)
class DimClasses:
    """The dim class of every factor and dim of a graph.

    Attributes:
      graph: the graph.
      first: [nodes], first element of each node; its others follow.
      names: [elements], dim class of each, named by the first element of the class.
    """

    graph: Graph
    first: list[Element]
    names: list[Element]

    def factors(self, node: Node) -> list[Element]:
        """Return the class of every factor of an op."""
        assert node.op is not None and node.op.rule is not None
        begin = self.first[node.id]
        return self.names[begin : begin + len(node.op.rule.factors)]

    def results(self, node: Node, index: int) -> list[Element | None]:
        """Return the class of every dim of a result; for a merged dim, that of its
        major factor."""
        return self._resolve(node, _result_layout(self.graph, node, index))

    def operands(self, node: Node, index: int) -> list[Element | None]:
        """Return the class of every dim of an operand."""
        return self._resolve(node, _operand_layout(self.graph, node, index))

    def _resolve(self, node: Node, layout: Layout) -> list[Element | None]:
        begin = self.first[node.id]
        return [self.names[begin + dim[0]] if dim else None for dim in layout]

    def have(self, which: frozenset[Element]) -> list[bool]:
        """Return [nodes], whether any factor or dim of each belongs to one of these
        classes."""
        is_of = np.concatenate([[0], np.cumsum(np.isin(self.names, list(which)))])
        return (np.diff(is_of[self.first]) > 0).tolist()


def find_dim_classes(graph: Graph) -> DimClasses:
    """Unite the dims of a graph into dim classes."""
    counts = [_num_elements(graph, node) for node in graph.nodes]
    first = np.concatenate([[0], np.cumsum(np.array(counts, dtype=np.int64))])
    makers = graph.columns.maker[graph.columns.source]
    made, read = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for edges in _laid_out_alike(graph):
        edge = graph.edges[edges[0]]
        dims = zip(
            _result_layout(graph, graph.nodes[edge.source.node], edge.source.result),
            _operand_layout(graph, graph.nodes[edge.target], edge.operand),
            strict=True,
        )
        for a, b in dims:
            if a and b:
                made.append(first[makers[edges]] + a[0])
                read.append(first[graph.columns.target[edges]] + b[0])
    names = united(int(first[-1]), np.concatenate(made), np.concatenate(read))
    return DimClasses(graph, first.tolist(), names.tolist())


def _laid_out_alike(graph: Graph) -> list[np.ndarray]:
    """Group the edges by the layouts at both ends."""
    values, columns = graph.program.values, graph.columns
    # Many ops share one rule.
    kinds = number(
        id(n.op.rule)
        if n.kind is NodeKind.OP and n.op is not None
        else (n.kind, values[n.value].rank)
        for n in graph.nodes
    )
    alike = number_rows(
        kinds[columns.maker[columns.source]],
        columns.result[columns.source],
        kinds[columns.target],
        columns.operand,
    )
    return groups(alike)


def _num_elements(graph: Graph, node: Node) -> int:
    if node.kind is NodeKind.OP:
        assert node.op is not None and node.op.rule is not None
        return len(node.op.rule.factors)
    return graph.program.values[node.value].rank


def _result_layout(graph: Graph, node: Node, index: int) -> Layout:
    if node.kind is NodeKind.OP:
        assert node.op is not None and node.op.rule is not None
        return node.op.rule.results[index]
    rank = graph.program.values[node.value].rank
    return _border_layout(rank, node.kind is NodeKind.STACK)


def _operand_layout(graph: Graph, node: Node, index: int) -> Layout:
    if node.kind is NodeKind.OP:
        assert node.op is not None and node.op.rule is not None
        return node.op.rule.operands[index]
    rank = graph.program.values[node.value].rank
    if node.kind is NodeKind.STACK:
        return _border_layout(rank - 1, False)
    if node.kind is NodeKind.SLICE:
        return _border_layout(rank + 1, True)
    return _border_layout(rank, False)


@functools.cache
def _border_layout(rank: int, is_stack: bool) -> Layout:
    """Return the layout of a border node's value; a stack's first dim is no element."""
    dims = tuple((d,) for d in range(rank - is_stack))
    return ((), *dims) if is_stack else dims


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of a program's inputs and dim classes, in the terms of recipes.

    Attributes:
      batch: classes of the leading dims of the data, and of the leading dims of its
        slices (micro-batches, time steps).
      sequence: classes of the second dims of the data, except widths.
      data: input slots that hold data.
      params: input slots that the computation on the batch reads.
      state: input slots that only the update reads and that are fed back (optimizer
        state).
    """

    batch: frozenset[Element]
    sequence: frozenset[Element]
    data: frozenset[int]
    params: frozenset[int]
    state: frozenset[int]


def find_roles(graph: Graph, dim_classes: DimClasses) -> Roles:
    """Classify inputs as data, parameters or optimizer state by how they are used."""
    program = graph.program
    fed_back = {o.state_of for o in program.outputs if o.state_of is not None}
    slots = [i for i, e in enumerate(program.inputs) if not e.is_const]
    if fed_back:
        data = {*slots} - fed_back
    else:
        roots = [program.inputs[i].argument for i in slots]
        is_split = len(set(roots)) > 1
        data = {i for i, root in zip(slots, roots, strict=True) if root == roots[-1]}
        data = data if is_split else set()
    data -= _frozen(graph, dim_classes, data)
    batch, second = _leading(graph, dim_classes, data)
    params, state = _split_state(graph, dim_classes, batch, data)
    widths = _contracted_with_weights(graph, dim_classes, batch)
    return Roles(
        batch,
        frozenset(second - batch - widths),
        frozenset(data),
        frozenset(params),
        frozenset(state),
    )


def _frozen(graph: Graph, dim_classes: DimClasses, data: set[int]) -> set[int]:
    """Return the slots of arguments that are not fed back and yet are weights: of a
    teacher, of a reference model, under adapters, of a model that decodes.

    Weights have leading dims that products of the forward pass contract with operands
    that lead with another dim, or that the data's indices look up. An argument most of
    whose arrays do is one of weights, unless no data remain.
    """
    own, leads = _derived(graph, dim_classes, data)
    every = set().union(*leads.values())
    summed: set[Element | None] = set()
    looked_up: set[int] = set()
    for node in graph.nodes:
        op = node.op
        if node.kind is not NodeKind.OP or op is None or op.source.is_backward:
            continue
        if op.traits.kind is OpKind.LOOKUP:
            table, index = (own.get(_source(graph, node, o)) for o in (0, 1))
            index_dims = {*dim_classes.operands(node, 1)}
            if table is not None and index_dims & (every - leads[table]):
                looked_up |= {table} - {index}
        if not node.is_matmul or len(op.operands) != 2:
            continue
        assert op.rule is not None
        names = dim_classes.factors(node)
        made = {f for dim in op.rule.results[0] for f in dim}
        for o in (0, 1):
            if own.get(_source(graph, node, o)) is not None:
                held = {f for dim in op.rule.operands[o] for f in dim}
                lead = dim_classes.operands(node, 1 - o)[:1]
                summed |= {names[f] for f in held - made} - {*lead}
    arguments: dict[str, list[int]] = {}
    for slot in leads:
        arguments.setdefault(graph.program.inputs[slot].argument, []).append(slot)
    weights = looked_up | {slot for slot in leads if leads[slot] & summed}
    frozen = {
        slot
        for slots in arguments.values()
        for slot in slots
        if 2 * len(weights.intersection(slots)) > len(slots)
    }
    return frozen if leads.keys() - frozen else set()


def _derived(
    graph: Graph, dim_classes: DimClasses, data: set[int]
) -> tuple[dict[int, int], dict[int, set[Element]]]:
    """Return, by node id, the slot of the only array of data that a node other than a
    product derives from; and by slot the leading classes of the array and its slices.
    """
    own: dict[int, int] = {}
    leads: dict[int, set[Element]] = {}
    several = {node.id for node in graph.nodes if node.kind is NodeKind.CARRY}
    for node in graph.nodes:
        if node.kind is NodeKind.INPUT:
            slots = {node.slot} & data
            is_one = bool(slots)
        else:
            sources = {e.source.node for e in graph.incoming[node.id]}
            slots = {own[s] for s in sources if s in own}
            is_one = len(slots) == 1 and not sources & several and not node.is_matmul
        if not is_one or node.id in several:
            several.add(node.id)
            continue
        (own[node.id],) = slots
        if node.kind in (NodeKind.INPUT, NodeKind.SLICE):
            dims = dim_classes.results(node, 0)[:1]
            leads.setdefault(own[node.id], set()).update(
                d for d in dims if d is not None
            )
    return own, {slot: dims for slot, dims in leads.items() if dims}


def _source(graph: Graph, node: Node, operand: int) -> int:
    """Return the id of the node that makes an operand; -1 for constants."""
    found = (e for e in graph.incoming[node.id] if e.operand == operand)
    return next((e.source.node for e in found), -1)


def _leading(
    graph: Graph, dim_classes: DimClasses, data: set[int]
) -> tuple[frozenset[Element], set[Element]]:
    """Return the classes of the first and of the second dims of data and of its
    slices."""
    first: set[Element] = set()
    second: set[Element] = set()
    for node in graph.nodes:
        if node.kind is NodeKind.INPUT:
            is_data = node.slot in data
        elif node.kind is NodeKind.SLICE:
            (edge,) = graph.incoming[node.id]
            source = edge.source
            stack = dim_classes.results(graph.nodes[source.node], source.result)
            is_data = stack[0] in first
        else:
            is_data = _takes_some(node) and dim_classes.operands(node, 0)[0] in first
        dims = dim_classes.results(node, 0) if is_data else []
        if node.kind is NodeKind.OP:
            dims = [d for d in dims if d is not None]
        first.update(d for d in dims[:1] if d is not None)
        second.update(d for d in dims[1:2] if d is not None)
    return frozenset(first), second


def _takes_some(node: Node) -> bool:
    """Whether an op slices the first dim of its operand, or looks up some of it, as
    minibatches of a shuffled batch."""
    op = node.op
    if node.kind is not NodeKind.OP or op is None or op.rule is None:
        return False
    if op.traits.kind not in (OpKind.MOVEMENT, OpKind.LOOKUP):
        return False
    if not op.rule.operands[0] or not op.rule.results[0]:
        return False
    (dim, *_), (made, *_) = op.rule.operands[0], op.rule.results
    return bool(dim) and not set(dim) & {f for d in made for f in d}


def _contracted_with_weights(
    graph: Graph, dim_classes: DimClasses, batch: frozenset[Element]
) -> set[Element]:
    """Return the dim classes that some matmul contracts with an operand that has no
    batch dim."""
    found: set[Element] = set()
    for node in graph.nodes:
        op = node.op
        if not node.is_matmul or op is None or not op.flops:
            continue
        made = set(dim_classes.results(node, 0))
        if not made & batch:
            continue
        for o in range(len(op.operands)):
            dims = {d for d in dim_classes.operands(node, o) if d is not None}
            if not dims & batch:
                found |= dims - made
    return found


def _split_state(
    graph: Graph, dim_classes: DimClasses, batch: frozenset[Element], data: set[int]
) -> tuple[set[int], set[int]]:
    """Return the input slots that reach compute on the batch, and those that only the
    update reads."""
    touches, nodes = dim_classes.have(batch), graph.nodes
    reaches, queue = set[int](), [node.id for node in nodes if touches[node.id]]
    while queue:
        at = nodes[queue.pop()]
        for edge in graph.incoming[at.id]:
            source = edge.source.node
            # So does one from the end of a loop's body, where steps are a scan.
            if at.kind is NodeKind.CARRY and edge.time > at.time:
                continue
            if source not in reaches:
                reaches.add(source)
                # An edge into an input node feeds state back: its source does not read
                # that input.
                if nodes[source].kind is not NodeKind.INPUT and not touches[source]:
                    queue.append(source)
    inputs = (n for n in nodes if n.kind is NodeKind.INPUT and n.slot not in data)
    own = {node.slot: node.id for node in inputs}
    params = {slot for slot, node in own.items() if node in reaches}
    return params, own.keys() - params


def dims_off_lanes(graph: Graph, dim_classes: DimClasses) -> dict[int, tuple[int, ...]]:
    """Return, by value id, the dims that a compiler never lays out on the lanes (the
    minor dim) of a tile; values without any are left out.

    Of the dims that a reshape splits one dim into, only the last may be: with another
    there, the reshape would be a transpose. GroupNorm's f32[8,16,16,32,8] of 256
    channels is stored with 16 columns of the image on its lanes, not its 32 groups
    (U-Net on v5e:4x4, libtpu 0.0.52). Where nothing reshards it, the compiler may never
    materialise it at all.

    Args:
      graph: the program.
      dim_classes: the dim classes of its graph.
    """
    parts: set[tuple[Element, int]] = set()
    # Many ops share one rule.
    major: dict[int, list[int]] = {}
    for node in graph.nodes:
        if node.kind is not NodeKind.OP:
            continue
        assert node.op is not None and node.op.rule is not None
        rule = node.op.rule
        factors = major.get(id(rule))
        if factors is None:
            layouts = (*rule.operands, *rule.results)
            factors = [f for layout in layouts for dim in layout for f in dim[:-1]]
            major[id(rule)] = factors
        if factors:
            names = dim_classes.factors(node)
            parts |= {(names[f], rule.factors[f].size) for f in factors}
    if not parts:
        return {}
    found: dict[int, tuple[int, ...]] = {}
    for value, port in graph.held.items():
        dims = dim_classes.results(graph.nodes[port.node], port.result)
        shape = graph.program.values[value].shape
        # A merged dim has the class of its major factor: sizes tell the two apart.
        off = tuple(
            d
            for d, (element, size) in enumerate(zip(dims, shape, strict=True))
            if (element, size) in parts
        )
        if off:
            found[value] = off
    return found
