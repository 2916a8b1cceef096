"""The analysis of a program for some hardware, before it is laid over a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rhino_jax.analysis.dim_classes import (
    DimClasses,
    dims_off_lanes,
    find_dim_classes,
)
from rhino_jax.analysis.equivalence import Alike, find_equivalent
from rhino_jax.analysis.fusing import Fusing
from rhino_jax.analysis.graph import Graph
from rhino_jax.analysis.inline_regions import inline_regions
from rhino_jax.analysis.liveness import Liveness, analyse
from rhino_jax.analysis.on_chip import MAX_SHARDS
from rhino_jax.analysis.padding import uneven_dims
from rhino_jax.analysis.reduction_levels import find_latency_shares
from rhino_jax.analysis.reduction_sums import find_sums
from rhino_jax.analysis.roles import Roles, find_roles
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Program
from rhino_jax.solver.overlap import Slack


@dataclass(frozen=True, slots=True, eq=False)
class ProgramAnalysis:
    """The analyses that the models of all meshes share.

    Attributes:
      graph: the program.
      target: the hardware that it runs on.
      liveness: when its values are in memory, and what its kernels read and launch.
      slack: which collectives something waits for, as far as the compiler overlaps or
        combines them.
      dim_classes, roles: the dim classes and the roles of its inputs.
      padded_dims: sizes of dims that may be sharded unevenly.
      off_lanes: value id → its dims that never lie on lanes (see `dims_off_lanes`).
      latency_shares: as `find_latency_shares` returns them, for compilers that combine
        reductions by level; else empty.
      sums: as `find_sums` returns them, for compilers that reduce a sum once; else
        empty.
      alike: which nodes have the same options on every mesh.
    """

    graph: Graph
    target: Target
    liveness: Liveness
    slack: Slack
    dim_classes: DimClasses
    roles: Roles
    padded_dims: frozenset[int]
    off_lanes: Mapping[int, tuple[int, ...]]
    latency_shares: Mapping[int, tuple[float, ...]]
    sums: Mapping[int, tuple[int, ...]]
    alike: Alike

    @classmethod
    def of(cls, program: Program, target: Target) -> ProgramAnalysis:
        """Analyse a program."""
        return cls.of_graph(inline_regions(program, **target.device.inlining), target)

    @classmethod
    def of_graph(cls, graph: Graph, target: Target) -> ProgramAnalysis:
        """Analyse the graph of a program."""
        device = target.device
        dim_classes = find_dim_classes(graph)
        devices = target.num_devices or MAX_SHARDS
        liveness = analyse(graph, Fusing.of(device), devices)
        off_lanes = dims_off_lanes(graph, dim_classes) if device.tile else {}
        return cls(
            graph,
            target,
            liveness,
            liveness.slack.where(device.free_share is not None),
            dim_classes,
            find_roles(graph, dim_classes),
            uneven_dims(graph),
            off_lanes,
            find_latency_shares(graph, dim_classes) if device.combines_levels else {},
            find_sums(graph) if device.lowering.reassociates else {},
            find_equivalent(graph, liveness, off_lanes),
        )
