"""Find the mesh axes that shard the factors of an op, from its operands' specs."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from rhino_jax.ir.factor import Dim, FactorKind, Layout, Rule
from rhino_jax.ir.spec import Spec


Cuts = dict[int, tuple[int, ...]]
"""Factor → the mesh axes that shard it, major first; without unsharded factors."""


def find_cuts(
    rule: Rule,
    specs: Sequence[Spec | None],
    sizes: Sequence[int],
    kinds: Collection[FactorKind],
) -> Cuts:
    """Return the mesh axes that shard each factor.

    Args:
      rule: rule of the op.
      specs: specs of its operands; None is replicated.
      sizes: sizes of the mesh axes.
      kinds: kinds of factors that may be sharded.
    Returns:
      Cuts with equal shards; empty where operands disagree, where an axis shards two
      factors, or where shards would differ in size.
    """
    cuts: Cuts = {}
    for layout, spec in zip(rule.operands, specs, strict=True):
        if spec is None:
            continue
        for dim, axes in zip(layout, spec, strict=True):
            if any(rule.factors[f].kind not in kinds for f in dim):
                continue
            for factor, own in zip(dim, _of_dim(rule, dim, axes, sizes), strict=True):
                if cuts.setdefault(factor, own) != own:
                    return {}
    found = {f: axes for f, axes in cuts.items() if axes}
    used = [axis for axes in found.values() for axis in axes]
    is_even = all(
        size % math.prod(sizes[a] for a in axes) == 0
        for f, axes in found.items()
        for size in (rule.factors[f].size, rule.factors[f].slides_over or 0)
    )
    return found if is_even and len(used) == len(set(used)) else {}


def _of_dim(
    rule: Rule, dim: Dim, axes: tuple[int, ...], sizes: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return the axes of each factor of a dim, major first.

    A minor factor is sharded only where those before it have shards of one index.
    """
    found: list[tuple[int, ...]] = []
    for factor in dim[:-1]:
        count, size = 0, rule.factors[factor].size
        while count < len(axes) and size % sizes[axes[count]] == 0:
            size //= sizes[axes[count]]
            count += 1
        found.append(axes[:count])
        axes = axes[count:]
    return [*found, axes] if dim else []


def spec_under(layout: Layout, cuts: Cuts) -> Spec:
    """Return the spec of an operand, or of a result before partial sums are reduced."""
    return tuple(tuple(a for f in dim for a in cuts.get(f, ())) for dim in layout)
