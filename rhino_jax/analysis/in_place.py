"""Updates in place: ops that write their updates into the buffer of their operand.

A scatter or a `dynamic_update_slice` takes the buffer of the array that it updates
where nothing reads that array later, and where the program may write there: the result
of another op, a donated argument, what a loop carries. It then moves its updates alone.
Elsewhere the compilers copy the array first. Of several updates of one array, the last
is in place.
Of several branches, of which one runs, each may update it in place. Where a branch
returns it as it is, XLA:TPU does so, too; on GPU that copies it, the others copy it
before they update it, and where it is donated for the result, that is copied once more,
back into its buffer.
Source: openxla/xla, xla/service/copy_insertion.cc; seen in HLO of h100 and v5e, jax
0.10.2: writes to a KV cache in a scan, rows added to a donated table.
"""

from __future__ import annotations

from collections.abc import Iterator

from rhino_jax.analysis.graph import Edge, Graph, Node, NodeKind, Port, reached
from rhino_jax.analysis.uses import looks_up


_OWNING = (NodeKind.OP, NodeKind.CARRY, NodeKind.STACK, NodeKind.JOIN)


def update_in_place(
    graph: Graph,
    read: list[int],
    is_stored: list[bool],
    filled: frozenset[int],
    *,
    copies_returned: bool = False,
) -> dict[int, int]:
    """Find the updates in place, and let each buffer live as long as what is written
    there.

    Args:
      graph: the program.
      read: [ports], when the last reader needs the value; changed in place.
      is_stored: [ports], whether the value is in memory.
      filled: ids of ports whose values are in their scatters' results.
      copies_returned: whether a branch that returns an array as it is copies it.

    Returns:
      Id of the update's node → id of the port of its result.
    """
    found: dict[int, int] = {}
    taken: dict[int, int | None] = {}  # port → join of the branches that write there
    for node in reversed(graph.run_order):
        if node.kind is not NodeKind.OP or node.op is None:
            continue
        if node.op.traits.updates is None:
            continue
        for edge in [e for e in graph.incoming[node.id] if e.operand == 0]:
            sources, result = sources_of(graph, edge), node.ports[0].id
            held = sources[-1]
            # Buffers of a loop's results and of a branch's belong to other ports.
            is_own = (
                graph.nodes[held.node].kind is not NodeKind.JOIN and not held.result
            )
            join = _join_of(graph, node)
            is_first = held.id not in taken or taken[held.id] == join is not None
            is_free = is_own and is_stored[held.id] and held.id not in filled
            if not (is_first and is_free and is_writable(graph, held)):
                continue
            returned = None if copies_returned else join
            if not _is_read_behind(graph, edge, sources, returned):
                taken[held.id] = join
                found[node.id] = result
                for port in sources:
                    read[port.id] = max(read[port.id], read[result])
    return found


def sources_of(graph: Graph, edge: Edge) -> list[Port]:
    """Return the ports of the shared copies through which an edge reads, and of the
    value."""
    found = [edge.source]
    while graph.nodes[found[-1].node].kind is NodeKind.COPY:
        found.append(graph.incoming[found[-1].node][0].source)
    return found


def _join_of(graph: Graph, node: Node) -> int | None:
    """Return the id of the join of branches that alone reads a node's result."""
    readers = {e.target for e in graph.readers[node.ports[0].id]}
    (only,) = readers if len(readers) == 1 else (None,)
    is_join = only is not None and graph.nodes[only].kind is NodeKind.JOIN
    return only if is_join else None


def _is_read_behind(
    graph: Graph, edge: Edge, sources: list[Port], returned: int | None
) -> bool:
    """Whether something that has to wait for an update reads the array that it updates,
    or something that is no op, but for the join `returned`: all other reads run before
    it."""
    passed = {*(port.node for port in sources), returned}
    readers = [e for port in sources for e in graph.readers[port.id] if e is not edge]
    others = [e.target for e in readers if e.target not in passed]
    if not others:
        return False
    nodes = graph.nodes

    def in_this_trip(n: int) -> Iterator[int]:
        outgoing = graph.outgoing[n]
        return (out.target for out in outgoing if nodes[out.target].time >= out.time)

    def passed_on(n: int) -> set[int]:
        node = nodes[n]
        if not (node.is_fusible or looks_up(node) or node.kind is NodeKind.COPY):
            return set()
        return {reader.id for reader in graph.nodes_behind(n)} - {edge.target}

    behind = reached([edge.target], in_this_trip)
    return any(
        n in behind or nodes[n].kind not in (NodeKind.OP, NodeKind.COPY)
        for n in reached({*others} - {edge.target}, passed_on)
    )


def enters_loop(graph: Graph, edge: Edge) -> bool:
    """Whether an edge brings a loop the first value of a carry."""
    target = graph.nodes[edge.target]
    return target.kind is NodeKind.CARRY and edge.time <= target.time


def is_copied_at_start(graph: Graph, carry: Node) -> bool:
    """Whether a loop copies the first value of a carry, as it may not write there."""
    edges = [e for e in graph.incoming[carry.id] if enters_loop(graph, e)]
    return any(
        not is_writable(graph, port)
        for edge in edges
        for port in sources_of(graph, edge)[-1:]
    )


def is_into_zeros(graph: Graph, update: Node) -> bool:
    """Whether the array that an update writes into is computed for it, as zeros."""
    return any(node.is_fusible for node in graph.nodes_before(update.id, operand=0))


def returns_to_buffer(graph: Graph, node: Node) -> bool:
    """Whether a result of branches, one of which returns a donated argument as it is,
    replaces this argument."""
    replaced = {edge.target for edge in graph.outgoing[node.id]}
    returned = {edge.source for edge in graph.incoming[node.id]}
    return any(p.node in replaced and is_writable(graph, p) for p in returned)


def is_writable(graph: Graph, port: Port) -> bool:
    """Whether nothing outside of the program needs what a port holds."""
    node = graph.nodes[port.node]
    if node.kind is NodeKind.INPUT:
        return graph.program.inputs[node.slot].is_donated
    is_sent = port.id in graph.crossing
    return not is_sent and node.kind in _OWNING
