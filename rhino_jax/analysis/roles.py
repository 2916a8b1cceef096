"""Roles: which inputs of a program are data, parameters or optimizer state, and which
dims are the batch or the sequence."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rhino_jax.analysis.dim_classes import DimClasses, Element, find_dim_classes
from rhino_jax.analysis.graph import Graph, Node, NodeKind
from rhino_jax.analysis.inline_regions import inline_regions
from rhino_jax.ir.program import Program
from rhino_jax.ir.traits import OpKind


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
    data = find_data(graph, dim_classes)
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


class BatchDim(NamedTuple):
    """The dim of an array that seems to hold the batch.

    Attributes:
      dim: its position.
      dim_class: its dim class.
    """

    dim: int
    dim_class: Element | None


def data_inputs(program: Program) -> dict[int, BatchDim | None]:
    """Return the positions of a program's inputs that are data, and the dim of each
    that seems to hold the batch (see `find_data`)."""
    graph = inline_regions(program)
    return find_data(graph, find_dim_classes(graph))


def find_data(graph: Graph, dim_classes: DimClasses) -> dict[int, BatchDim | None]:
    """Return the input slots of arrays that are data, and the dim of each that seems to
    hold the batch; None where none does.

    Data are arrays that are not fed back; donated ones only where there are no others.
    Where nothing is fed back, they are those of the arguments after the first.
    Arguments of frozen weights are no data. A step whose other inputs are all weights,
    as one that decodes, has its batch in arrays that are fed back.

    The batch is the leading dim. Where other data lead with rows of products, as the
    tokens of a step that decodes, it is the dim of these rows, as of caches of all
    layers in one array; and arrays that lead with columns, as weights of classes, have
    none.
    """
    use = _find_use(graph, dim_classes)
    data = _data_of(graph.program, use)
    have_rows = any(use.rows.intersection(use.dims[i][:1]) for i in data)
    found: dict[int, BatchDim | None] = {}
    for i in sorted(data):
        dims = [BatchDim(*at) for at in enumerate(use.dims[i])]
        rows = [d for d in dims if d.dim_class in use.rows]
        is_column = dims[0].dim_class in use.columns
        found[i] = dims[0]
        if have_rows:
            found[i] = rows[0] if rows else None if is_column else dims[0]
    return found


def _data_of(program: Program, use: _Use) -> Collection[int]:
    """Return the slots of arrays that are data (see `find_data`)."""
    fed_back = {o.state_of for o in program.outputs if o.state_of is not None}
    slots = sorted(use.dims)
    names = [entry.argument for entry in program.inputs]
    if fed_back:
        rest = [i for i in slots if i not in fed_back]
        donated = [i for i in rest if program.inputs[i].is_donated]
        state = [i for i in slots if i in fed_back and use.leads[i] & use.rows]
        groups = [[i for i in rest if i not in donated], donated, state]
    else:
        groups = [[i for i in slots if names[i] != names[slots[0]]], slots]
    left = (set(group) - use.weights(group, names) for group in groups)
    return next((group for group in (*left, groups[0]) if group), ())


@dataclass(frozen=True, slots=True)
class _Use:
    """The use of a program's arrays by products and lookups of the forward pass.

    Products are those of values that derive from different inputs: of activations and
    weights, not of activations with each other.

    Attributes:
      dims: slot of an array → classes of its dims.
      leads: slot of an array → the leading classes of the array and its slices.
      contracted: classes that products contract, but for those that lead both operands.
      rows: classes of the leading dims of products that no product contracts.
      columns: classes of the other dims of products, but for rows.
      looked_up: slots of tables that indices of some input look up.
    """

    dims: dict[int, list[Element | None]] = field(default_factory=dict)
    leads: dict[int, set[Element | None]] = field(default_factory=dict)
    contracted: set[Element | None] = field(default_factory=set)
    rows: set[Element | None] = field(default_factory=set)
    columns: set[Element | None] = field(default_factory=set)
    looked_up: set[int] = field(default_factory=set)

    def weights(self, slots: Sequence[int], names: Sequence[str]) -> set[int]:
        """Return the slots whose arguments are weights: of a teacher, of a reference
        model, under adapters, of a model that decodes.

        Weights have leading dims that products contract, or that indices look up. An
        argument with more such arrays than others is one of weights; those that lead
        with columns of products, as biases do, count for neither.

        Args:
          slots: slots of arrays.
          names: the argument of every slot.
        """
        votes: dict[str, int] = {}
        for i in slots:
            is_weight = i in self.looked_up or self.leads[i] & self.contracted
            is_neither = self.leads[i] <= self.columns
            vote = 1 if is_weight else 0 if is_neither else -1
            votes[names[i]] = votes.get(names[i], 0) + vote
        return {i for i in slots if votes[names[i]] > 0}


def _find_use(graph: Graph, dim_classes: DimClasses) -> _Use:
    """Return how the forward pass uses the arrays of a program."""
    use = _Use()
    # Inputs that each node derives from: a bit per slot, and one for any product.
    sources = [0] * len(graph.nodes)
    product = 1 << len(graph.program.inputs)
    slots: dict[int, int] = {}
    lookups: list[tuple[int | None, set[Element | None]]] = []
    for node in graph.run_order:
        if node.kind is NodeKind.INPUT:
            if graph.program.inputs[node.slot].is_const:
                continue
            sources[node.id] = 1 << node.slot
            slots[1 << node.slot] = node.slot
            use.dims[node.slot] = dim_classes.results(node, 0)
            use.leads[node.slot] = {*use.dims[node.slot][:1]}
            continue
        made = {e.operand: sources[e.source.node] for e in graph.incoming[node.id]}
        for of in made.values():
            sources[node.id] |= of
        first, second = made.get(0, 0), made.get(1, 0)
        op = node.op
        slot = slots.get(sources[node.id])
        if slot is not None and (node.kind is NodeKind.SLICE or _takes_some(node)):
            of_slice = [d for d in dim_classes.results(node, 0) if d is not None]
            use.leads[slot].update(of_slice[:1])
        if node.kind is not NodeKind.OP or op is None:
            continue
        if op.traits.kind is OpKind.LOOKUP and first != second:
            lookups.append((slots.get(first), {*dim_classes.operands(node, 1)}))
        if node.is_matmul:
            sources[node.id] |= product
            is_forward = not op.source.is_backward and len(op.operands) == 2
            if is_forward and not first & second & ~product:
                _add_product(use, node, dim_classes)
    use.rows.difference_update(use.contracted)
    use.columns.difference_update(use.rows)
    for slot, dims in lookups:
        others = [leads for i, leads in use.leads.items() if i != slot]
        if slot is not None and dims & set().union(*others) - use.leads[slot]:
            use.looked_up.add(slot)
    return use


def _add_product(use: _Use, node: Node, dim_classes: DimClasses) -> None:
    """Add a product's dims to those that products contract or result in."""
    rule, names = node.rule, dim_classes.factors(node)
    assert rule is not None
    made = {f for dim in rule.results[0] for f in dim}
    held = {f for layout in rule.operands for dim in layout for f in dim}
    leads = [{*dim_classes.operands(node, o)[:1]} for o in (0, 1)]
    use.contracted.update({names[f] for f in held - made} - (leads[0] & leads[1]))
    results = dim_classes.results(node, 0)
    use.rows.update(results[:1])
    use.columns.update(results[1:])


