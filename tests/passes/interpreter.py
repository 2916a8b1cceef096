"""Evaluate jaxprs in NumPy, op by op: a rewrite is checked without compiling it.

Every result is checked to have the shape and dtype that its jaxpr says. Primitives
that are not in `numpy_ops.OPS` run in JAX, one at a time.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rhino_jax._compat import (
    bind_eqn,
    is_literal,
    jaxpr_consts,
    open_jaxpr,
    scan_counts,
)
from rhino_jax.frontend.regions import closed_region_jaxprs, region_kind
from rhino_jax.ir.program import RegionKind
from tests.passes.numpy_ops import OPS


def interpret(closed: Any, arrays: Sequence[Any]) -> list[Any]:
    """Return the results of a closed jaxpr; its first inputs are `arrays`, and any that
    are missing its constants."""
    types = (var.aval.dtype for var in open_jaxpr(closed).invars)
    given = [
        np.asarray(x, dtype) if isinstance(x, int | float) else _array(x)
        for x, dtype in itertools.zip_longest(arrays, types)
    ]
    with np.errstate(all="ignore"):
        return _run(closed, given, None)


def interpret_on_ranks(closed: Any, arrays: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return the results, by rank, of a program that all ranks of one axis run.

    Args:
      closed: its collectives are over one axis, whatever its name.
      arrays: inputs by rank; after them, or in `closed`, constants.
    """
    ranks = _Ranks(len(arrays))
    results: list[Any] = [None] * len(arrays)

    def run(rank: int) -> None:
        try:
            with np.errstate(all="ignore"):
                given = [_array(x) for x in arrays[rank]]
                results[rank] = _run(closed, given, _Rank(rank, ranks))
        except BaseException as error:
            results[rank] = error
            ranks.barrier.abort()

    threads = [threading.Thread(target=run, args=(r,)) for r in range(len(arrays))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [r for r in results if isinstance(r, BaseException)]
    # Where one fails, the barrier of the others breaks.
    for error in sorted(
        errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)
    ):
        raise error
    return results


class _Ranks:
    """The ranks of an axis, each a thread, which meet in collectives."""

    def __init__(self, count: int) -> None:
        self.values: list[Any] = [None] * count
        self.barrier = threading.Barrier(count)


class _Rank:
    """One rank of an axis."""

    def __init__(self, index: int, ranks: _Ranks) -> None:
        self.index, self.ranks = index, ranks

    def collective(self, name: str, args: list[Any], params: Any) -> list[Any] | None:
        """Run a primitive if it is about ranks; None otherwise."""
        if name == "axis_index":
            return [np.int32(self.index)]
        if name == "ppermute":
            (every,) = self._gathered(args)
            source = {target: source for source, target in params["perm"]}
            sent = source.get(self.index)
            return [np.zeros_like(args[0]) if sent is None else every[sent]]
        if name in _SUMS:
            return [_SUMS[name](every) for every in self._gathered(args)]
        return None

    def _gathered(self, args: list[Any]) -> list[list[Any]]:
        """Arguments of all ranks, by argument."""
        self.ranks.values[self.index] = args
        self.ranks.barrier.wait(60)
        found = list(zip(*self.ranks.values, strict=True))
        self.ranks.barrier.wait(60)
        return [list(x) for x in found]


_SUMS: dict[str, Callable[[list[Any]], Any]] = {
    "psum": lambda xs: sum(xs[1:], xs[0]),
    "psum_invariant": lambda xs: sum(xs[1:], xs[0]),
    "pmax": lambda xs: np.max(np.stack(xs), 0),
}


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)


def _array(x: Any) -> Any:
    """NumPy's, unless its elements are random keys."""
    if isinstance(x, np.ndarray | np.generic):
        return x
    return x if hasattr(x, "dtype") and _is_key(x) else np.asarray(x)


def _run(closed: Any, args: Sequence[Any], rank: _Rank | None) -> list[Any]:
    jaxpr = open_jaxpr(closed)
    consts = [_array(x) for x in jaxpr_consts(closed)][: len(jaxpr.constvars)]
    given = [*args]
    if len(given) > len(jaxpr.invars):
        consts = given[len(jaxpr.invars) :]
        given = given[: len(jaxpr.invars)]
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, given, strict=True))

    def read(atom: Any) -> Any:
        if is_literal(atom):
            return np.asarray(atom.val, atom.aval.dtype)
        return env[atom]

    for eqn in jaxpr.eqns:
        results = _apply(eqn, [read(v) for v in eqn.invars], rank)
        for var, x in zip(eqn.outvars, results, strict=True):
            assert x.shape == var.aval.shape and x.dtype == var.aval.dtype, (
                f"{x.shape} {x.dtype} of {eqn}"
            )
            env[var] = x
    return [read(v) for v in jaxpr.outvars]


def _apply(eqn: Any, args: list[Any], rank: _Rank | None) -> list[Any]:
    name, params = eqn.primitive.name, eqn.params
    kind = region_kind(eqn)
    if kind is not None:
        return _REGIONS[kind](eqn, args, rank)
    if rank is not None:
        found = rank.collective(name, args, params)
        if found is not None:
            return found
    if name in OPS and not any(_is_key(x) for x in args):
        made = OPS[name](args, params, eqn.outvars[0].aval if eqn.outvars else None)
        return made if isinstance(made, list) else [np.asarray(made)]
    return [_array(x) for x in bind_eqn(eqn, args, params)]


def _scan(eqn: Any, args: list[Any], rank: _Rank | None) -> list[Any]:
    (body,) = closed_region_jaxprs(eqn)
    num_consts, num_carry = scan_counts(eqn.params)
    consts, carry = args[:num_consts], args[num_consts : num_consts + num_carry]
    stacked, length = args[num_consts + num_carry :], eqn.params["length"]
    order = range(length)
    made: list[list[Any]] = []
    for i in reversed(order) if eqn.params["reverse"] else order:
        outs = _run(body, [*consts, *carry, *(x[i] for x in stacked)], rank)
        carry = outs[:num_carry]
        made.append(outs[num_carry:])
    if eqn.params["reverse"]:
        made.reverse()
    return [*carry, *(_stack(xs) for xs in zip(*made, strict=True))]


def _stack(xs: Sequence[Any]) -> Any:
    return jax.numpy.stack(xs) if _is_key(xs[0]) else np.stack(xs)


def _while(eqn: Any, args: list[Any], rank: _Rank | None) -> list[Any]:
    condition, body = closed_region_jaxprs(eqn)
    a = eqn.params["cond_nconsts"]
    b = a + eqn.params["body_nconsts"]
    carry = args[b:]
    while _run(condition, [*args[:a], *carry], rank)[0]:
        carry = _run(body, [*args[a:b], *carry], rank)
    return carry


def _cond(eqn: Any, args: list[Any], rank: _Rank | None) -> list[Any]:
    branches = closed_region_jaxprs(eqn)
    chosen = min(max(int(args[0]), 0), len(branches) - 1)
    return _run(branches[chosen], args[1:], rank)


def _call(eqn: Any, args: list[Any], rank: _Rank | None) -> list[Any]:
    (body,) = closed_region_jaxprs(eqn)
    return _run(body, args, rank)


_REGIONS = {
    RegionKind.SCAN: _scan,
    RegionKind.WHILE: _while,
    RegionKind.COND: _cond,
    RegionKind.CALL: _call,
}
