"""Collectives inside an op: halo exchanges before it, merges of shards' results, and
reductions of partial results after it; and values in the type in which they are sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from rhino_jax.analysis.graph import Edge, Graph, NodeKind
from rhino_jax.cost.collectives import collective_s
from rhino_jax.cost.combine import combine_steps
from rhino_jax.cost.reshard import ReshardStep
from rhino_jax.hardware.lowering import OBSERVED, LoweringPolicy
from rhino_jax.hardware.mesh import LaidMesh
from rhino_jax.ir.collectives import ALL_GATHER, PERMUTE
from rhino_jax.ir.factor import FactorKind, Rule
from rhino_jax.ir.program import Manual, Op, Program, Value, item_bytes
from rhino_jax.ir.spec import Spec, num_shards, share_of
from rhino_jax.model.strategies import Strategy


def own_steps(
    program: Program,
    op: Op | None,
    strategy: Strategy,
    mesh: LaidMesh,
    sum_size: int = 1,
) -> tuple[ReshardStep, ...]:
    """Return the collectives of one strategy, in the order in which they run.

    Args:
      program, op, strategy, mesh: the program, its op, one of its strategies, the mesh.
      sum_size: number of ops whose partial results are reduced as one sum, of which
        each sends its part (`rhino_jax.analysis.reduction_sums`).
    """
    if op is None or op.rule is None:
        return ()
    steps = list(by_hand_steps(op, mesh))
    steps += _halo_steps(program, op, op.rule, strategy, mesh)
    steps += _merge_steps(op.rule, strategy, mesh)
    for r, summed in _summed(op.rule).items():
        if not any(strategy.cut[f] for f in summed):
            continue  # every device has the complete result
        made, done = strategy.made[r], strategy.results[r]
        local = _partial_bytes(program, op, r, made, mesh) / sum_size
        steps += combine_steps(made, done, strategy.partial, local, mesh)
    return tuple(steps)


class _Price(NamedTuple):
    """The seconds of combining partial results: a fixed part, and one per byte of
    them."""

    fixed_s: float
    s_per_byte: float


@dataclass(slots=True)
class OpCollectives:
    """The costs of the collectives that `own_steps` lists, with equal combinations
    cached.

    Attributes:
      program, mesh: the program, and the mesh that it runs on.
    """

    program: Program
    mesh: LaidMesh
    _prices: dict[tuple[Spec, Spec, tuple[int, ...]], _Price] = field(
        default_factory=dict
    )

    def seconds(self, op: Op, rule: Rule, strategies: Sequence[Strategy]) -> np.ndarray:
        """Return [strategies], the seconds of all collectives of each."""
        by_hand = sum(map(self._seconds, by_hand_steps(op, self.mesh)))
        total = np.full(len(strategies), float(by_hand))
        if any(f.kind is FactorKind.HALO for f in rule.factors):
            for k, s in enumerate(strategies):
                halos = _halo_steps(self.program, op, rule, s, self.mesh)
                total[k] += sum(map(self._seconds, halos))
        if any(f.kind is FactorKind.MERGE for f in rule.factors):
            for k, s in enumerate(strategies):
                total[k] += sum(map(self._seconds, _merge_steps(rule, s, self.mesh)))
        return total + self.reductions_s(op, rule, strategies).sum(0)

    def reductions_s(
        self, op: Op, rule: Rule, strategies: Sequence[Strategy]
    ) -> np.ndarray:
        """Return [2, strategies], the latency of the reductions of partial results, and
        the seconds of their bytes."""
        total = np.zeros((2, len(strategies)))
        for r, summed in _summed(rule).items():
            for k, s in enumerate(strategies):
                if not any([s.cut[f] for f in summed]):
                    continue
                made, done = s.made[r], s.results[r]
                price = self._price(made, done, s.partial)
                local = _partial_bytes(self.program, op, r, made, self.mesh)
                total[:, k] += price.fixed_s, price.s_per_byte * local
        return total

    def _price(self, made: Spec, done: Spec, partial: tuple[int, ...]) -> _Price:
        key = made, done, partial
        found = self._prices.get(key)
        if found is None:
            many = float(1 << 40)
            fixed_s, all_s = (
                sum(map(self._seconds, combine_steps(*key, size, self.mesh)))
                for size in (0.0, many)
            )
            found = self._prices[key] = _Price(fixed_s, (all_s - fixed_s) / many)
        return found

    def _seconds(self, step: ReshardStep) -> float:
        axes = self.mesh.over(step.axes)
        return step.runs * collective_s(step.kind, step.local_bytes, axes)


def as_read(op: Op | None, value: Value, lowering: LoweringPolicy) -> Value:
    """Return an operand of an op in the element type in which it is sent to the op.

    XLA:TPU multiplies float32 at JAX's default precision in one pass of bfloat16. It
    rounds the operands on the devices that have them, and gathers, permutes and
    exchanges bfloat16: half of the bytes of an MLP's weights under FSDP, and of the
    halos of a ConvNeXt (HLO of v5e:2x4 and v5e:4x4, libtpu 0.0.52). Sums of partial
    results stay in float32.
    """
    is_rounded = op is not None and op.traits.is_rounded and lowering.rounds_products
    if not is_rounded or value.dtype != "float32":
        return value
    return replace(value, dtype="bfloat16")


def splits(value: Value, lowering: LoweringPolicy) -> bool:
    """Whether an array is two arrays of its parts."""
    return lowering.splits_complex and value.dtype.startswith("complex")


def is_rounded_halo(
    program: Program, op: Op, step: ReshardStep, mesh: LaidMesh
) -> bool:
    """Whether a collective of an op is a halo exchange of a rounded operand."""
    if step.kind != PERMUTE or not op.traits.is_rounded:
        return False
    value = program.values[op.operands[0]]
    return as_read(op, value, mesh.lowering) != value


def sent_value(graph: Graph, edge: Edge, lowering: LoweringPolicy) -> Value:
    """Return the value that an edge carries, in the element type in which it is sent.

    A copy for several readers is rounded if all of them are products.
    """
    value, node = graph.program.values[edge.value], graph.nodes[edge.target]
    if node.kind is not NodeKind.COPY:
        return as_read(node.op if node.kind is NodeKind.OP else None, value, lowering)
    read = [sent_value(graph, e, lowering) for e in graph.outgoing[node.id]]
    return max(read, key=lambda v: v.bytes, default=value)


def by_hand_steps(op: Op, mesh: LaidMesh) -> Iterator[ReshardStep]:
    """Yield the collectives of an op that its user partitioned manually over this very
    mesh."""
    if op.manual is None or not is_over(op.manual, mesh):
        return
    place = {a.name: i for i, a in enumerate(mesh.axes)}
    for c in op.manual.collectives:
        axes = tuple(place[name] for name in c.axes)
        yield ReshardStep(c.kind, axes, float(c.local_bytes), c.runs)


def is_over(manual: Manual, mesh: LaidMesh) -> bool:
    """Whether a manual partitioning is written for this mesh."""
    return manual.mesh_axes == tuple((a.name, a.size) for a in mesh.axes)


def _halo_steps(
    program: Program, op: Op, rule: Rule, strategy: Strategy, mesh: LaidMesh
) -> Iterator[ReshardStep]:
    """Yield the halo exchanges, dim by dim: those of later dims include the corners."""
    extended = 1.0
    for f, (axes, factor) in enumerate(zip(strategy.cut, rule.factors, strict=True)):
        if not axes or factor.kind is not FactorKind.HALO:
            continue
        # The window slides over the first operand that has the factor.
        for o, layout in enumerate(rule.operands):
            dim = next((d for d, factors in enumerate(layout) if f in factors), None)
            if dim is None:
                continue
            value = as_read(op, program.values[op.operands[o]], mesh.lowering)
            cut = num_shards(axes, mesh.sizes)
            held = share_of(strategy.operands[o], value.shape, mesh.sizes)
            width = value.shape[dim] / cut
            local = value.bytes * held * extended
            border = factor.border(cut)
            for halo in border:
                if halo and not factor.is_received:
                    yield ReshardStep(PERMUTE, axes, local * halo / width)
            extended *= 1 + sum(border) / width
            break


def _merge_steps(
    rule: Rule, strategy: Strategy, mesh: LaidMesh
) -> Iterator[ReshardStep]:
    """Yield the all-gathers of what every shard of a MERGE factor sends, one per array
    where the compiler does not combine them."""
    for f, (axes, factor) in enumerate(zip(strategy.cut, rule.factors, strict=True)):
        if not axes or factor.kind is not FactorKind.MERGE:
            continue
        others = math.prod(
            other.size / num_shards(cut, mesh.sizes)
            for g, (cut, other) in enumerate(
                zip(strategy.cut, rule.factors, strict=True)
            )
            if g != f
        )
        shards = num_shards(axes, mesh.sizes)
        items = min(factor.sent_items * shards, factor.size) * others
        sent = factor.sent_item_bytes
        for item in (sum(sent),) if mesh.lowering.combines else sent:
            yield ReshardStep(ALL_GATHER, axes, items * item)


def _summed(rule: Rule) -> dict[int, list[int]]:
    """Return, by position of a result, the factors over which it is reduced."""
    found: dict[int, list[int]] = {}
    for f in range(len(rule.factors)):
        for r in rule.partial_results(f):
            found.setdefault(r, []).append(f)
    return dict(sorted(found.items()))


def _partial_bytes(
    program: Program, op: Op, result: int, made: Spec, mesh: LaidMesh
) -> float:
    whole = program.values[op.results[result]]
    local = whole.bytes * share_of(made, whole.shape, mesh.sizes)
    if op.traits.is_contraction and splits(whole, mesh.lowering):
        local *= OBSERVED.real_products / 2
    return max(local, item_bytes("bool"))
