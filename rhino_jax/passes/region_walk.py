"""Run the ops of a region, and the regions of an op, on other values than their own:
parts of arrays, or records of arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
from jax import lax

from rhino_jax._compat import (
    TypedInputs,
    bind_eqn,
    captured_as_inputs,
    like_jaxpr,
    open_jaxpr,
    retrace,
)
from rhino_jax.frontend.regions import closed_region_jaxprs, with_jaxprs
from rhino_jax.ir.program import RegionKind
from rhino_jax.rewrite.emit import scan_like
from rhino_jax.rewrite.flat import FlatOp, FlatRegion


def run_region(
    region: FlatRegion,
    inputs: Iterable[Any],
    env: dict[int, Any],
    run: Callable[[FlatOp], Sequence[Any]],
) -> None:
    """Run the ops of a region, each with its name stack and source line.

    Args:
      region: the region.
      inputs: values of its inputs.
      env: value id → value; those of the region are added.
      run: an op, whose operands are in `env` or constants → values of its results.
    """
    env.update(zip(region.inputs, inputs, strict=True))
    for item in region.ops:
        with item.context():
            results = run(item)
        env.update(zip(item.results, results, strict=True))


def run_regions(
    item: FlatOp,
    operands: Sequence[Any],
    run: Callable[[FlatRegion, Sequence[Any]], list[Any]],
) -> list[Any]:
    """Run an op with regions: a loop, a conditional, or a recomputed region.

    Args:
      item: the op.
      operands: arrays, or pytrees of arrays; consts of loops may be anything.
      run: (a region of the op, values of its inputs) → values of its outputs.
    """
    call, eqn = item.call, item.eqn
    if call.kind is RegionKind.CALL:
        return _bound(item, operands, run)
    if call.kind is RegionKind.COND:
        branches = [lambda *xs, region=r: run(region, xs) for r in item.regions]
        return list(lax.switch(operands[0], branches, *operands[1:]))
    if call.kind is RegionKind.SCAN:
        (body,) = item.regions

        def step(carry: Any, slices: Any) -> tuple[list[Any], list[Any]]:
            found = run(body, [*call.consts(operands), *carry, *slices])
            return found[: call.num_carry], found[call.num_carry :]

        starts = [*call.carries(operands)]
        carry, stacks = scan_like(eqn, step, starts, [*call.sliced(operands)])
        return [*carry, *stacks]
    condition, body = item.regions
    own, consts = operands[: call.num_cond_consts], operands[call.num_cond_consts :]
    return list(
        lax.while_loop(
            lambda carry: run(condition, [*own, *carry])[0],
            lambda carry: run(body, [*call.consts(consts), *carry]),
            list(consts[call.num_consts :]),
        )
    )


def _bound(
    item: FlatOp,
    operands: Sequence[Any],
    run: Callable[[FlatRegion, Sequence[Any]], list[Any]],
) -> list[Any]:
    """Bind a call with its parameters, arrays that its body captures as operands."""
    (body,), made = closed_region_jaxprs(item.eqn), None
    leaves, tree = jax.tree.flatten(operands)

    def inside(*arrays: Any) -> list[Any]:
        nonlocal made
        found = run(item.regions[0], jax.tree.unflatten(tree, arrays))
        outs, made = jax.tree.flatten(found)
        return outs

    types = [SimpleNamespace(aval=jax.typeof(x)) for x in leaves]
    names = open_jaxpr(body).debug_info.with_unknown_names()
    new, captured = retrace(inside, TypedInputs(types, names))
    new = like_jaxpr(body, captured_as_inputs(new, len(leaves)), ())
    params = dict(with_jaxprs(item.eqn, [new]))
    barred = params.get("prevent_cse")
    if isinstance(barred, tuple):
        own = zip(barred, operands, strict=True)
        each = [is_barred for is_barred, x in own for _ in jax.tree.leaves(x)]
        params["prevent_cse"] = (*each, *(False for _ in captured))
    return jax.tree.unflatten(made, bind_eqn(item.eqn, [*leaves, *captured], params))