def _leading(
    graph: Graph, dim_classes: DimClasses, data: Mapping[int, BatchDim | None]
) -> tuple[frozenset[Element], set[Element]]:
    """Return the classes of the first and of the second dims of data, from the one that
    holds the batch on, and of its slices."""
    first: set[Element] = set()
    second: set[Element] = set()
    for node in graph.nodes:
        lead = 0
        if node.kind is NodeKind.INPUT:
            batch_dim = data.get(node.slot)
            is_data = batch_dim is not None
            lead = batch_dim.dim if batch_dim is not None else 0
        elif node.kind is NodeKind.SLICE:
            (edge,) = graph.incoming[node.id]
            source = edge.source
            stack = dim_classes.results(graph.nodes[source.node], source.result)
            is_data = stack[0] in first
        else:
            is_data = _takes_some(node) and dim_classes.operands(node, 0)[0] in first
        dims = dim_classes.results(node, 0)[lead:] if is_data else []
        if node.kind is NodeKind.OP:
            dims = [d for d in dims if d is not None]
        first.update(d for d in dims[:1] if d is not None)
        second.update(d for d in dims[1:2] if d is not None)
    return frozenset(first), second


def _takes_some(node: Node) -> bool:
    """Whether an op slices the first dim of its operand, or looks up some of it, as
    minibatches of a shuffled batch."""
    rule = node.rule
    if rule is None or node.op_kind not in (OpKind.MOVEMENT, OpKind.LOOKUP):
        return False
    if not rule.operands[0] or not rule.results[0]:
        return False
    (dim, *_), (made, *_) = rule.operands[0], rule.results
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
    graph: Graph,
    dim_classes: DimClasses,
    batch: frozenset[Element],
    data: Collection[int],
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
