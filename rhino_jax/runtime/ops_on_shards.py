"""Run ops on shards that XLA's partitioner gathers or partitions wrongly.

XLA gathers the operands of an FFT and of a grouped convolution, the sharded rows of a
grouped matmul (v5e:2x4), and on CPU the operands of a top-k: seen with jax 0.10.2, for
operands sharded by rows or images over 8 devices. Where a grouped matmul runs in a
kernel of rhino's (`grouped`), on GPUs, XLA partitions none of it.
For a convolution whose window is sharded it sums the kernel's gradient over all
devices, replicas included; with channels on another axis, results and all gradients are
wrong; for some grouped ones its checks abort the process (jaxlib 0.10.2 to 0.12.0.1;
the same replica groups are compiled for v5e:2x4 and 8 H100). So `shard_map` runs these,
with halos from neighbours, and all-reduces or reduce-scatters partial sums. It also
runs Pallas kernels, which XLA does not partition.

Of a top-k or cumulative op, each shard computes a few results of its own, all-gathers
those of the others, and merges them in the order of the shards, so that of equal
elements the first counts, as on one device. XLA gathers the whole dim for most of these
ops; positions of maxima it merges itself, with a kernel less (8 H100, jax 0.10.2).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from rhino_jax._compat import bind_eqn
from rhino_jax.frontend.pallas import (
    PALLAS_CALL,
    Grid,
    everywhere_params,
    grid_of,
    local_params,
)
from rhino_jax.frontend.registry import local_params as params_of_part
from rhino_jax.frontend.rules.dot import RAGGED_DOTS
from rhino_jax.ir.factor import FactorKind, Rule
from rhino_jax.ir.program import Op
from rhino_jax.ir.spec import Spec, local_shape, num_shards
from rhino_jax.ir.traits import OpKind
from rhino_jax.runtime.constraints import spec_on_mesh
from rhino_jax.runtime.grouped_sets import each_set
from rhino_jax.runtime.windows import (
    Cuts,
    Shards,
    find_cuts,
    on_shard,
    spec_under,
)


Scatter = tuple[int, tuple[int, ...]]
"""A dim, and the mesh axes over which partial sums are reduce-scattered onto it."""


def partial_axes(rule: Rule, cuts: Cuts) -> tuple[int, ...]:
    """Return the mesh axes over which the only result of an op is a partial sum."""
    summed_factors = [f for f in cuts if rule.partial_results(f)]
    return tuple(sorted(axis for f in summed_factors for axis in cuts[f]))


def scatters_along(
    made: Spec, route: Sequence[Spec], partial: Sequence[int]
) -> tuple[list[Scatter], Spec]:
    """Return the reduce-scatters that take partial sums along a route of specs.

    Args:
      made: spec of the partial sums.
      route: specs that they pass through; the last is the spec of the result.
      partial: mesh axes over which they are partial.
    Returns:
      The reduce-scatters in order, and the spec of the result after them: the last of
      the route, or `made`, without any, where the route shards over other axes than
      those of the sum.
    """
    now, found = made, []
    for spec in route:
        for dim, (before, after) in enumerate(zip(now, spec, strict=True)):
            added = after[len(before) :]
            if after[: len(before)] != before or not set(added) <= set(partial):
                return [], made
            if added:
                found.append((dim, added))
        now = spec
    return found, now


def summed(
    x: Any, scatters: Sequence[Scatter], partial: Sequence[int], names: Sequence[str]
) -> Any:
    """Reduce-scatter a partial sum, and all-reduce it over the axes that remain.

    Args:
      x: a device's partial sum.
      scatters: reduce-scatters of `scatters_along`.
      partial: mesh axes over which it is partial.
      names: names of the mesh axes.
    """
    left = set(partial)
    for dim, axes in scatters:
        over = tuple(names[a] for a in axes)
        x = lax.psum_scatter(x, over, scatter_dimension=dim, tiled=True)
        left -= set(axes)
    return lax.psum(x, tuple(names[a] for a in sorted(left))) if left else x


Merged = Callable[[Any, int, Sequence[str], Any], list[Any]]
"""Function of (equation, dim, names of the mesh axes that shard it, shard): results."""

_RECALLED_OF = "reduction_input_size_override"
"""Parameter of an approximate top-k: size that its recall is of; negative: its own."""


def sharded_dim(
    rule: Rule, cuts: Cuts, kind: FactorKind
) -> tuple[int, tuple[int, ...]] | None:
    """Return the first operand's dim that has a sharded factor of a kind, and the mesh
    axes that shard it; None if there is none."""
    for d, dim in enumerate(rule.operands[0] if rule.operands else ()):
        for f in dim:
            if rule.factors[f].kind is kind and f in cuts:
                return d, cuts[f]
    return None


def _top_k(eqn: Any, dim: int, names: Sequence[str], x: Any) -> list[Any]:
    """Return the top-k of all shards' top-k."""
    k, width = eqn.params["k"], x.shape[dim]
    params = {**eqn.params, "k": min(k, width)}
    if params.get(_RECALLED_OF, 0) < 0:
        params[_RECALLED_OF] = width * Shards(names).count
    best, at = bind_eqn(eqn, [x], params)
    # Positions in the whole dim, of the best elements of all shards.
    at = at + (Shards(names).position() * width).astype(at.dtype)
    best, at = (_gathered(y, dim, names) for y in (best, at))
    if params.get("is_max_k", True):
        order = lax.top_k(best, k, axis=dim)[1]
    else:
        order = lax.slice_in_dim(jnp.argsort(best, axis=dim), 0, k, axis=dim)
    return [jnp.take_along_axis(y, order, dim) for y in (best, at)]


