"""Kernels that XLA:TPU adds: loops over windows, padded copies, complex arrays' parts.

A gather or a scatter of rows, or of elements, is one kernel. One of windows that are
parts of dims (`vmap` of `dynamic_slice`, and its gradient) is a loop over the windows,
each of whose trips slices its indices, takes them apart where there are several, and
slices or writes the window; a scatter also tests whether it is in bounds, and adds.
Windows that are narrower than the lanes are stored with the windows on the lanes: a
trip of a scatter reads whole tiles for its own, and writes them before it sums them.

A scatter of rows that are narrower than the lanes works on a copy of its operand with
padded rows, and copies the result back. Updates that are so narrow, if only by
sharding, are copied to padded rows, in fast memory where these fit, unless there are
fewer of them than rows in a table that they are written into; so is the table, if only
sharding makes it narrow and it does not fit there. A table of such rows
that enters the program is stored with the rows on the lanes; a look-up outside of loops
reads a copy with padded rows, unless that is large and mostly padding: then it is taken
to read a whole tile for every eight elements, each tile once (XLA estimates no time).

A convolution of an image with fewer channels than a tile has rows (a stem, a patch
embedding), and its gradient by the kernel, read a copy with the batch on the lanes and
the channels, padded to at least four, on the rows. Of other images that enter or leave
the program there is a copy, too: they are stored with the batch outermost and the dims
on the lanes that need the least padding, and convolved with channels on the lanes and
the batch on the rows. A batch of fewer images than a tile has rows is folded together
with positions of the windows (space to batch), where images enter, and taken apart
where they leave.

Complex arrays are two arrays of their parts, taken apart where the program starts, in a
kernel each that reads the whole, and joined where it ends. A product is three products
of real arrays, each with its own partial sums; windows are gathered part by part. They
are scattered in one loop, which is not partitioned: each device writes all windows.

Seen in HLO of v5e:4x4 and v5e:2x2, libtpu 0.0.52.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from rhino_jax.analysis.dim_classes import window_dims
from rhino_jax.analysis.graph import Node, NodeKind
from rhino_jax.analysis.in_place import is_into_zeros, sources_of
from rhino_jax.analysis.on_chip import room_bytes
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.cost.compute import op_s, padding, traffic_s
from rhino_jax.hardware.lowering import OBSERVED
from rhino_jax.hardware.target import Target
from rhino_jax.ir.factor import FactorKind, Rule
from rhino_jax.ir.program import Op, Value, item_bytes
from rhino_jax.ir.spec import Spec, shards_per_dim
from rhino_jax.ir.traits import OpKind
from rhino_jax.model.op_collectives import splits
from rhino_jax.model.options import Options
from rhino_jax.model.sizes import LocalSizes
from rhino_jax.model.strategies import shards
from rhino_jax.solver.problem import NodeUsage


_APART, _JOINED = 3.0, 2.0
"""Bytes read and written over those of an array: two kernels read it and write a part
each; one reads the parts and writes it."""

_FOLDING = {NodeKind.INPUT: (2, 10), NodeKind.OUTPUT: (2, 6)}
"""Times of folding an image into a batch, and of taking it apart, over a copy's: with
one window dim, and with several. By XLA's estimates of one convolution on v5e both
together are 3 to 4.5 of bf16[1 to 4,4096,64], 12 to 14 of [1 to 4,64,64,64], and 15 to
16 of [1 to 4,16,32,32,64], whether one convolution follows another or not."""


def with_loops_and_parts(
    analysis: ProgramAnalysis, sizes: LocalSizes, options: Sequence[Options]
) -> list[Options]:
    """Return the options with the costs of the kernels that XLA:TPU adds.

    Args:
      analysis: the program.
      sizes: local sizes of values, under lists of specs.
      options: [nodes], the options of each.
    """
    changed, device = list(options), analysis.target.device
    # All of these are about lanes, and so about hardware with tiles.
    if not device.tile or not (device.loops_windows or device.splits_complex):
        return changed
    values, found = analysis.graph.program.values, dict[tuple[object, ...], Options]()
    turned = _find_turned(analysis) if device.loops_windows else set()
    state = {o.state_of for o in analysis.graph.program.outputs}
    for node in analysis.graph.nodes:
        is_complex = splits(values[node.value], device.lowering)
        is_window = device.loops_windows and _indexes(node)
        is_image = node.op is not None and bool(node.op.traits.channels)
        off = _convolved_dims(analysis, sizes, node)
        if not (is_window or is_complex or is_image or off):
            continue
        own, is_state = options[node.id], node.slot in state
        # Inputs and outputs of other types share options.
        size = analysis.alike.types[node.value], analysis.alike.lanes[node.value]
        fills = is_window and is_into_zeros(analysis.graph, node)
        is_turned = node.id in turned
        key = id(own), node.kind, is_complex, is_state, off, *size, is_turned, fills
        if key not in found:
            new = own
            if is_window:
                new = new.slower(_indexed_s(analysis, sizes, node, own, is_complex))
            if is_turned:
                new = new.slower(_turned_s(analysis, sizes, node, own))
            if is_image:
                new = new.slower(_image_s(analysis, sizes, node, own))
            if off:
                new = new.slower(_border_s(analysis, sizes, node, own, off))
            if is_complex and node.op is not None and node.op.traits.is_contraction:
                dtype = values[node.op.operands[0]].dtype
                more = (OBSERVED.real_products - 1) * own.flops
                new = new.slower(op_s(analysis.target, more, 0.0 * more, dtype))
            if is_complex:
                new = new.slower(_parts_s(analysis, sizes, node, own, is_state))
            found[key] = new
        changed[node.id] = found[key]
    return changed


def _image_s(
    analysis: ProgramAnalysis, sizes: LocalSizes, node: Node, own: Options
) -> np.ndarray:
    """Return [options], the seconds of copying an image of few channels."""
    op, (rows, lanes) = node.op, analysis.target.device.tile
    assert op is not None and op.rule is not None
    channel, factors = op.traits.channels[0], op.rule.factors
    dims = [f for dim in op.rule.operands[0] for f in dim]
    batch = [f for f in dims if f != channel and factors[f].kind is not FactorKind.HALO]
    few = OBSERVED.least_channels
    if channel not in dims or factors[channel].size >= few or len(batch) != 1:
        return np.zeros(len(own.cost_s))
    image = analysis.graph.program.values[op.operands[0]]
    pieces = shards(own.strategies, sizes.mesh_sizes)[:, batch[0]]
    size = np.ceil(factors[batch[0]].size / pieces)
    padded = padding(size, lanes) * padding(factors[channel].size, rows // 2)
    traffic = (1 + padded) * sizes.held_bytes(own.ins[0], image)
    return traffic_s(analysis.target, traffic)


def _border_s(
    analysis: ProgramAnalysis,
    sizes: LocalSizes,
    node: Node,
    own: Options,
    off: tuple[int, ...],
) -> np.ndarray:
    """Return [options], the seconds of copying an image from the order in which a
    program stores it to that in which it is convolved, or back."""
    value, port = analysis.graph.program.values[node.value], own.ins[0]
    batch = min(d for d in range(value.rank) if d not in off)
    cut = np.array(
        [shards_per_dim(s.operands[0], sizes.mesh_sizes)[batch] for s in own.strategies]
    )
    is_folded = -(-value.shape[batch] // cut) < analysis.target.device.tile[0]
    copies = np.where(is_folded, _FOLDING[node.kind][len(off) > 1], 1)
    traffic = sizes.held_bytes(port, value, ()) + sizes.held_bytes(port, value, off)
    return traffic_s(analysis.target, copies * traffic)


def _convolved_dims(
    analysis: ProgramAnalysis, sizes: LocalSizes, node: Node
) -> tuple[int, ...]:
    """Return the window dims of an image with channels that enters the program for a
    convolution, or leaves it as one makes it; else none."""
    graph, values = analysis.graph, analysis.graph.program.values
    if node.kind is NodeKind.OUTPUT:
        off = sizes.off_lanes.get(node.value, ())
        return off if len(off) == values[node.value].rank - 2 else ()
    for edge in graph.outgoing[node.id] if node.kind is NodeKind.INPUT else ():
        op = graph.nodes[edge.target].op
        if op is None or edge.operand or op.traits.kind is not OpKind.CONVOLUTION:
            continue
        assert op.rule is not None
        channels = op.rule.factors[op.traits.channels[0] or 0].size
        if channels >= OBSERVED.least_channels:
            return window_dims(op.rule.operands[0], op.rule)
    return ()


def _parts_s(
    analysis: ProgramAnalysis,
    sizes: LocalSizes,
    node: Node,
    own: Options,
    is_state: bool,
) -> np.ndarray:
    """Return [options], the seconds of taking a complex input apart, or of joining an
    output."""
    value = analysis.graph.program.values[node.value]
    passes = _JOINED if node.kind is NodeKind.OUTPUT else _APART + is_state * _JOINED
    if node.kind not in (NodeKind.INPUT, NodeKind.OUTPUT):
        return np.zeros(len(own.cost_s))
    return traffic_s(analysis.target, passes * sizes.held_bytes(own.ins[0], value))


def _indexes(node: Node) -> bool:
    """Whether a node is a gather, or a scatter, at several indices."""
    op = node.op
    if op is None or op.rule is None:
        return False
    is_gather = op.traits.kind is OpKind.LOOKUP and len(op.operands) == 2
    is_scatter = op.traits.kind is OpKind.SCATTER and op.traits.updates is not None
    return (is_gather or is_scatter) and any(op.rule.operands[1])


def _indexed_s(
    analysis: ProgramAnalysis,
    sizes: LocalSizes,
    node: Node,
    own: Options,
    is_complex: bool,
) -> np.ndarray:
    """Return [options], the seconds of the loop, or the copies, that a gather or a
    scatter is or needs."""
    op, values = node.op, analysis.graph.program.values
    assert op is not None and op.rule is not None
    kinds = {op.rule.factors[f].kind for dim in op.rule.operands[0] for f in dim}
    if FactorKind.WHOLE in kinds:
        trips = _trips(
            op.rule, own, sizes, is_whole=is_complex and len(op.operands) > 2
        )
        return trips * _trip_s(analysis, op, 2 if is_complex else 1)  # real, imaginary
    if op.traits.kind is not OpKind.SCATTER or not _takes_rows(op):
        return np.zeros(len(own.cost_s))
    far, near = 0.0 * own.cost_s, 0.0 * own.cost_s
    copies = _summed_copies(analysis, sizes, node, own)
    for size, padded, count, in_fast_memory in copies:
        is_far = padded > _room(analysis)
        far += np.where(is_far, count * (size + padded), 0.0)
        near += np.where(is_far, 0.0, in_fast_memory)
    seconds = traffic_s(analysis.target, near)
    return seconds + _turning_s(analysis.target, far, values[op.operands[0]].dtype)


def _summed_copies(
    analysis: ProgramAnalysis, sizes: LocalSizes, node: Node, own: Options
) -> Iterator[tuple[np.ndarray, np.ndarray, int, np.ndarray]]:
    """Yield the copies to padded rows that a scatter of narrow rows works on: bytes of
    the rows and of the copy, how often it is copied in HBM, and the bytes that copies
    in fast memory move instead; all are [options]."""
    op, values = node.op, analysis.graph.program.values
    assert op is not None
    table, row_values = values[op.operands[0]], values[op.operands[-1]]
    lanes = analysis.target.device.tile[-1]
    width = _widths(sizes, table, (s.made[0] for s in own.strategies))
    held, rows = sizes.held_bytes(own.outs[0], table), 0.0 * width
    if node.id not in analysis.liveness.in_place or table.bytes <= row_values.bytes:
        rows = sizes.held_bytes(own.ins[2], row_values)
    copied = 2 * (1 + lanes / width) * held * (table.shape[-1] < lanes)
    passes = 1 if is_into_zeros(analysis.graph, node) else 2
    is_narrow = (1 < width) & (width < lanes)
    for size, count, near in (rows, 1, 2 * rows), (held, passes, copied):
        yield size, is_narrow * size * lanes / width, count, is_narrow * near


def _turning_s(target: Target, traffic: np.ndarray, dtype: str) -> np.ndarray:
    """Return [options], the seconds of copies in memory to rows from lanes, or back."""
    items_per_s = OBSERVED.turned_items * (target.device.clock_hz or math.inf)
    turned_s = traffic / item_bytes(dtype) / items_per_s
    return np.maximum(traffic_s(target, traffic), turned_s)


def _find_turned(analysis: ProgramAnalysis) -> set[int]:
    """Return the ids of the first look-ups of rows of every input, outside of loops."""
    graph, found = analysis.graph, dict[int, int]()
    for node in filter(_indexes, graph.run_order):
        op = node.op
        if op is None or op.traits.kind is not OpKind.LOOKUP or not _takes_rows(op):
            continue
        (edge,) = (e for e in graph.incoming[node.id] if not e.operand)
        maker = graph.nodes[sources_of(graph, edge)[-1].node]
        if maker.kind is NodeKind.INPUT and maker.count == node.count:
            found.setdefault(maker.id, node.id)
    return set(found.values())


def _takes_rows(op: Op) -> bool:
    """Whether a gather or a scatter takes whole rows of its table."""
    assert op.rule is not None
    kinds = [op.rule.factors[f].kind for f in op.rule.operands[0][-1]]
    return FactorKind.PARALLEL in kinds


def _widths(sizes: LocalSizes, table: Value, specs: Iterable[Spec]) -> np.ndarray:
    """Return [specs], the elements of a row on one device."""
    return table.shape[-1] / np.array(
        [shards_per_dim(spec, sizes.mesh_sizes)[-1] for spec in specs]
    )


def _room(analysis: ProgramAnalysis) -> int:
    """Return the bytes of fast memory that copies may take."""
    return room_bytes(analysis.target.device.on_chip_bytes)


def _turned_s(
    analysis: ProgramAnalysis, sizes: LocalSizes, node: Node, own: Options
) -> np.ndarray:
    """Return [options], the seconds of copying a narrow table to padded rows, or of
    reading a whole tile for every eight elements of a row."""
    held, padded, lines = _looked_up(analysis, sizes, node, own)
    assert node.op is not None
    copied = np.where(padded > 0, held + padded, 0.0)
    tiles = np.where(padded > 0, 0.0, np.minimum(lines, held))
    dtype = analysis.graph.program.values[node.op.operands[0]].dtype
    seconds = traffic_s(analysis.target, tiles)
    return seconds + _turning_s(analysis.target, copied, dtype)


def padded_copies(
    analysis: ProgramAnalysis, sizes: LocalSizes, options: Sequence[Options]
) -> Iterator[NodeUsage]:
    """Yield the HBM that copies to padded rows take while narrow rows are looked up or
    summed."""
    graph, device = analysis.graph, analysis.target.device
    if not device.tile or not device.loops_windows:
        return
    turned = _find_turned(analysis)
    for node in filter(_indexes, graph.nodes):
        assert node.op is not None
        own, far = options[node.id], 0.0 if device.sparse_cores else _room(analysis)
        if node.id in turned:
            table, padded, _ = _looked_up(analysis, sizes, node, own)
            found = sizes.held_bytes(own.outs[0], graph.program.values[node.value])
            copies = [padded, padded / table * found]
        elif node.op.traits.kind is OpKind.SCATTER and _takes_rows(node.op):
            far = _room(analysis)
            copies = [c[1] for c in _summed_copies(analysis, sizes, node, own)]
        else:
            continue
        held = np.sum([np.where(copy > far, copy, 0.0) for copy in copies], axis=0)
        if held.any():
            yield NodeUsage(node.id, held, node.time, node.time + 1)


def _looked_up(
    analysis: ProgramAnalysis, sizes: LocalSizes, node: Node, own: Options
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return [options], the bytes of a table, of its copy with padded rows where there
    is one, and of the tiles that hold the looked up elements of narrow rows."""
    values, (rows, lanes) = analysis.graph.program.values, analysis.target.device.tile
    assert node.op is not None
    table, found = (values[v] for v in (node.op.operands[0], node.op.results[0]))
    width = _widths(sizes, table, (s.operands[0] for s in own.strategies))
    paddings = lanes / (width * padding(width, rows))
    held = sizes.held_bytes(own.ins[0], table)
    is_narrow = (1 < width) & (width < lanes)
    is_copied = (paddings - 1) * held <= OBSERVED.padding_bytes
    is_copied |= paddings <= OBSERVED.most_padded
    lines = lanes * padding(width, rows) * found.bytes * sizes.shares(own.outs[0])
    return held, is_narrow * is_copied * paddings * held, is_narrow * lines


