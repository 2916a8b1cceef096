"""Kernels that XLA:GPU adds or saves: second passes of sums, reversals of weights.

Sums are computed in two kernels where columns (sums over dims other than the last) or
rows are long. XLA:GPU gives each block of a kernel a part of a sum, and lets no two
blocks add to the same result: where sums are longer than one block computes, a first
kernel writes a sum per part, and a second adds these (`Observed.longest_column`,
`longest_sum`). A product of two vectors is a sum of products.
Source: openxla/xla, xla/service/gpu/transforms/tree_reduction_rewriter.cc.

Reversals of convolution kernels are folded into the gradient calls of cuDNN. The
gradient with respect to the input is a convolution of the gradient of the output,
dilated by the stride, with the reversed kernel. Where the reversal comes right before
the convolution, XLA:GPU calls the gradient of cuDNN: it reads the kernel as stored, and
multiplies no zeros. Where the kernel is resharded between the two, each device reverses
its shard in a kernel of its own, pads the dilated operand with its zeros (cuDNN
convolves no dilated operand), and multiplies with them: four times the arithmetic where
the strides are 2 x 2. A gather behind the reversal is not the gather of the forward
pass, and is sent a second time.
Source: openxla/xla, xla/service/gpu/transforms/conv_rewriter.cc, `MatchBackwardInput`;
seen in HLO of jax 0.12.0.1, 8 H100: `cudnn-conv-bias-activation` of 19.3 GFLOP in a
ResNet, where replicated kernels give `cudnn-conv-bw-input` of 4.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rhino_jax.analysis.convolutions import KERNEL, find_reversals
from rhino_jax.analysis.graph import Edge, Graph, Node
from rhino_jax.analysis.matmul_depth import SUMS, reduces_columns
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.cost.compute import op_s, traffic_s
from rhino_jax.hardware.lowering import OBSERVED
from rhino_jax.hardware.mesh import LaidMesh
from rhino_jax.hardware.target import Target
from rhino_jax.ir.factor import FactorKind, Rule
from rhino_jax.model.options import Options
from rhino_jax.model.sizes import LocalSizes
from rhino_jax.model.strategies import Strategy, local_factors


def with_second_passes(
    analysis: ProgramAnalysis, mesh: LaidMesh, options: Sequence[Options]
) -> list[Options]:
    """Return the options with, for long sums, the cost of the second kernel."""
    changed, target = list(options), analysis.target
    if not target.device.parts_columns:
        return changed
    found: dict[tuple[int, Rule], Options] = {}
    for node in analysis.graph.nodes:
        longest = _longest_sum(node)
        own, rule = options[node.id], node.rule
        if longest is None or rule is None:
            continue
        key = id(own), rule
        if key not in found:
            is_long = _rows(rule, own.strategies, mesh) > longest
            found[key] = own.slower(target.device.launch_s * is_long)
        changed[node.id] = found[key]
    return changed


def _longest_sum(node: Node) -> int | None:
    """Return how many elements one kernel sums for an element of an op's result; None
    for ops that are no sums on vector units."""
    if reduces_columns(node):
        return OBSERVED.longest_column
    is_sum = node.is_fused and node.op_kind in SUMS
    return OBSERVED.longest_sum if is_sum else None


def _rows(rule: Rule, found: Sequence[Strategy], mesh: LaidMesh) -> np.ndarray:
    """Return [strategies], the number of elements that one device adds for each element
    of its result."""
    kept = {f for dim in rule.results[0] for f in dim}
    summed = {f for dim in rule.operands[0] for f in dim} - kept
    return local_factors(rule, found, mesh.sizes)[:, list(summed)].prod(axis=1)


def with_reversals(
    analysis: ProgramAnalysis, options: Sequence[Options]
) -> list[Options]:
    """Return the options with reversals of kernels at no cost, where cuDNN reads them
    reversed."""
    changed = list(options)
    if not analysis.target.device.calls_cudnn:
        return changed
    free: dict[int, Options] = {}
    for node in find_reversals(analysis.graph):
        own = options[node]
        if id(own) not in free:
            nothing = np.zeros(len(own.strategies))
            free[id(own)] = replace(own, cost_s=nothing, compute_s=nothing)
        changed[node] = free[id(own)]
    return changed


def apart_s(
    edge: Edge, graph: Graph, options: Options, sizes: LocalSizes, target: Target
) -> np.ndarray:
    """Return the seconds that a convolution takes longer where its kernel is resharded
    after the reversal; zeros for a kernel of one position, where nothing is reversed.

    Args:
      edge: from the reversal to the convolution.
      graph: the program.
      options: the options of the convolution.
      sizes: local sizes of values, under lists of specs.
      target: the hardware.

    Returns:
      [options], seconds per run.
    """
    turns, op = graph.nodes[edge.source.node].op, graph.nodes[edge.target].op
    assert turns is not None and turns.rule is not None and op is not None
    none = np.zeros(len(options.strategies))
    if all(f.size == 1 for f in turns.rule.factors if f.kind is FactorKind.WHOLE):
        return none
    values = graph.program.values
    padded, kernel = (
        sizes.held_bytes(options.ins[i], values[op.operands[i]]) for i in (0, KERNEL)
    )
    # Written and read again, as is the padded operand.
    traffic, launches = 2.0 * kernel, 1
    if op.traits.input_dilation > 1:
        traffic, launches = traffic + 2 * op.traits.input_dilation * padded, 2
    dtype = values[op.operands[0]].dtype
    zeros_s = op_s(target, (op.traits.input_dilation - 1) * options.flops, none, dtype)
    return zeros_s + traffic_s(target, traffic) + launches * target.device.launch_s
