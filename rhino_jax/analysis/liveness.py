"""Liveness: when each value is live, and which values are in memory at all (see
`materialised`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set as AbstractSet
from dataclasses import dataclass, replace

import numpy as np

from rhino_jax.analysis.convolutions import find_zero_taps
from rhino_jax.analysis.fusing import Fusing
from rhino_jax.analysis.graph import Graph, Node, NodeKind, Port, reached
from rhino_jax.analysis.in_place import (
    enters_loop,
    is_writable,
    returns_to_buffer,
    update_in_place,
)
from rhino_jax.analysis.kernels import Kernels, find_kernels
from rhino_jax.analysis.materialised import Materialised, find_materialised
from rhino_jax.analysis.matmul_depth import find_matmul_depth
from rhino_jax.analysis.on_chip import MAX_SHARDS, OnChip, find_on_chip
from rhino_jax.analysis.slack import find_slack
from rhino_jax.analysis.temporaries import (
    Masked,
    Stays,
    WholeCopy,
    find_hoisted,
    find_masked,
    find_padded,
    find_returned,
    find_row_parts,
    padded_operand,
)
from rhino_jax.analysis.uses import (
    NOWHERE,
    are_views,
    convolves,
    copied_ports,
    find_scattered_onto,
    looks_up,
)
from rhino_jax.solver.overlap import Slack, Wait


@dataclass(frozen=True, slots=True, eq=False)
class Liveness:
    """The live ranges of a graph's values.

    Attributes:
      is_materialised: [ports], whether the value touches memory.
      handed, stacked: see `Materialised`.
      kernels: the memory reads and the launches of its kernels.
      zero_taps: [nodes], products of a convolution with its zeros over those that
        count, see `find_zero_taps`.
      in_place: id of the node of an update that is written into the buffer of its
        operand → id of the port of its result, see `update_in_place`.
      slack: which collectives something waits for.
      copies: converted copies of the stacks that loops scan over, and copies of
        arguments that are results as they are.
      masked, stay: copies of operands that are padded, or masked to ragged groups, and
        those that stay live from one product to another.
      on_host: ids of the ports of values in the host's memory.
      stack_passes: id of a slice, stack or carry node of a loop → how often the whole
        stack, or the carry in every trip, is read or written in addition to what the
        ops of the body read and write; of results of branches, and of arguments that
        are results as they are.
      first, last: [ports], when the value is live, both included.
      copy_last: [edges], until when a resharded copy of the value is live, from its
        read on.
      on_chip: which values stay in on-chip memory; None: there is none.
    """

    is_materialised: list[bool]
    handed: frozenset[int]
    stacked: frozenset[int]
    kernels: Kernels
    zero_taps: list[float]
    in_place: Mapping[int, int]
    slack: Slack
    copies: tuple[WholeCopy, ...]
    masked: tuple[Masked, ...]
    stay: tuple[Stays, ...]
    on_host: frozenset[int]
    stack_passes: Mapping[int, int]
    first: list[int]
    last: list[int]
    copy_last: list[int]
    on_chip: OnChip | None = None

    @property
    def is_held(self) -> list[bool]:
        """[ports], whether a value is in memory and counted here. Values that separate
        programs send each other are not: whoever plans those programs knows how many
        are live, and for how long. Nor are those that are written into a stack, or into
        the buffer of another value, or that are in the host's memory."""
        elsewhere, stored = self.handed | self.stacked, enumerate(self.is_materialised)
        elsewhere |= {*self.in_place.values()}
        elsewhere |= self.on_host
        return [is_it and port not in elsewhere for port, is_it in stored]