def _running(eqn: Any, dim: int, names: Sequence[str], x: Any) -> list[Any]:
    """Return a shard's cumulative results, continued from the shards before it."""
    is_reversed, shards = eqn.params["reverse"], Shards(names)
    (own,) = bind_eqn(eqn, [x], eqn.params)
    end = 0 if is_reversed else own.shape[dim] - 1
    last = _gathered(lax.slice_in_dim(own, end, end + 1, axis=dim), dim, names)
    (total,) = bind_eqn(eqn, [last], eqn.params)
    position = shards.position()
    before = position + 1 if is_reversed else position - 1
    at = jnp.clip(before, 0, shards.count - 1)
    found = lax.dynamic_slice_in_dim(total, at, 1, axis=dim)
    return [jnp.where(before == at, _ADDED[eqn.primitive.name](own, found), own)]


def _gathered(x: Any, dim: int, names: Sequence[str]) -> Any:
    return lax.all_gather(x, tuple(names), axis=dim, tiled=True)


_ADDED: Mapping[str, Callable[[Any, Any], Any]] = {
    "cumsum": jnp.add,
    "cumprod": jnp.multiply,
    "cummax": jnp.maximum,
    "cummin": jnp.minimum,
    "cumlogsumexp": jnp.logaddexp,
}

MERGED: Mapping[str, Merged] = {
    "top_k": _top_k,
    "approx_top_k": _top_k,
    **dict.fromkeys(_ADDED, _running),
}
"""Primitive → the function that merges shards of a MERGE factor."""


