"""Reversals of convolution kernels, which XLA:GPU folds into cuDNN's gradient calls.

The gradient with respect to the input is a convolution of the output's gradient,
dilated by the stride, with the reversed kernel. Where the reversal comes right before
the convolution, XLA:GPU calls cuDNN's own gradient: it reads the kernel as stored, and
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

from rhino_jax.analysis.graph import Edge, Graph
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.cost.compute import op_s
from rhino_jax.hardware.target import Target
from rhino_jax.ir.factor import FactorKind
from rhino_jax.ir.traits import OpKind
from rhino_jax.model.options import Options
from rhino_jax.model.sizes import LocalSizes


_KERNEL = 1
"""Position of the kernel among the operands of a convolution."""


def find_reversals(graph: Graph) -> frozenset[int]:
    """Return the ids of nodes that reverse a kernel for a single convolution."""
    found = set()
    for node in graph.nodes:
        edges = graph.outgoing[node.id]
        if node.op is None or not node.op.traits.is_reversal or len(edges) != 1:
            continue
        reader = graph.nodes[edges[0].target].op
        is_convolution = reader is not None and reader.traits.kind is OpKind.CONVOLUTION
        if is_convolution and edges[0].operand == _KERNEL:
            found.add(node.id)
    return frozenset(found)


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
        sizes.held_bytes(options.ins[i], values[op.operands[i]]) for i in (0, _KERNEL)
    )
    # Written and read again, as is the padded operand.
    traffic, launches = 2.0 * kernel, 1
    if op.traits.input_dilation > 1:
        traffic, launches = traffic + 2 * op.traits.input_dilation * padded, 2
    dtype = values[op.operands[0]].dtype
    zeros_s = op_s(target, (op.traits.input_dilation - 1) * options.flops, none, dtype)
    return (
        zeros_s + op_s(target, none, traffic, dtype) + launches * target.device.launch_s
    )
