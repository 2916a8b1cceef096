"""Column reductions: sums over dims other than the last, in two kernels where columns
are long.

XLA:GPU gives each block of a kernel a part of a column, and lets no two blocks add to
the same result: where columns are longer than one block sums, a first kernel writes a
sum per part, and a second adds these (`Observed.longest_column`).

Source: openxla/xla, xla/service/gpu/transforms/tree_reduction_rewriter.cc.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rhino_jax.analysis.matmul_depth import reduces_columns
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.hardware.mesh import LaidMesh
from rhino_jax.hardware.observed import OBSERVED
from rhino_jax.ir.factor import Rule
from rhino_jax.ir.spec import shards_per_dim
from rhino_jax.model.options import Options
from rhino_jax.model.strategies import Strategy


def with_second_passes(
    analysis: ProgramAnalysis, mesh: LaidMesh, options: Sequence[Options]
) -> list[Options]:
    """Return the options with, for sums over long columns, the cost of the second
    kernel."""
    changed, target = list(options), analysis.target
    if not target.device.parts_columns:
        return changed
    found: dict[tuple[int, Rule], Options] = {}
    for node in analysis.graph.nodes:
        if not reduces_columns(node) or node.op is None or node.op.rule is None:
            continue
        own, rule = options[node.id], node.op.rule
        key = id(own), rule
        if key not in found:
            rows = np.array([_rows(rule, s, mesh) for s in own.strategies])
            added = target.device.launch_s * (rows > OBSERVED.longest_column)
            found[key] = replace(
                own, cost_s=own.cost_s + added, compute_s=own.compute_s + added
            )
        changed[node.id] = found[key]
    return changed


def _rows(rule: Rule, strategy: Strategy, mesh: LaidMesh) -> int:
    """Return the number of elements that one device adds for each element of its
    result."""
    kept = {f for dim in rule.results[0] for f in dim}
    summed = {f for dim in rule.operands[0] for f in dim} - kept
    pieces = shards_per_dim(strategy.cut, mesh.sizes)
    return math.prod(-(-rule.factors[f].size // pieces[f]) for f in summed)