def run_each_part(
    op: Op,
    eqn: Any,
    specs: Sequence[Spec | None],
    args: Sequence[Any],
    mesh: Any,
    route: Sequence[Spec] = (),
    *,
    tiles_groups: bool = False,
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
      tiles_groups: whether a grouped matmul runs in a kernel of rhino's.
    Returns:
      Its results, each with its spec; None where XLA is to partition it.
    """
    rule, count = op.rule, len(args)
    is_tiled = tiles_groups and op.traits.is_tiled
    if rule is None or (math.prod(mesh.axis_sizes) == 1 and not is_tiled):
        return None
    cuts = _cuts(op, specs, count, mesh.axis_sizes, is_tiled)
    if cuts is None:
        return None
    values = (*eqn.invars, *eqn.outvars)
    # The `sharding` parameters of a gradient refer to the global array, not a shard.
    said = eqn.params.keys() & {"sharding", "out_sharding"}
    params = {**eqn.params, **dict.fromkeys(said)}
    run: Callable[..., Sequence[Any]] | None = None
    merged = sharded_dim(rule, cuts, FactorKind.MERGE)
    is_ragged = op.name in RAGGED_DOTS
    rows = sharded_dim(rule, cuts, FactorKind.INDEX) if is_ragged else None
    dim, axes = rows or merged or (0, ())
    names = [mesh.axis_names[axis] for axis in axes]
    if rows is not None:
        run = functools.partial(_with_own_groups, dim, names)
    if op.traits.kind is OpKind.CONVOLUTION:
        shapes = [v.aval.shape for v in values]
        run, params = on_shard(rule, params, shapes, cuts, mesh)
    else:
        layouts = (*rule.operands, *rule.results)
        parts = [
            local_shape(spec_under(x, cuts), v.aval.shape, mesh.axis_sizes)
            for v, x in zip(values, layouts, strict=True)
        ]
        params = params_of_part(op.name, params, parts[:count], parts[count:])
    made = [spec_under(x, cuts) for x in rule.results]
    partial = partial_axes(rule, cuts)
    scatters: list[Scatter] = []
    done, held = made, specs[count] if partial else None
    if held is not None:
        scatters, end = scatters_along(made[0], (*route, held), partial)
        done = [end]

    def on_parts(*parts: Any) -> list[Any]:
        if merged is not None:
            return MERGED[op.name](eqn, dim, names, *parts)
        bound: Callable[..., list[Any]] = bind_eqn
        if is_tiled:
            # Pallas takes half a second to import.
            from rhino_jax.runtime.grouped import grouped_matmul as bound
        elif is_ragged:
            bound = each_set
        if lengths := params.get("fft_lengths"):
            # XLA:CPU refuses FFTs whose layout is not row-major where a dim is 1.
            (x,) = parts
            ones = [d for d, n in enumerate(x.shape[: -len(lengths)]) if n == 1]
            return [jnp.expand_dims(bind_eqn(eqn, [x.squeeze(ones)], params)[0], ones)]
        results = bound(eqn, parts if run is None else run(*parts), params)
        return [summed(x, scatters, partial, mesh.axis_names) for x in results]

    every = [*(spec_under(layout, cuts) for layout in rule.operands), *done]
    named = [
        spec_on_mesh(spec, v.aval.shape, mesh)
        for spec, v in zip(every, values, strict=True)
    ]
    return list(zip(_mapped(on_parts, mesh, named, args), done, strict=True))


def _mapped(
    run: Callable[..., Any],
    mesh: Any,
    named: Sequence[PartitionSpec],
    args: Sequence[Any],
) -> Any:
    """Run a function on shards.

    Args:
      run: function of the shards of its arguments.
      mesh: the mesh; its Manual axes stay around the function.
      named: specs of arguments, then of results.
      args: the arguments.
    """
    return jax.shard_map(
        run,
        mesh=mesh,
        axis_names={*mesh.auto_axes},
        in_specs=tuple(named[: len(args)]),
        out_specs=list(named[len(args) :]),
        check_vma=False,
    )(*args)


def _cuts(
    op: Op,
    specs: Sequence[Spec | None],
    count: int,
    sizes: Sequence[int],
    is_tiled: bool,
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
    if op.name in RAGGED_DOTS:
        kinds = {FactorKind.PARALLEL, FactorKind.REDUCE, FactorKind.INDEX}
        cuts = find_cuts(op.rule, specs[:count], sizes, kinds)
        has_prefix = len(op.rule.operands[2]) > 1
        rows = sharded_dim(op.rule, cuts, FactorKind.INDEX)
        return cuts if is_tiled or has_prefix or rows else None
    kinds = {FactorKind.PARALLEL, FactorKind.MERGE}
    reducers = {f.reducer for f in op.rule.factors if f.kind is FactorKind.REDUCE}
    if len(op.results) == 1 and reducers == {"sum"}:
        kinds.add(FactorKind.REDUCE)
    cuts = find_cuts(op.rule, specs[:count], sizes, kinds)
    is_run = is_gathered or sharded_dim(op.rule, cuts, FactorKind.MERGE) is not None
    return cuts if cuts and is_run else None


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


def _with_own_groups(
    dim: int, names: Sequence[str], x: Any, other: Any, sizes: Any
) -> list[Any]:
    """Return a grouped matmul's operands, with the groups' sizes in this shard."""
    first, width = Shards(names).position() * x.shape[dim], x.shape[dim]
    ends = jnp.clip(jnp.cumsum(sizes, axis=-1), first, first + width)
    sizes = jnp.diff(ends, axis=-1, prepend=first).astype(sizes.dtype)
    return [x, other, sizes]


def run_on_shards(
    eqn: Any, specs: Sequence[Spec | None], args: Sequence[Any], mesh: Any
) -> list[Any] | None:
    """Run a kernel on every device's shard of its grid.

    Args:
      eqn: the equation.
      specs: specs of operands, then of results.
      args: the operands.
      mesh: a mesh whose axes are all Auto.
    Returns:
      Its results; None where this is no kernel, or XLA can partition it.
    """
    if eqn.primitive.name != PALLAS_CALL or math.prod(mesh.axis_sizes) == 1:
        return None
    grid = grid_of(eqn.params)
    cuts = None if grid is None else cuts_of(grid, specs, mesh.axis_sizes)
    # Interpreted kernels are plain ops, which XLA does partition.
    if not cuts and eqn.params.get("interpret"):
        return None
    if grid is None or cuts is None:
        # The whole kernel runs on every device.
        params_of = functools.partial(everywhere_params, eqn.params)
        named = [PartitionSpec()] * (len(args) + len(eqn.outvars))
    else:
        pieces = [
            num_shards(cuts.get(axis, ()), mesh.axis_sizes)
            for axis in range(len(grid.sizes))
        ]
        params_of = functools.partial(local_params, eqn.params, grid, pieces)
        shapes = [*(x.shape for x in args), *(v.aval.shape for v in eqn.outvars)]
        moves = zip((*grid.operands, *grid.results), shapes, strict=True)
        named = [
            spec_on_mesh(
                tuple(() if a is None else cuts.get(a, ()) for a in axes), shape, mesh
            )
            for axes, shape in moves
        ]
    results: list[Any] = _mapped(
        lambda *shards: bind_eqn(eqn, shards, params_of()), mesh, named, args
    )
    return results


def cuts_of(
    grid: Grid, specs: Sequence[Spec | None], sizes: Sequence[int]
) -> Cuts | None:
    """Return how a plan shards the grid: by the specs of the results.

    None where the specs do not determine one sharding of it.
    """
    cuts: Cuts = {}
    results = specs[len(grid.operands) :]
    for moves, spec in zip(grid.results, results, strict=True):
        if spec is None:
            return None
        for axis, by in zip(moves, spec, strict=True):
            if axis is None and by:
                return None
            if axis is not None and cuts.setdefault(axis, by) != by:
                return None
    for axis, by in cuts.items():
        if grid.sizes[axis] % num_shards(by, sizes):
            return None
    return {axis: by for axis, by in cuts.items() if by}