def analyse(graph: Graph, fusing: Fusing, most_shards: int = MAX_SHARDS) -> Liveness:
    """Compute which values are stored and for how long, before any sharding is chosen.

    Args:
      graph: the program.
      fusing: the compiler's behaviour.
      most_shards: number of devices, or a number that is larger.
    """
    ports = _holding(graph)
    depth = find_matmul_depth(graph)
    fused = depth
    if fusing.parts_columns or graph.scalar_reads:
        fused = find_matmul_depth(
            graph, of_kernels=True, after_sums=fusing.parts_columns
        )
    found = find_materialised(graph, ports, fused, fusing)
    slack = find_slack(graph, depth)
    zero_taps, padded = [1.0] * len(graph.nodes), list[list[Node]]()
    if fusing.pads_evenly:
        zero_taps = find_zero_taps(graph)
        padded = find_padded(graph, zero_taps)
    first = {node.id: nodes[0].time for nodes in padded for node in nodes}
    read = _read_until(graph, ports, found, find_late(graph, slack), first)
    in_place = update_in_place(
        graph,
        read,
        found.ports,
        found.filled,
        copies_returned=fusing.copies_stacks,
    )
    _hold_donated(graph, read)
    returned, values = find_returned(graph), graph.program.values
    masked, stay = find_masked(graph, fusing.tiles_groups, masks=fusing.masks_groups)
    masked += tuple(padded_operand(nodes) for nodes in padded)
    masked += find_row_parts(graph) if fusing.parts_columns else ()
    live = Liveness(
        found.ports,
        found.handed,
        found.stacked | found.filled,
        find_kernels(graph, fused, found, fusing.ops_per_byte, fusing.rates),
        zero_taps,
        in_place,
        slack,
        (find_hoisted(graph) if fusing.hoists_conversions else ()) + returned,
        masked,
        stay,
        frozenset(p.id for v, p in graph.held.items() if values[v].on_host),
        _stack_passes(graph, found, fusing)
        | _carry_passes(graph, found.ports)
        | _branch_passes(graph, fusing)
        | {copy.node: 2 for copy in returned},
        [_start(graph, port) for port in graph.ports],
        [_end(graph, port, read[port.id]) for port in graph.ports],
        _copies_until(graph, read, in_place),
    )
    if not fusing.on_chip_bytes:
        return live
    of = live.kernels, live.is_held, found.stacked, live.last
    size = fusing.on_chip_bytes, most_shards
    kept = find_on_chip(graph, *of, *size, in_loops=fusing.loops_on_chip)
    return replace(live, on_chip=kept)


def _holding(graph: Graph) -> np.ndarray:
    """Return the ids of the ports that hold a value of rank 1 or more, or are read."""
    is_holding = np.zeros(len(graph.ports), dtype=bool)
    is_holding[[port.id for port in graph.held.values()]] = True
    # The result of a carry counts only where something reads it.
    carries = [n for n in graph.nodes if n.kind is NodeKind.CARRY]
    is_holding[[n.ports[-1].id for n in carries]] = False
    is_holding[graph.columns.source] = True
    return np.flatnonzero(is_holding)


def _read_until(
    graph: Graph,
    ports: np.ndarray,
    materialised: Materialised,
    late: dict[int, int],
    padded: dict[int, int],
) -> list[int]:
    """Return [ports], when the last reader needs the value; where nothing reads it,
    when it is computed.

    Args:
      graph: the program.
      ports: ids of the ports that hold a value.
      materialised: which values touch memory.
      late: node id → when a postponed node runs, see `find_late`.
      padded: id of a convolution that reads a padded copy → when that is written.
    """
    nodes, columns = graph.nodes, graph.columns
    last = columns.time[columns.maker].tolist()
    # Node id → when it runs, for nodes that fuse into their readers.
    runs: dict[int, int] = {}
    copied = copied_ports(graph).tolist()
    onto = find_scattered_onto(graph)
    order = np.argsort(-columns.place[columns.maker[ports]], kind="stable")
    for port in ports[order].tolist():
        edges = graph.readers[port]
        if edges:
            # Donated arguments and carries are updated in place, hardly any other
            # value.
            owned = nodes[graph.ports[copied[port]].node].kind is not NodeKind.OP
            until = -1
            for edge in edges:
                target = nodes[edge.target]
                if (scatter := onto.get((edge.target, port))) is not None:
                    time = max(last[port], nodes[scatter].time)
                elif target.is_fusible or edge.target in runs:
                    time = runs.get(edge.target, edge.time - owned)
                elif edge.operand == 0 and edge.target in padded:
                    time = padded[edge.target]
                elif target.kind is NodeKind.OP:
                    time = late.get(edge.target, edge.time)
                elif target.kind is NodeKind.COPY:
                    time = last[target.ports[0].id]
                elif target.kind in (NodeKind.SLICE, NodeKind.CONST):
                    time = graph.loop_end[edge.target]
                elif enters_loop(graph, edge) and is_writable(graph, edge.source):
                    # The loop carries it in its own buffer.
                    time = edge.time - 1
                else:
                    time = edge.time
                if time > until:
                    until = time
            last[port] = until
        maker = nodes[graph.ports[port].node]
        inside = maker.id in materialised.inside
        fuses = maker.is_fusible or looks_up(maker) or inside
        if fuses and not materialised.ports[port]:
            runs[maker.id] = max(runs.get(maker.id, -1), last[port])
    return last


