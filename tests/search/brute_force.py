"""The truth for small problems: every choice of every node, by enumeration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rhino_jax.cost.collectives import collective_s
from rhino_jax.cost.reshard import reshard_steps
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.layout import lay_out
from rhino_jax.hardware.target import Target
from rhino_jax.ir.spec import shards_per_dim
from rhino_jax.search.build import Model, build_model
from rhino_jax.search.flatten import flatten
from rhino_jax.search.options import own_steps
from rhino_jax.search.problem import PairTable, Problem
from rhino_jax.search.resharding import TIE_S


def model_of(
    fn: Callable[..., Any],
    args: Sequence[Any],
    mesh: Mapping[str, int],
    target: Target,
    budget_bytes: float = math.inf,
) -> Model:
    """The search model of a function on a mesh."""
    traced = trace(fn, args, {})
    laid = lay_out(target, tuple(mesh.items()))
    return build_model(flatten(traced.program), laid, target, {}, budget_bytes)


def objectives(costs: list[np.ndarray], edges: list[PairTable]) -> np.ndarray:
    """The objective of all choices as one array, an axis per node."""
    sizes = [len(c) for c in costs]
    assert math.prod(sizes) <= 20_000_000, sizes
    total = np.zeros(sizes)
    for i, cost in enumerate(costs):
        total += cost.reshape([-1 if k == i else 1 for k in range(len(sizes))])
    for e in edges:
        if e.source == e.target:
            table = np.diagonal(e.table)
            shape = [-1 if k == e.source else 1 for k in range(len(sizes))]
        else:
            table = e.table if e.source < e.target else e.table.T
            low, high = sorted((e.source, e.target))
            shape = [sizes[k] if k in (low, high) else 1 for k in range(len(sizes))]
        total = total + table.reshape(shape)
    return total


def best_by_enumeration(problem: Problem) -> float:
    """Smallest objective of any choice that fits, or infinity."""
    if math.isinf(problem.limit):
        return float(objectives(problem.costs, problem.edges).min())
    best = math.inf
    for choice in itertools.product(*(range(len(c)) for c in problem.costs)):
        if problem.peak(choice) <= problem.limit:
            best = min(best, problem.objective(choice))
    return best


def recomputed_objective_s(model: Model, labels: np.ndarray, target: Target) -> float:
    """The objective from specs alone, without the search's tables."""
    graph, mesh = model.graph, model.mesh
    total = 0.0
    for node in graph.nodes:
        label = int(labels[node.id])
        total += node.count * float(model.options[node.id].compute_s[label])
        for step in own_steps(
            graph.program, node, model.options[node.id].strategies[label], mesh
        ):
            axes = [mesh.axes[a] for a in step.axes]
            total += node.count * collective_s(step.kind, step.local_bytes, axes)
    for edge in graph.edges:
        have = model.spec(edge.source, int(labels[edge.source.node]))
        want = model.wanted(edge, int(labels[edge.target]))
        if have == want:
            continue
        whole = graph.program.values[edge.value].bytes
        local = whole / math.prod(shards_per_dim(want, mesh.sizes))
        total += edge.count * (TIE_S + 2 * local / target.hbm_bytes_per_s)
        for step in reshard_steps(
            have, want, whole, mesh.sizes, by_axis=mesh.gathers_by_axis
        ):
            axes = [mesh.axes[a] for a in step.axes]
            total += edge.count * collective_s(step.kind, step.local_bytes, axes)
    return total