def _trips(
    rule: Rule, own: Options, sizes: LocalSizes, *, is_whole: bool
) -> np.ndarray:
    """Return [options], the number of windows that one device copies."""
    indices = [f for dim in rule.operands[1] for f in dim]
    windows = np.array([rule.factors[f].size for f in indices], dtype=float)
    if is_whole:
        return np.full(len(own.cost_s), windows.prod())
    pieces = shards(own.strategies, sizes.mesh_sizes)[:, indices]
    return np.ceil(windows / pieces).prod(1)


def _trip_s(analysis: ProgramAnalysis, op: Op, parts: int) -> float:
    """Return the seconds of copying one window of an array of so many parts."""
    values, target = analysis.graph.program.values, analysis.target
    indexing = min(values[op.operands[1]].shape[-1], 2)
    if op.traits.kind is not OpKind.SCATTER:
        return parts * (indexing + 1) * target.device.launch_s
    updates, lanes = values[op.operands[2]], target.device.tile[-1]
    launches, tiles = parts, np.zeros(1)
    if updates.shape[-1] < lanes:
        windows = math.prod(values[op.operands[1]].shape[:-1])
        launches, tiles = 2 * parts, tiles + 2 * lanes * updates.bytes / max(windows, 1)
    read_s = float(traffic_s(target, tiles)[0])
    return (indexing + 1 + launches) * target.device.launch_s + read_s
