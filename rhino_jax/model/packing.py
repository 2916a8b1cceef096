"""Combined collectives: fewer reductions, less latency, and kernels that pack and
unpack their buffers.

Partial results that are only added to one another are reduced as one sum (see
`rhino_jax.analysis.reduction_sums`): each pays its part of one reduction. Whether all
of them are sharded alike is not known to the costs of one; those that can be are taken
to be.

XLA:TPU combines reductions of one level, which then share one latency (see
`rhino_jax.analysis.reduction_levels`).

XLA:GPU combines the collectives that nothing waits for, the gathers of weights and the
reductions of their gradients, into few, so that their latency is paid few times. A
combined all-reduce works on one buffer, which the gradients are copied to and sliced
out of again. A combined reduce-scatter needs no buffer, but moves whole rows: a
gradient that is scattered along a dim other than the first is updated transposed,
followed by a copy of the parameter and of each moment. One that is scattered over some
axes and reduced over others is reduced over all, and sliced. Each of these is a kernel
of the compute stream; dozens of biases and norms cost more than their collectives (seen
in HLO of jax 0.10.2, 8 H100: most of the 69 kernels that a plan of a BERT had more than
FSDP).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from rhino_jax.analysis.graph import Graph, Node, NodeKind
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.analysis.slack import COMBINED
from rhino_jax.hardware.lowering import OBSERVED
from rhino_jax.hardware.mesh import LaidMesh
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Op, Program, item_bytes
from rhino_jax.ir.spec import Spec, local_shape
from rhino_jax.ir.traits import OpKind
from rhino_jax.model.op_collectives import OpCollectives
from rhino_jax.model.options import Options
from rhino_jax.model.strategies import Strategy


def are_combined(analysis: ProgramAnalysis) -> list[bool]:
    """Return [edges], whether the reshards on each are combined with others."""
    combines = analysis.target.device.lowering.combines
    return [combines and wait in COMBINED for wait in analysis.slack.edges]


def find_sum_sizes(
    analysis: ProgramAnalysis, options: Sequence[Options]
) -> Mapping[int, Mapping[tuple[int, ...], int]]:
    """Return node id → mesh axes over which its results may be partial → number of ops,
    itself among them, that are reduced with it as one sum; absent: 1.

    Args:
      analysis: the program.
      options: [nodes], the options of each.
    """
    members = {id(together): together for together in analysis.sums.values()}
    sizes = {
        key: Counter(
            axes
            for node in together
            for axes in {s.partial for s in options[node].strategies if s.partial}
        )
        for key, together in members.items()
    }
    return {node: sizes[id(together)] for node, together in analysis.sums.items()}


def latency_share(
    analysis: ProgramAnalysis, node: Node, strategy: Strategy, sum_size: int
) -> float:
    """Return the share of their latency that a node's reductions pay under one of its
    strategies, where as many ops are reduced as one sum."""
    if not strategy.partial:
        return 1.0
    if _is_packed(analysis, node):
        return OBSERVED.combined_latency / sum_size
    shares = analysis.latency_shares.get(node.id, ())
    cut = zip(shares, strategy.cut[: len(shares)], strict=True)
    share = max((share for share, axes in cut if axes), default=0.0) or 1.0
    # Those of one sum are of one level, which is paid once.
    return min(share, 1 / sum_size)


def _is_packed(analysis: ProgramAnalysis, node: Node) -> bool:
    """Whether a node's reductions are packed into one buffer with others."""
    combines = analysis.target.device.lowering.combines
    return combines and analysis.slack.nodes[node.id] in COMBINED


