"""Equivalence of nodes that have the same options, at the same costs, on every mesh."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rhino_jax.analysis.graph import Graph, Node, NodeKind
from rhino_jax.analysis.in_place import is_copied_at_start
from rhino_jax.analysis.liveness import Liveness
from rhino_jax.ir.program import Op
from rhino_jax.utils.union_find import number


@dataclass(frozen=True, slots=True, eq=False)
class Alike:
    """Equivalence classes of nodes and of values, as numbers.

    Attributes:
      nodes: [nodes], equal numbers where options are equal, apart from pins.
      types: [values], equal numbers where shape and element type are equal.
      lanes: [values], equal numbers where the dims that never lie on lanes are equal.
    """

    nodes: np.ndarray
    types: np.ndarray
    lanes: np.ndarray


def find_equivalent(
    graph: Graph, liveness: Liveness, off_lanes: Mapping[int, tuple[int, ...]]
) -> Alike:
    """Number the equivalence classes of a graph's nodes and values.

    Args:
      graph: the program.
      liveness: which of its values are in memory, and when.
      off_lanes: value id → its dims that never lie on lanes, see `dims_off_lanes`.
    """
    values = graph.program.values
    types = number((v.shape, v.dtype) for v in values)
    lanes = np.zeros(len(values), dtype=np.int64)
    # Most programs have no such dims.
    if off_lanes:
        lanes = number(map(off_lanes.get, range(len(values))))
    # The properties of a value that costs of ops depend on.
    sizes = (types * (lanes.max(initial=0) + 1) + lanes).tolist()
    stored, held, kernels = liveness.is_materialised, liveness.is_held, liveness.kernels
    on_chip = liveness.on_chip

    def moved(node: Node) -> object:
        """Return the sizes of what a matmul's epilogue moves, and where they are."""
        reads, writes, *does = kernels.epilogues[node.id]
        read = tuple([sizes[graph.value_id(p)] for p, _ in reads])
        kept = on_chip and tuple([on_chip.writes[p] for p in writes])
        return read, tuple([sizes[graph.value_id(p)] for p in writes]), kept, *does

    def look(node: Node) -> object:
        op = node.op
        if node.kind is not NodeKind.OP:
            shape = values[node.value].shape
            if node.kind is NodeKind.STACK:
                shape = shape[1:]
            return (
                node.kind.value,
                shape,
                passed_bytes(graph, liveness, node),
                copied_slices(graph, liveness, node),
            )
        assert op is not None
        return (
            *work_of(op, sizes),
            kernels.reads[node.id],
            kernels.parts.get(node.id),
            tuple([kernels.ratio(node, i) for i in kernels.reads[node.id]]),
            kernels.widened.get(node.id),
            node.id in kernels.of_epilogues,
            node.id in kernels.epilogues and moved(node),
            tuple([(stored[p.id], held[p.id]) for p in node.ports]),
            on_chip and on_chip.of(node),
            kernels.launches[node.id],
            kernels.vector_ops[node.id],
            liveness.zero_taps[node.id],
            node.id in liveness.in_place,
        )

    return Alike(number(map(look, graph.nodes)), types, lanes)


def work_of(op: Op, types: Sequence[int] | np.ndarray) -> tuple[Hashable, ...]:
    """Return a key that is equal for ops of equal work, whatever of it is in memory.

    Args:
      op: the op.
      types: [values], equal numbers for equal types.
    """
    return (
        # Equal rules are one shared object.
        id(op.rule),
        op.flops,
        "" if op.is_fusible else op.name,
        tuple([types[v] for v in op.operands]),
        tuple([types[v] for v in op.results]),
        op.manual,
    )


def passed_bytes(graph: Graph, liveness: Liveness, node: Node) -> int:
    """Return the bytes that a loop reads and writes to copy a stack slice by slice, or
    a carry in every trip, and at its start where it may not write there; or to copy the
    result of branches, or an argument that is a result."""
    passes = liveness.stack_passes.get(node.id, 0)
    if node.kind is NodeKind.CARRY:
        passes *= copied_slices(graph, liveness, node)
        passes += 2 * is_copied_at_start(graph, node)
        return passes * graph.program.values[node.value].bytes
    whole = node.value
    if node.kind is NodeKind.SLICE and node.op is not None:
        whole = node.op.operands[node.slot]
    return passes * graph.program.values[whole].bytes


def copied_slices(graph: Graph, liveness: Liveness, node: Node) -> int:
    """Return how many copies a loop launches for a stack's slices or a carry."""
    call = None if node.op is None else node.op.call
    return call.trip_count if call and node.id in liveness.stack_passes else 0
