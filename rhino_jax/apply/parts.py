"""Ops that XLA does not partition, though every device could do its part alone.

XLA gathers the operands of an FFT and of a convolution of several groups, and on CPU
those of a top-k: seen with jax 0.10.2, of what is cut by rows or images over 8 CPU
devices. Where a plan cuts only dims that they treat one by one, `shard_map` runs them
on every device's part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax

from rhino_jax._compat import bind_eqn
from rhino_jax.apply.constraints import partition_spec
from rhino_jax.ir.factor import FactorKind, Layout, Rule
from rhino_jax.ir.program import Op
from rhino_jax.ir.spec import Spec


def run_each_part(
    op: Op, eqn: Any, specs: Sequence[Spec | None], args: Sequence[Any], mesh: Any
) -> list[Any] | None:
    """Run an op on every device's part of its operands.

    Args:
      op: the op.
      eqn: its equation.
      specs: how operands, then results, are held.
      args: the operands.
      mesh: a mesh whose axes are all Auto.
    Returns:
      Its results; None where it is to run as it is.
    """
    if op.rule is None or not op.traits.is_gathered or not _is_cut(specs):
        return None
    layouts = (*op.rule.operands, *op.rule.results)
    cuts = _cuts(op.rule, layouts, specs, mesh.axis_sizes)
    if cuts is None:
        return None
    params = dict(eqn.params)
    for name in params.keys() & {"feature_group_count", "batch_group_count"}:
        groups = params[name]
        if groups > 1:
            # What dims of several factors are cut by are groups.
            (factor,) = {dim[0] for x in layouts for dim in x if len(dim) > 1}
            by = math.prod(mesh.axis_sizes[a] for a in cuts.get(factor, ()))
            params[name] = groups // by
    specs_of_parts = [
        partition_spec(spec, v.aval.shape, mesh)
        for spec, v in zip(specs, (*eqn.invars, *eqn.outvars), strict=True)
        if spec is not None
    ]
    return jax.shard_map(
        lambda *parts: list(bind_eqn(eqn, parts, params)),
        mesh=mesh,
        in_specs=tuple(specs_of_parts[: len(args)]),
        out_specs=specs_of_parts[len(args) :],
        check_vma=False,
    )(*args)


def _is_cut(specs: Sequence[Spec | None]) -> bool:
    return any(axes for spec in specs if spec is not None for axes in spec)


def _cuts(
    rule: Rule,
    layouts: Sequence[Layout],
    specs: Sequence[Spec | None],
    sizes: Sequence[int],
) -> dict[int, tuple[int, ...]] | None:
    """Factor → mesh axes that cut it; None where that is not the same everywhere, or
    parts would not be alike, or depend on each other."""
    cuts: dict[int, tuple[int, ...]] = {}
    for layout, spec in zip(layouts, specs, strict=True):
        if spec is None:
            return None
        for dim, axes in zip(layout, spec, strict=True):
            if dim and cuts.setdefault(dim[0], axes) != axes:
                return None
            if not dim and axes:
                return None
    for f, axes in cuts.items():
        factor, pieces = rule.factors[f], math.prod(sizes[a] for a in axes)
        if axes and (factor.kind is not FactorKind.PARALLEL or factor.size % pieces):
            return None
    return cuts
