"""Dims that a compiler never lays out on the lanes (the minor dim) of a tile.

Of the dims that a reshape splits one dim into, only the last may be: with another
there, the reshape would be a transpose. GroupNorm's f32[8,16,16,32,8] of 256 channels
is stored with 16 columns of the image on its lanes, not its 32 groups (U-Net on
v5e:4x4, libtpu 0.0.52). Where nothing reshards it, the compiler may never materialise
it at all.
"""

from __future__ import annotations

from rhino_jax.analysis.dim_classes import DimClasses, Element
from rhino_jax.analysis.graph import Graph, NodeKind


def dims_off_lanes(graph: Graph, dim_classes: DimClasses) -> dict[int, tuple[int, ...]]:
    """Return, by value id, the dims that never lie on lanes; values without any are
    left out.

    Args:
      graph: the program.
      dim_classes: the dim classes of its graph.
    """
    parts: set[tuple[Element, int]] = set()
    # Many ops share one rule.
    major: dict[int, list[int]] = {}
    for node in graph.nodes:
        if node.kind is not NodeKind.OP:
            continue
        assert node.op is not None and node.op.rule is not None
        rule = node.op.rule
        factors = major.get(id(rule))
        if factors is None:
            layouts = (*rule.operands, *rule.results)
            factors = [f for layout in layouts for dim in layout for f in dim[:-1]]
            major[id(rule)] = factors
        if factors:
            names = dim_classes.factors(node)
            parts |= {(names[f], rule.factors[f].size) for f in factors}
    if not parts:
        return {}
    found: dict[int, tuple[int, ...]] = {}
    for value, port in graph.held.items():
        dims = dim_classes.results(graph.nodes[port.node], port.result)
        shape = graph.program.values[value].shape
        # A merged dim has the class of its major factor: sizes tell the two apart.
        off = tuple(
            d
            for d, (element, size) in enumerate(zip(dims, shape, strict=True))
            if (element, size) in parts
        )
        if off:
            found[value] = off
    return found
