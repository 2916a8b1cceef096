"""Gradients of convolutions, which are library calls where nothing comes between.

The gradient by the input is a convolution by the reversed kernel, of a gradient that
is dilated by the stride. XLA:GPU sees that where the reversal comes right before the
convolution, and calls cuDNN's own gradient: it reads the kernel as it lies, and
multiplies no zeros. Where the kernel is resharded between the two, each device
reverses its part in a kernel of its own, pads the dilated operand with its zeros
(cuDNN convolves none that is dilated), and multiplies with them: four times the
arithmetic where the strides are 2 x 2. What is gathered behind the reversal is not
what the forward pass gathers, and sent a second time.

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
"""Which operand of a convolution it is."""


def find_reversals(graph: Graph) -> frozenset[int]:
    """Nodes that reverse a kernel for one convolution only."""
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
    """The options where kernels are read reversed: that itself costs nothing."""
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
    """Seconds that a convolution takes longer where its kernel is resharded after it
    was reversed; of a kernel of one position nothing is reversed.

    Args:
      edge: from the reversal to the convolution.
      graph: the program.
      options: of the convolution.
      sizes: of values, under lists of specs.
      target: the hardware.
    Returns:
      [options].
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
    # Written and read again, as what is padded is.
    traffic, launches = 2.0 * kernel, 1
    if op.traits.input_dilation > 1:
        traffic, launches = traffic + 2 * op.traits.input_dilation * padded, 2
    dtype = values[op.operands[0]].dtype
    zeros_s = op_s(target, (op.traits.input_dilation - 1) * options.flops, none, dtype)
    return zeros_s + op_s(target, none, traffic, dtype) + launches * target.launch_s
