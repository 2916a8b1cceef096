"""Uneven sharding: the dims that may be padded, and the notes on those of a plan.

All shards are as large as the largest, so a dim of 1,001 over 8 devices takes 8 · 126 =
1,008 elements. The compiler masks the padding where it matters; its arithmetic, memory
and communication are part of every cost.

Source: Xu et al., "GSPMD: General and Scalable Parallelization for ML Computation
Graphs", 2021, section 4.3 (uneven partitions are padded).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rhino_jax.analysis.graph import Graph
from rhino_jax.hardware.mesh import LaidMesh
from rhino_jax.ir.factor import FactorKind, Rule
from rhino_jax.ir.program import Op, Program
from rhino_jax.ir.spec import Spec, num_shards
from rhino_jax.ir.traits import OpKind


def uneven_dims(graph: Graph) -> frozenset[int]:
    """Return the sizes of all dims that may be sharded unevenly.

    These are the dims of matmuls, whose work is worth the padding, and the operand and
    result dims of slices, pads and concatenations that shift elements: hardly ever does
    one number of shards divide both of them.
    """
    found = set[int]()
    for node in graph.nodes:
        op = node.op
        if op is None or op.rule is None:
            continue
        is_matmul = node.is_matmul and op.traits.masks_padding
        for factor in op.rule.factors:
            if is_matmul:
                found.add(factor.size)
            elif factor.shift is not None and factor.slides_over is not None:
                found |= {factor.size, factor.slides_over}
    return frozenset(found)


def may_pad(op: Op, dims: frozenset[int]) -> frozenset[int]:
    """Return the positions of the factors of an op that may be sharded unevenly.

    Excluded are factors of windows and of indices (unless the op only moves elements by
    constants), and those that are a part of a merged dim.

    Args:
      op: the op; it has a rule.
      dims: sizes that may be sharded unevenly.
    """
    rule = op.rule
    assert rule is not None
    if not (op.is_fusible or op.traits.masks_padding):
        return frozenset()
    parts, is_moved = merged_factors(rule), op.traits.kind is OpKind.MOVEMENT
    return frozenset(
        i
        for i, factor in enumerate(rule.factors)
        if factor.size in dims
        and (factor.kind in (FactorKind.PARALLEL, FactorKind.REDUCE) or is_moved)
        and i not in parts
    )


def merged_factors(rule: Rule) -> frozenset[int]:
    """Return the positions of the factors that are a part of some merged dim."""
    return frozenset(
        f
        for layout in (*rule.operands, *rule.results)
        for dim in layout
        if len(dim) > 1
        for f in dim
    )


def padding_notes(
    program: Program, values: Mapping[int, Spec], mesh: LaidMesh
) -> list[str]:
    """Return the notes of a plan on its unevenly sharded dims.

    Args:
      program: the program.
      values: value id → the spec in which it is held.
      mesh: the mesh that it runs on.
    """
    # Most values share a few shapes and specs.
    held = Counter((program.values[v].shape, spec) for v, spec in values.items())
    cuts: Counter[tuple[int, tuple[int, ...]]] = Counter()
    for (shape, spec), count in held.items():
        found = {
            (size, axes)
            for size, axes in zip(shape, spec, strict=True)
            if axes and size % num_shards(axes, mesh.sizes)
        }
        cuts.update(dict.fromkeys(found, count))
    notes = []
    for (size, axes), count in sorted(cuts.items(), key=lambda c: -c[1]):
        pieces = num_shards(axes, mesh.sizes)
        shard = -(-size // pieces)
        names = " × ".join(mesh.names[a] for a in axes)
        notes.append(
            f"a dim of {size} is cut unevenly over {names} in {count} values: {pieces}"
            f" shards of {shard}, {shard * pieces / size - 1:.1%} of padding, which is"
            " in the prices."
        )
    return notes