def with_packing(
    analysis: ProgramAnalysis, mesh: LaidMesh, options: Sequence[Options]
) -> list[Options]:
    """Return the options with the costs of combined reductions."""
    op_collectives = OpCollectives(analysis.graph.program, mesh)
    program, params = analysis.graph.program, max(1, len(analysis.roles.params))
    copies = 1 + len(analysis.roles.state) // params
    found: dict[tuple[object, ...], Options] = {}
    packed, sums = list(options), find_sum_sizes(analysis, options)
    for node in analysis.graph.nodes:
        op, is_packed = node.op, _is_packed(analysis, node)
        sizes = sums.get(node.id, {})
        shares = analysis.latency_shares.get(node.id)
        if node.kind is not NodeKind.OP or op is None:
            continue
        if not (is_packed or shares or sizes):
            continue
        own = options[node.id]
        if not any(s.partial for s in own.strategies):
            continue
        # Equivalent nodes share one object of options.
        first, made = None, program.values[op.results[0]]
        if is_packed:
            first = _first_dim(analysis.graph, node)
        key = id(own), made.shape, made.dtype, first, is_packed, shares, *sizes.items()
        if key not in found:
            added = np.zeros(len(own.strategies))
            summed = [sizes.get(s.partial, 1) for s in own.strategies]
            if is_packed:
                added[:] = [
                    _packing_s(program, op, s, mesh, analysis.target, copies, first) / k
                    for s, k in zip(own.strategies, summed, strict=True)
                ]
            assert op.rule is not None
            latency_s, bytes_s = op_collectives.reductions_s(
                op, op.rule, own.strategies
            )
            paid = [
                latency_share(analysis, node, s, k)
                for s, k in zip(own.strategies, summed, strict=True)
            ]
            saved = (1 - np.array(paid)) * latency_s
            saved += (1 - 1 / np.array(summed)) * bytes_s
            found[key] = replace(
                own, cost_s=own.cost_s + added - saved, compute_s=own.compute_s + added
            )
        packed[node.id] = found[key]
    return packed


def _packing_s(
    program: Program,
    op: Op,
    strategy: Strategy,
    mesh: LaidMesh,
    target: Target,
    copies: int,
    first: int | None,
) -> float:
    """Return the seconds of packing and unpacking kernels under one strategy.

    Args:
      program, op: the program, and an op whose reductions are combined.
      strategy: one of its strategies.
      mesh, target: the mesh and hardware.
      copies: number of arrays that are updated with a gradient: the parameter and its
        moments.
      first: the dim of the result that comes first where it is read; None where that is
        unknown.
    """
    if not strategy.partial:
        return 0.0
    total_s, rate = 0.0, target.device.hbm_bytes_per_s * target.device.memory_efficiency
    for r, result in enumerate(op.results):
        value = program.values[result]
        made, done = strategy.made[r], strategy.results[r]
        items = math.prod(local_shape(made, value.shape, mesh.sizes))
        if _scattered(made, done) != set(strategy.partial):
            # Copied to the buffer, and sliced out again.
            traffic = 4 * items * item_bytes(value.dtype)
            total_s += target.device.launch_s + traffic / rate
            total_s += target.device.launch_s * bool(_scattered(made, done))
            continue
        dims = [d for d, (m, n) in enumerate(zip(made, done, strict=True)) if m != n]
        if dims != [first]:
            items = math.prod(local_shape(done, value.shape, mesh.sizes))
            traffic = 2 * items * item_bytes("float32")
            total_s += copies * (target.device.launch_s + traffic / rate)
            total_s += (len(dims) - 1) * target.device.launch_s
    return total_s


def _scattered(made: Spec, done: Spec) -> set[int]:
    """Return the mesh axes over which a result is reduce-scattered."""
    pairs = zip(made, done, strict=True)
    return {a for before, after in pairs for a in after[len(before) :]}


def _first_dim(graph: Graph, node: Node) -> int | None:
    """Return the dim of a gradient that is the first of the parameter, looking through
    transposes; None for scalars."""
    order = list(range(graph.program.values[node.value].rank))
    while len(targets := {e.target for e in graph.outgoing[node.id]}) == 1:
        node = graph.nodes[targets.pop()]
        op = node.op
        if node.kind is not NodeKind.OP or op is None or not _only_moves(op):
            break
        assert op.rule is not None
        have = op.rule.operands[0]
        order = [order[have.index(dim)] for dim in op.rule.results[0]]
    return order[0] if order else None


def _only_moves(op: Op) -> bool:
    """Whether an op converts its operand, or permutes its dims."""
    if op.rule is None or op.traits.kind not in (OpKind.CONVERSION, OpKind.MOVEMENT):
        return False
    if len(op.operands) != 1 or len(op.results) != 1:
        return False
    have, made = op.rule.operands[0], op.rule.results[0]
    return sorted(have) == sorted(made)
