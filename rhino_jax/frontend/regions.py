"""Regions: the equations that run sub-jaxprs, and how they run them.

The importer and the application of plans walk a jaxpr by the same two functions,
`region_kind` and `region_jaxprs`, so that both visit the same regions in the same
order.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import jax

from rhino_jax._compat import (
    bind_eqn,
    eqn_context,
    is_jaxpr,
    is_literal,
    jaxpr_consts,
    like_jaxpr,
    open_jaxpr,
    retrace,
    scan_counts,
    with_eqns,
)
from rhino_jax.errors import InternalError
from rhino_jax.ir.program import Op, Program, Region, RegionKind


T = TypeVar("T")

CALLS = frozenset(
    """
jit pjit call core_call closed_call eval_jaxpr composite custom_jvp_call
custom_jvp_call_jaxpr custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call linear_call
remat_opt remat remat2 checkpoint run_state
""".split()
)
"""Primitives that run one sub-jaxpr once, on their own operands."""

PLAIN_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
"""Calls that mean no more than their bodies."""

REMATS = frozenset({"remat", "remat2", "checkpoint"})


def has_barrier(params: Mapping[str, Any]) -> bool:
    """Whether JAX lowers a remat's operands through an optimization barrier
    (jax/_src/ad_checkpoint.py, `_remat_lowering`)."""
    barred = params.get("prevent_cse", False)
    is_barred = any(barred) if isinstance(barred, tuple) else bool(barred)
    return is_barred and bool(params.get("differentiated", False))


_BODY_PARAMS = ("jaxpr", "call_jaxpr", "fun_jaxpr", "callee", "fwd_jaxpr", "call")


def region_kind(eqn: Any) -> RegionKind | None:
    """Return how an equation runs its sub-jaxprs; None where it is a plain or opaque
    op.

    A call whose operands or results do not match those of its sub-jaxpr one to one (a
    `run_state` on references) is opaque.
    """
    name = eqn.primitive.name
    if name == "scan":
        return RegionKind.SCAN
    if name == "while":
        return RegionKind.WHILE
    if name == "cond":
        return RegionKind.COND
    if name in CALLS:
        body = body_jaxpr(eqn.params)
        if body is not None:
            inner = open_jaxpr(body)
            if len(inner.invars) == len(eqn.invars) and len(inner.outvars) == len(
                eqn.outvars
            ):
                return RegionKind.CALL
    return None


def _body_keys(eqn: Any) -> tuple[str, ...]:
    """Return the parameters that hold the sub-jaxprs of an equation."""
    kind = region_kind(eqn)
    if kind is None:
        return ()
    if kind is RegionKind.WHILE:
        return "cond_jaxpr", "body_jaxpr"
    if kind is RegionKind.COND:
        return ("branches",)
    return (next(key for key in _BODY_PARAMS if is_jaxpr(eqn.params.get(key))),)


def closed_region_jaxprs(eqn: Any) -> tuple[Any, ...]:
    """Return the sub-jaxprs as in the parameters, with their constants."""
    found = tuple(eqn.params[key] for key in _body_keys(eqn))
    return tuple(found[0]) if eqn.primitive.name == "cond" else found


def region_jaxprs(eqn: Any) -> tuple[Any, ...]:
    """Return the sub-jaxprs of an equation, in the order of `RegionCall.regions`.

    Returns:
      Jaxprs with `eqns`, `invars`, `outvars` and `constvars`; empty where the equation
      has no regions. `closed_region_jaxprs` has the constants' values.
    """
    return tuple(open_jaxpr(j) for j in closed_region_jaxprs(eqn))


def entering(eqn: Any, operands: Sequence[T]) -> list[Sequence[T]]:
    """Return, for each sub-jaxpr of an equation, the operands that are its first inputs
    in every run: all of a call, the constants of a loop.

    Args:
      eqn: an equation with regions.
      operands: of the equation, in any representation.
    """
    kind = region_kind(eqn)
    if kind is RegionKind.CALL:
        return [operands]
    if kind is RegionKind.COND:
        return [operands[1:]] * len(eqn.params["branches"])
    if kind is RegionKind.SCAN:
        return [operands[: scan_counts(eqn.params)[0]]]
    first = eqn.params["cond_nconsts"]
    return [operands[:first], operands[first : first + eqn.params["body_nconsts"]]]


def ops_and_equations(
    program: Program, region: Region, jaxpr: Any
) -> Iterator[tuple[Op, Any]]:
    """Yield every op of a region with its equation in the jaxpr that it was imported
    from.

    Args:
      program: the program.
      region: a region of it.
      jaxpr: closed or not.

    Raises:
      InternalError: the region was imported from another jaxpr, as from another trace
        of the function: ops match equations by their order alone.
    """
    ops, eqns = [program.ops[i] for i in region.ops], open_jaxpr(jaxpr).eqns
    for op, eqn in zip_longest(ops, eqns):
        if op is None or eqn is None or op.name != eqn.primitive.name:
            there = "nothing" if op is None else op.name
            here = "nothing" if eqn is None else eqn.primitive.name
            raise InternalError(
                "A program was read next to a jaxpr that is not its own:"
                f" `{there}` there, `{here}` here.",
                where=str(op.source) if op else "at the end of the program",
                numbers=f"{len(ops)} ops, {len(eqns)} equations",
                fix="plan again with the function as it is; if that does not help,"
                " report this with the program.",
            )
        yield op, eqn


def all_equations(
    program: Program, jaxpr: Any, region: Region | None = None
) -> Iterator[tuple[Op, Any]]:
    """Yield every op of a program with its equation, each before those inside of it.

    Args:
      program: the program.
      jaxpr: the jaxpr that it was imported from, closed or not.
      region: a region that was imported from `jaxpr`, in place of the program's body.
    """
    for op, eqn in ops_and_equations(program, region or program.body, jaxpr):
        yield op, eqn
        if op.call is not None:
            for inner, body in zip(op.call.regions, region_jaxprs(eqn), strict=True):
                yield from all_equations(program, body, inner)


def evaluate(
    jaxpr: Any,
    consts: Sequence[Any],
    inputs: Sequence[Any],
    run: Callable[[Any, list[Any]], Sequence[Any]],
    wrap: Callable[[Any, Any], Any] = lambda array, atom: array,
) -> list[Any]:
    """Run the equations of a jaxpr one by one, and return its outputs.

    Values are whatever `run` makes of them: arrays, or records of arrays.

    Args:
      jaxpr: open jaxpr.
      consts: arrays of its constants.
      inputs: values of its inputs.
      run: (equation, values of its operands) → values of its results; called with the
        name stack and source line of the equation.
      wrap: (array of a constant or literal, its variable or literal) → its value.
    """
    env: dict[Any, Any] = dict(zip(jaxpr.invars, inputs, strict=True))
    pairs = zip(jaxpr.constvars, consts, strict=True)
    env.update((var, wrap(x, var)) for var, x in pairs)

    def read(atom: Any) -> Any:
        return wrap(atom.val, atom) if is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        with eqn_context(eqn):
            results = run(eqn, operands)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def evaluate_ops(
    program: Program,
    region: Region,
    jaxpr: Any,
    consts: Sequence[Any],
    inputs: Sequence[Any],
    run: Callable[[Op, Any, list[Any]], Sequence[Any]],
) -> list[Any]:
    """Run the equations of a jaxpr one by one, each with its op: see `evaluate`.

    Args:
      program: the program.
      region: the region that was imported from the jaxpr.
      jaxpr, consts, inputs: as of `evaluate`.
      run: (op, equation, values of its operands) → values of its results.
    Raises:
      InternalError: the region was imported from another jaxpr.
    """
    ops = [op for op, _ in ops_and_equations(program, region, jaxpr)]
    left = iter(ops)
    return evaluate(jaxpr, consts, inputs, lambda eqn, read: run(next(left), eqn, read))


@contextlib.contextmanager
def call_scope(eqn: Any) -> Iterator[None]:
    """Enter the name of the function that an inlined call is of, as JAX does."""
    name = eqn.params.get("name")
    with jax.named_scope(str(name)) if name else contextlib.nullcontext():
        yield


def inline_call(
    eqn: Any,
    operands: Sequence[Any],
    run: Callable[[Any, list[Any]], Sequence[Any]],
    wrap: Callable[[Any, Any], Any] = lambda array, atom: array,
) -> list[Any]:
    """Run the equations of a call in its place: see `evaluate`.

    Args:
      eqn: the call.
      operands: values of its operands.
      run, wrap: as of `evaluate`.
    """
    (body,) = closed_region_jaxprs(eqn)
    with call_scope(eqn):
        return evaluate(open_jaxpr(body), jaxpr_consts(body), operands, run, wrap)


def with_jaxprs(eqn: Any, jaxprs: Sequence[Any]) -> Mapping[str, Any]:
    """Return the parameters of an equation with other sub-jaxprs.

    All other parameters (unroll, reverse, policy, the rules of custom derivatives)
    stay, so that JAX treats the equation as before.

    Args:
      eqn: an equation with regions.
      jaxprs: the new sub-jaxprs, in the order of `closed_region_jaxprs(eqn)`.
    """
    keys = _body_keys(eqn)
    new = [tuple(jaxprs)] if keys == ("branches",) else jaxprs
    return {**eqn.params, **dict(zip(keys, new, strict=True))}


def with_bodies(eqn: Any, change: Callable[[Any], Any]) -> Any:
    """Return an equation with changed sub-jaxprs; the same object where none changes.

    Args:
      eqn: an equation.
      change: sub-jaxpr → its replacement, or the same object.
    """
    bodies = closed_region_jaxprs(eqn)
    changed = [change(body) for body in bodies]
    if all(map(operator.is_, changed, bodies)):
        return eqn
    return eqn.replace(params=dict(with_jaxprs(eqn, changed)))


def bind_within(
    eqn: Any, operands: Sequence[Any], run: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """Bind an equation with `run` in place of the equations of its sub-jaxprs.

    Args:
      eqn: an equation, with or without regions.
      operands: arrays that it reads.
      run: (equation, operands) → results, as of `evaluate`.
    """

    def rerun(body: Any) -> Any:
        inner, consts = open_jaxpr(body), jaxpr_consts(body)
        return rebuild_jaxpr(lambda *xs: evaluate(inner, consts, xs, run), body)

    return bind_eqn(eqn, operands, with_bodies(eqn, rerun).params)


def with_changed(jaxpr: Any, eqns: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """Return a jaxpr with other equations and results; the same object where all
    equations are its own."""
    own = open_jaxpr(jaxpr).eqns
    if len(eqns) == len(own) and all(map(operator.is_, eqns, own)):
        return jaxpr
    return with_eqns(jaxpr, eqns, list(outvars))


def with_equations(jaxpr: Any, change: Callable[[Any], Any]) -> Any:
    """Return a jaxpr with changed equations, and those of their sub-jaxprs after them;
    the same object where none changes.

    Args:
      jaxpr: closed or not.
      change: equation → its replacement, or the same object.
    """
    opened, eqns = open_jaxpr(jaxpr), []
    for eqn in opened.eqns:
        inside = functools.partial(with_equations, change=change)
        eqns.append(with_bodies(change(eqn), inside))
    return with_changed(jaxpr, eqns, opened.outvars)


def body_jaxpr(params: Mapping[str, Any]) -> Any | None:
    """Return the sub-jaxpr among an equation's parameters, closed or not; None without
    one."""
    for key in _BODY_PARAMS:
        if is_jaxpr(params.get(key)):
            return params[key]
    return None


def sub_jaxprs(eqn: Any) -> list[Any]:
    """Return all jaxprs among an equation's parameters, whatever their purpose."""
    params = eqn.params.values()
    several = (x if isinstance(x, tuple | list) else (x,) for x in params)
    return [x for found in several for x in found if is_jaxpr(x)]


def inner_equations(
    jaxpr: Any, bodies: Callable[[Any], Iterable[Any]] = closed_region_jaxprs
) -> Iterator[Any]:
    """Yield every equation of a jaxpr, each before those of its sub-jaxprs.

    Args:
      jaxpr: closed or not.
      bodies: equation → its sub-jaxprs; `sub_jaxprs`: also those of opaque ops.
    """
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        for body in bodies(eqn):
            yield from inner_equations(body, bodies)


def rebuild_jaxpr(fn: Callable[..., Any], old: Any) -> Any:
    """Trace `fn` as a jaxpr that can replace `old`.

    Args:
      fn: a function of the inputs of `old`, with results of the same types.
      old: a jaxpr from an equation's parameters.
    """
    new, consts = retrace(fn, open_jaxpr(old))
    return like_jaxpr(old, new, consts)
