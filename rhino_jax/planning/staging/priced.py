"""Predicted seconds of every op under a plan."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rhino_jax.ir.program import Program
from rhino_jax.search.found import Found


def seconds_by_op(found: Found) -> dict[int, float]:
    """What every op of a found plan takes, with the collectives that it waits for.

    Times of a step, so of all runs of an op; what collectives hide behind compute is
    taken off all ops alike, so that they sum up to the predicted step.

    Args:
      found: a search that found something.
    """
    solved = found.solved[0]
    model, labels = solved.mesh_problem.model, solved.solution.labels
    assert labels is not None, "nothing was found"
    seconds = np.array(
        [costs[label] for costs, label in zip(model.problem.costs, labels, strict=True)]
    )
    for source, target, table in model.problem.edges:
        seconds[target] += table[labels[source], labels[target]]
    total = seconds.sum()
    scale = float(found.step_s / total) if total else 1.0
    by_op: dict[int, float] = {}
    for node, own in zip(model.graph.nodes, seconds, strict=True):
        if node.op is not None:
            by_op[node.op.id] = by_op.get(node.op.id, 0.0) + scale * float(own)
    return by_op


def with_regions(program: Program, seconds: Mapping[int, float], op_id: int) -> float:
    """Of an op and all in its regions."""
    op = program.ops[op_id]
    inner = () if op.call is None else op.call.regions
    return seconds.get(op_id, 0.0) + sum(
        with_regions(program, seconds, o) for region in inner for o in region.ops
    )