def _hold_donated(graph: Graph, read: list[int]) -> None:
    """Keep donated inputs in `read` until the output that is written in their place
    starts: no other value is put there (buffers of a stencil that is applied four times
    to donated grids, XLA:GPU of jax 0.11.2)."""
    of_slot = {n.slot: n.ports[0].id for n in graph.nodes if n.kind is NodeKind.INPUT}
    for output, port in zip(graph.program.outputs, graph.output_ports, strict=True):
        held = None if output.state_of is None else of_slot.get(output.state_of)
        if held is None or port is None:
            continue
        written = graph.nodes[port.node]
        readers = {graph.nodes[e.target].kind for e in graph.readers[held]}
        # A loop's carry is in the input's place itself.
        if written.kind is NodeKind.OP and NodeKind.CARRY not in readers:
            read[held] = max(read[held], written.time - 1)


def _stack_passes(
    graph: Graph, materialised: Materialised, fusing: Fusing
) -> dict[int, int]:
    """Return `Liveness.stack_passes` of slices and stacks.

    A copy of a value into or out of a stack reads and writes it. A slice is fused into
    each reader that fuses, and a value that only a stack reads, or that the others
    recompute (`stacked`), is written there in place. Where others read it too, a
    matmul's fusion writes it to both places, and other values are copied. A number is
    sliced in a kernel of its own, and so is an image that is convolved and what another
    op reads (HLO of v5e, libtpu 0.0.52: scales and indices of a scan; weights that two
    matmuls read, images that two elementwise kernels read, that a sort reads).
    Where the compiler copies stacks (`Device.copies_stacks`), the zeros are written
    too, a value in place is computed from what is read a second time, every other value
    is copied, and so is a slice that some op cannot fuse; look-ups can.
    """
    is_view = are_views(graph)
    found: dict[int, int] = {}
    for node in graph.nodes:
        if node.kind is not NodeKind.SLICE:
            continue
        is_copied = not fusing.copies_stacks and bool(graph.scalar_readers[node.id])
        edges = list(graph.outgoing[node.id])
        for edge in edges:
            reader = graph.nodes[edge.target]
            if fusing.copies_stacks:
                is_fused = is_view[reader.id] or reader.is_fusible or looks_up(reader)
            elif reader.kind is NodeKind.COPY:
                edges += graph.outgoing[reader.id]
                continue
            else:
                is_fused = reader.kind is not NodeKind.OP or reader.is_fused
                is_fused |= reader.hosts_fusion and not convolves(reader, edge.operand)
            is_copied |= not is_fused
        if is_copied:
            found[node.id] = 2
    for edge in graph.edges:
        if graph.nodes[edge.target].kind is not NodeKind.STACK:
            continue
        is_in_place = edge.source.id in materialised.stacked
        if fusing.copies_stacks:
            found[edge.target] = 2 if is_in_place else 3
        elif len(graph.readers[edge.source.id]) > 1 and not is_in_place:
            maker = graph.nodes[edge.source.node]
            is_of_matmul = materialised.matmul_of[maker.id] != NOWHERE
            found[edge.target] = 1 if maker.hosts_fusion or is_of_matmul else 2
    return found


def _branch_passes(graph: Graph, fusing: Fusing) -> dict[int, int]:
    """Return `Liveness.stack_passes` of results of branches that are copied back."""
    joins = [n for n in graph.nodes if fusing.copies_stacks and n.kind is NodeKind.JOIN]
    return {node.id: 2 for node in joins if returns_to_buffer(graph, node)}


def _carry_passes(graph: Graph, materialised: list[bool]) -> dict[int, int]:
    """Return `Liveness.stack_passes` of carries that a rotation, a slice or a pad
    reads in the fusion that computes their next value: that writes another buffer,
    which is copied at the end of each trip.

    Seen in scans of XLA:GPU: a weather code (jax 0.11.2), slices of a padded grid and
    space to depth (jax 0.10.2).
    """
    if not graph.fuses_rotations:
        return {}
    makers = {
        node.id: graph.incoming[node.id][-1].source.node
        for node in graph.nodes
        if node.kind is NodeKind.CARRY
    }
    is_same = [
        node.kind is NodeKind.COPY
        or (node.is_fusible and not materialised[node.ports[0].id])
        for node in graph.nodes
    ]
    # A fusion may make several next values, of which one reads another.
    ends = {n for n in makers.values() if graph.nodes[n].is_fusible}
    return {
        carry: 2
        for carry, maker in makers.items()
        if maker in ends and _is_moved(graph, is_same, carry, maker, ends)
    }


