"""Readers of every port, where shared copies and views count as what they copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rhino_jax.analysis.graph import Columns, Graph
from rhino_jax.analysis.matmul_depth import MatmulDepth
from rhino_jax.analysis.views import are_views


NOWHERE = -1
"""Stands for no node and no port."""


@dataclass(frozen=True, slots=True, eq=False)
class Readers:
    """Pairs of a port and a node that reads it, in the order of ports.

    Attributes:
      num_ports: number of ports of the graph.
      port, node: [pairs], their ids.
      begin: [ports + 1], position of each port's first pair; at last, the number of
        pairs.
      nodes: `node` as a list.
    """

    num_ports: int
    port: np.ndarray
    node: np.ndarray
    begin: list[int]
    nodes: list[int]

    @classmethod
    def of(cls, graph: Graph) -> Readers:
        columns, num_ports = graph.columns, len(graph.ports)
        is_view = are_views(graph)
        # Reading a view is reading the port behind it, and only that.
        is_own = ~(columns.is_copy | is_view)[columns.target]
        is_own &= ~is_view[columns.maker[columns.source]]
        behind = copied_ports(graph)[columns.source]
        is_behind = behind != NOWHERE
        port = np.concatenate([columns.source[is_own], behind[is_behind]])
        node = np.concatenate([columns.target[is_own], columns.target[is_behind]])
        order = np.argsort(port, kind="stable")
        port, node = port[order], node[order]
        begin = np.searchsorted(port, np.arange(num_ports + 1))
        return cls(num_ports, port, node, begin.tolist(), node.tolist())

    def of_port(self, port: int) -> list[int]:
        """Return the ids of the nodes that read a port, once per read."""
        return self.nodes[self.begin[port] : self.begin[port + 1]]

    def count(self, which: np.ndarray) -> np.ndarray:
        """Return [ports], the number of reads by nodes for which `which`, [nodes], is
        True."""
        return np.bincount(self.port[which[self.node]], minlength=self.num_ports)

    def largest(self, values: np.ndarray) -> np.ndarray:
        """Return [ports], the maximum of `values`, [nodes], over the readers; 0 without
        any."""
        found = np.zeros(self.num_ports, dtype=values.dtype)
        np.maximum.at(found, self.port, values[self.node])
        return found


def copied_ports(graph: Graph) -> np.ndarray:
    """Return [ports], for the port of a shared copy or of a view, the port that it
    copies, looking through a second copy; NOWHERE for all others."""
    columns = graph.columns
    of_node = np.full(len(graph.nodes), NOWHERE)
    is_copied = (columns.is_copy | are_views(graph))[columns.target]
    copies, sources = columns.target[is_copied], columns.source[is_copied]
    of_node[copies] = sources
    behind = of_node[columns.maker[sources]]
    of_node[copies] = np.where(behind == NOWHERE, sources, behind)
    return of_node[columns.maker]


def read_ports(graph: Graph) -> np.ndarray:
    """Return [edges], the port that is read: for a fused reader of a copy in front of
    fusible ops, the port behind the copy."""
    columns = graph.columns
    is_front = np.zeros(len(graph.nodes), dtype=bool)
    is_front[list(graph.fronts)] = True
    is_behind = (
        columns.is_fused[columns.target] & is_front[columns.maker[columns.source]]
    )
    return np.where(is_behind, copied_ports(graph)[columns.source], columns.source)


@dataclass(frozen=True, slots=True, eq=False)
class PortReads:
    """The reads of every port, as lists of length [ports].

    Attributes:
      count, num_matmuls: number of its reads, and of those by matmuls.
      deepest: the deepest level at which it is read.
      is_needed: whether some reader needs it in memory.
      ends_fusion: whether some reader needs it in memory, where a matmul's fusion
        computes it.
      feeds_matmul, is_parted: whether some reader fuses into the matmul that it is
        computed for, and whether other readers do not.
    """

    count: list[int]
    num_matmuls: list[int]
    deepest: list[int]
    is_needed: list[bool]
    ends_fusion: list[bool]
    feeds_matmul: list[bool]
    is_parted: list[bool]

    @classmethod
    def of(
        cls,
        readers: Readers,
        columns: Columns,
        depth: MatmulDepth,
        before: Mapping[int, int],
        with_matmuls: bool,
    ) -> PortReads:
        """Count the reads of every port.

        Args:
          readers: of all ports.
          columns, depth: of the graph.
          before: node id → the only matmul that it is computed for.
          with_matmuls: whether elementwise producers fuse into matmuls.
        """
        fuses = columns.is_op & columns.is_fused
        computes = fuses | columns.hosts_fusion if with_matmuls else fuses
        runs_before = np.zeros(len(fuses), dtype=bool)
        runs_before[list(before)] = True
        num_before, num_else = readers.count(runs_before), readers.count(~runs_before)
        return cls(
            (num_before + num_else).tolist(),
            readers.count(columns.hosts_fusion).tolist(),
            readers.largest(np.array(depth.at)).tolist(),
            (readers.count(~computes) > 0).tolist(),
            (readers.count(~fuses) > 0).tolist(),
            (num_before > 0).tolist(),
            ((num_before > 0) & (num_else > 0)).tolist(),
        )
