"""The truth for small problems: every choice of every node, by enumeration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.cost.collectives import collective_s
from rhino_jax.cost.reshard import reshard_steps
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.layout import lay_out
from rhino_jax.hardware.target import Target
from rhino_jax.ir.spec import shards_per_dim
from rhino_jax.model.build import MeshModel, build_model
from rhino_jax.model.constants import CONSTANTS
from rhino_jax.model.op_collectives import own_steps, sent_value
from rhino_jax.solver.problem import EdgeUsage, NodeUsage, PairTable, Problem


def model_of(
    fn: Callable[..., Any],
    args: Sequence[Any],
    mesh: Mapping[str, int],
    target: Target,
    budget_bytes: float = math.inf,
) -> MeshModel:
    """The search model of a function on a mesh."""
    traced = trace(fn, args, {})
    laid = lay_out(target, tuple(mesh.items()))
    return build_model(
        ProgramAnalysis.of(traced.program, target), laid, {}, budget_bytes
    )


def every_sum(
    sizes: Sequence[int], tables: Iterable[tuple[int, int, np.ndarray]]
) -> np.ndarray:
    """The sum of tables for all choices as one array, an axis per node; a table with
    one node at both ends is a vector, or says its cost on the diagonal."""
    assert math.prod(sizes) <= 20_000_000, sizes
    total = np.zeros(sizes)
    for source, target, table in tables:
        if source == target:
            part = table if table.ndim == 1 else np.diagonal(table)
        else:
            part = table if source < target else table.T
        shape = [n if k in (source, target) else 1 for k, n in enumerate(sizes)]
        total += part.reshape(shape)
    return total


def objectives(costs: list[np.ndarray], edges: list[PairTable]) -> np.ndarray:
    """The objective of all choices as one array, an axis per node."""
    nodes = [(i, i, cost) for i, cost in enumerate(costs)]
    pairs = [(e.source, e.target, e.table) for e in edges]
    return every_sum([len(c) for c in costs], [*nodes, *pairs])


def peaks(problem: Problem) -> np.ndarray:
    """Largest memory over time of all choices, likewise."""
    usages: list[tuple[NodeUsage | EdgeUsage, int, int]]
    usages = [(u, u.node, u.node) for u in problem.node_usages]
    usages += [(u, u.source, u.target) for u in problem.edge_usages]
    sizes = [len(c) for c in problem.costs]
    most = np.zeros(sizes)
    # Nothing grows but where something starts to be held.
    for time in sorted({u.start for u, _, _ in usages}):
        live = [(a, b, u.usage) for u, a, b in usages if u.start <= time < u.stop]
        np.maximum(most, every_sum(sizes, live), out=most)
    return most


def best_by_enumeration(problem: Problem) -> float:
    """Smallest objective of any choice that fits, or infinity."""
    every = objectives(problem.costs, problem.edges)
    if not math.isinf(problem.limit):
        every[peaks(problem) > problem.limit] = math.inf
    return float(every.min())


def recomputed_objective_s(
    model: MeshModel, labels: np.ndarray, target: Target
) -> float:
    """The objective from specs alone, without the search's tables."""
    graph, mesh = model.graph, model.mesh
    total = 0.0
    for node in graph.nodes:
        label = int(labels[node.id])
        total += node.count * float(model.options[node.id].compute_s[label])
        for step in own_steps(
            graph.program, node.op, model.options[node.id].strategies[label], mesh
        ):
            axes = mesh.over(step.axes)
            total += node.count * collective_s(step.kind, step.local_bytes, axes)
    for edge in graph.edges:
        have = model.spec(edge.source, int(labels[edge.source.node]))
        want = model.wanted(edge, int(labels[edge.target]))
        if have == want:
            continue
        whole = sent_value(graph, edge, mesh.lowering).bytes
        local = whole / math.prod(shards_per_dim(want, mesh.sizes))
        total += edge.count * (
            CONSTANTS.tie_s + 2 * local / target.device.hbm_bytes_per_s
        )
        for step in reshard_steps(have, want, whole, mesh.sizes, mesh.lowering):
            axes = mesh.over(step.axes)
            total += edge.count * collective_s(step.kind, step.local_bytes, axes)
    return total