def _is_moved(
    graph: Graph, is_same: list[bool], carry: int, maker: int, ends: AbstractSet[int]
) -> bool:
    """Whether an op reads a carry at other positions in the fusion of its next value.

    Args:
      graph: the program.
      is_same: [nodes], whether the node is computed in its readers' fusions.
      carry, maker: nodes of the carry, and of its next value.
      ends: nodes of the next values of all carries.
    """

    def before(n: int) -> Iterator[int]:
        sources = (node.id for node in graph.nodes_before(n))
        return (s for s in sources if is_same[s] or s in ends)

    inside = {n for n in reached([maker], before) if is_same[n]}

    def within(n: int) -> set[int]:
        return inside.intersection(node.id for node in graph.nodes_behind(n))

    return any(_moves(graph.nodes[n]) for n in reached([carry], within))


def _moves(node: Node) -> bool:
    """Whether an op rotates a dim, or slices or pads one that may be cut."""
    op, rule = node.op, node.rule
    if op is None or rule is None:
        return False
    return op.traits.is_rotation or any(f.shift is not None for f in rule.factors)


def find_late(graph: Graph, slack: Slack) -> dict[int, int]:
    """Return when matmuls run that nothing waits for, such as those of weight
    gradients.

    Schedulers put first what others wait for: in a loop's body the rest runs at its
    end, and before a loop it runs after the loop (seen in HLO of scanned GPTs: XLA:GPU
    of jax 0.10.2, libtpu 0.0.51).

    Returns:
      Node id → time, for matmuls that run later than their position in the program.
    """
    needed, found = _needed_at(graph), dict[int, int]()
    for node in graph.nodes:
        if not node.is_matmul or slack.nodes[node.id] < Wait.LATER:
            continue
        around = graph.loops_around(node.time)
        if around:
            found[node.id] = min(end for _, end in around)
            continue
        needs = needed[node.id]
        behind = [
            end for start, end in graph.loops if node.time < start and end <= needs
        ]
        if behind:
            found[node.id] = max(behind)
    return found


def _needed_at(graph: Graph) -> list[int]:
    """Return [nodes], when the first op reads a node's results that does not fuse into
    its readers: a gradient's conversion waits for the optimizer, which it fuses into.
    """
    found = [graph.end] * len(graph.nodes)
    for node in reversed(graph.run_order):
        for edge in graph.outgoing[node.id]:
            is_fused = graph.nodes[edge.target].is_fusible
            time = found[edge.target] if is_fused else edge.time
            found[node.id] = min(found[node.id], time)
    return found


def _start(graph: Graph, port: Port) -> int:
    node = graph.nodes[port.node]
    # A loop's stack is allocated as a whole before the loop. XLA removes a loop that
    # runs once (xla/service/while_loop_simplifier.cc).
    if node.kind is not NodeKind.STACK or _runs_once(node):
        return node.time
    return graph.loop_start[node.id]


def _runs_once(node: Node) -> bool:
    call = None if node.op is None else node.op.call
    return call is not None and call.trip_count == 1 and call.is_trip_count_known


def _end(graph: Graph, port: Port, last: int) -> int:
    node = graph.nodes[port.node]
    if node.kind is NodeKind.OP:
        return max(last, node.time)
    if node.kind is NodeKind.INPUT:
        entry = graph.program.inputs[node.slot]
        return last if entry.is_donated else graph.end
    if node.kind in (NodeKind.CARRY, NodeKind.STACK):
        return max(last, graph.loop_end[node.id])
    return max(last, node.time)


def _copies_until(
    graph: Graph, read: list[int], in_place: Mapping[int, int]
) -> list[int]:
    """Return [edges], until when a resharded copy is live.

    Args:
      graph: the program.
      read: [ports], until when a value is needed.
      in_place: see `Liveness`; their results are in the copy, where there is one.
    """
    columns = graph.columns
    until = np.zeros(len(graph.nodes), dtype=np.int64)
    for node, end in graph.loop_end.items():
        if graph.nodes[node].kind in (NodeKind.SLICE, NodeKind.CONST):
            until[node] = end
    copies = np.flatnonzero(columns.is_copy[columns.maker])
    until[columns.maker[copies]] = np.array(read)[copies]
    until = np.maximum(columns.read, until[columns.target])
    written = np.zeros(len(graph.nodes), dtype=np.int64)
    for node, result in in_place.items():
        written[node] = read[result]
    is_array = columns.operand == 0
    return np.maximum(until, written[columns.target] * is_array).tolist()
