"""Dims that are cut unevenly: which may be, and what a plan says of those that are.

All shards are as large as the largest, so a dim of 1,001 over 8 devices takes
8 · 126 = 1,008 elements. The compiler masks the padding where it counts; what it costs
is in every price: arithmetic, memory, and what is sent.

Source: Xu et al., "GSPMD: General and Scalable Parallelization for ML Computation
Graphs", 2021, section 4.3 (uneven partitions are padded).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from rhino_jax.analysis.graph import Graph
from rhino_jax.hardware.mesh import LaidMesh
from rhino_jax.ir.factor import FactorKind, Rule
from rhino_jax.ir.program import Op, Program
from rhino_jax.ir.spec import Spec
from rhino_jax.ir.traits import OpKind


def uneven_dims(graph: Graph) -> frozenset[int]:
    """Return the sizes of all dims that may be cut unevenly: those of matmuls, whose
    work is worth the padding, and those between which slices, pads and concatenations
    shift elements, of which one is as good as never a multiple of the other's shards.
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
    """The factors of an op that may be cut unevenly.

    Not those that a window slides over, or that indices address (of what only moves
    elements by constants, they may), or that are a part of a dim.

    Args:
      op: the op; it has a rule.
      dims: sizes that may be cut unevenly.
    """
    rule = op.rule
    assert rule is not None
    if not (op.is_fusible or op.traits.masks_padding):
        return frozenset()
    parts, is_moved = _parts(rule), op.traits.kind is OpKind.MOVEMENT
    return frozenset(
        i
        for i, factor in enumerate(rule.factors)
        if factor.size in dims
        and (factor.kind in (FactorKind.PARALLEL, FactorKind.REDUCE) or is_moved)
        and i not in parts
    )


def _parts(rule: Rule) -> frozenset[int]:
    """Factors that are a part of some dim."""
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
    """What to say of a plan's uneven cuts.

    Args:
      program: the program.
      values: the spec in which each value is held.
      mesh: where it runs.
    """
    # Most values are of few shapes and specs.
    held = Counter((program.values[v].shape, spec) for v, spec in values.items())
    cuts: Counter[tuple[int, tuple[int, ...]]] = Counter()
    for (shape, spec), count in held.items():
        found = {
            (size, axes)
            for size, axes in zip(shape, spec, strict=True)
            if axes and size % math.prod(mesh.sizes[a] for a in axes)
        }
        cuts.update(dict.fromkeys(found, count))
    notes = []
    for (size, axes), count in sorted(cuts.items(), key=lambda c: -c[1]):
        pieces = math.prod(mesh.sizes[a] for a in axes)
        shard = -(-size // pieces)
        names = " × ".join(mesh.names[a] for a in axes)
        notes.append(
            f"a dim of {size} is cut unevenly over {names} in {count} values: {pieces}"
            f" shards of {shard}, {shard * pieces / size - 1:.1%} of padding, which is"
            " in the prices."
        )
    return notes
