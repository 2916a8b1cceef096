"""Run ops on shards that XLA's partitioner gathers or partitions wrongly.

XLA gathers the operands of an FFT and of a grouped convolution, and on CPU those of a
top-k: seen with jax 0.10.2, for operands sharded by rows or images over 8 CPU devices.
For a convolution whose window is sharded it sums the kernel's gradient over all
devices, replicas included; with channels on another axis, results and all gradients are
wrong; for some grouped ones its checks abort the process (jaxlib 0.10.2 to 0.12.0.1;
the same replica groups are compiled for v5e:2x4 and 8 H100). So `shard_map` runs these,
with halos from neighbours, and all-reduces or reduce-scatters partial sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType

from rhino_jax._compat import bind_eqn
from rhino_jax.ir.factor import FactorKind
from rhino_jax.ir.program import Op
from rhino_jax.ir.spec import Spec
from rhino_jax.ir.traits import OpKind
from rhino_jax.runtime.constraints import partition_spec
from rhino_jax.runtime.on_shards.cuts import Cuts, find_cuts, spec_under
from rhino_jax.runtime.on_shards.merging import MERGED, merged_axes
from rhino_jax.runtime.on_shards.sums import (
    Scatter,
    partial_axes,
    scatters_along,
    summed,
)
from rhino_jax.runtime.on_shards.windows import on_shard


def run_each_part(
    op: Op,
    eqn: Any,
    specs: Sequence[Spec | None],
    args: Sequence[Any],
    mesh: Any,
    route: Sequence[Spec] = (),
) -> list[tuple[Any, Spec]] | None:
    """Run an op on every device's shards of its operands.

    Args:
      op: the op.
      eqn: its equation.
      specs: specs of operands, then of results.
      args: the operands.
      mesh: a mesh whose axes are Auto, or Manual around the op.
      route: specs that the only result's partial sums pass through before its own, one
        after each reduce-scatter but the last.
    Returns:
      Its results, each with its spec; None where XLA is to partition it.
    """
    rule, count = op.rule, len(args)
    if rule is None or math.prod(mesh.axis_sizes) == 1:
        return None
    cuts = _cuts(op, specs, count, mesh.axis_sizes)
    if cuts is None:
        return None
    values = (*eqn.invars, *eqn.outvars)
    # The `sharding` parameters of a gradient refer to the global array, not a shard.
    said = dict.fromkeys(eqn.params.keys() & {"sharding", "out_sharding"})
    run, params = _unchanged, {**eqn.params, **said}
    if op.traits.kind is OpKind.CONVOLUTION:
        shapes = [v.aval.shape for v in values]
        run, params = on_shard(rule, params, shapes, cuts, mesh)
    made, merged = [spec_under(x, cuts) for x in rule.results], merged_axes(rule, cuts)
    partial = partial_axes(rule, cuts)
    scatters: list[Scatter] = []
    done, held = made, specs[count] if partial else None
    if held is not None:
        scatters, end = scatters_along(made[0], (*route, held), partial)
        done = [end]

    def on_parts(*parts: Any) -> list[Any]:
        if merged is not None:
            names = [mesh.axis_names[axis] for axis in merged[1]]
            return MERGED[op.name](eqn, merged[0], names, *parts)
        results = bind_eqn(eqn, run(*parts), params)
        return [summed(x, scatters, partial, mesh.axis_names) for x in results]

    every = [*(spec_under(layout, cuts) for layout in rule.operands), *done]
    named = [
        partition_spec(spec, v.aval.shape, mesh)
        for spec, v in zip(every, values, strict=True)
    ]
    results = jax.shard_map(
        on_parts,
        mesh=mesh,
        axis_names=_auto_axes(mesh),
        in_specs=tuple(named[:count]),
        out_specs=named[count:],
        check_vma=False,
    )(*args)
    return list(zip(results, done, strict=True))


def _cuts(
    op: Op, specs: Sequence[Spec | None], count: int, sizes: Sequence[int]
) -> Cuts | None:
    """Return the mesh axes that shard each factor of an op; None to leave it to XLA.

    A grouped convolution runs on shards even where nothing is sharded, as does one
    whose window is sharded in a way that no shard can follow: XLA is left no choice.
    """
    assert op.rule is not None
    is_gathered = op.traits.is_gathered
    if op.traits.kind is OpKind.CONVOLUTION:
        if not needs_shards(op, specs):
            return None
        kinds = {FactorKind.PARALLEL, FactorKind.REDUCE, FactorKind.HALO}
        return find_cuts(op.rule, specs[:count], sizes, kinds)
    if not is_gathered and op.name not in MERGED:
        return None
    kinds = {FactorKind.PARALLEL, FactorKind.MERGE}
    cuts = find_cuts(op.rule, specs[:count], sizes, kinds)
    is_run = bool(cuts) and (is_gathered or merged_axes(op.rule, cuts) is not None)
    return cuts if is_run else None


def needs_shards(op: Op, specs: Sequence[Spec | None]) -> bool:
    """Whether XLA's partitioner is not to be trusted with a convolution.

    Args:
      op: the convolution; it has a rule.
      specs: specs of operands, then of results.
    """
    assert op.rule is not None
    layouts = (*op.rule.operands, *op.rule.results)
    return op.traits.is_gathered or any(
        axes and any(op.rule.factors[f].kind is FactorKind.HALO for f in dim)
        for layout, spec in zip(layouts, specs, strict=True)
        if spec is not None
        for dim, axes in zip(layout, spec, strict=True)
    )


def _auto_axes(mesh: Any) -> set[str]:
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in kinds if kind is AxisType.Auto}


def _unchanged(*parts: Any) -> list[Any]:
    return list(parts)
