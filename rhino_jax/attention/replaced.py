"""A function with other forms of the attention that is written out in it.

Attention is found in the jaxpr of the function, after `jax.grad`, and replaced before:
what is differentiated is traced, and run with the chosen forms in place of the written
ones. So gradients, and what loops save for them, follow the form. It stays as written
where its probabilities are read otherwise (dropout), inside of `while`, `cond` and
custom derivatives, and where `jax.jvp` differentiates it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from rhino_jax._compat import (
    bind_eqn,
    fused_attention_traced,
    instead_of_vjp,
    jaxpr_consts,
    open_jaxpr,
)
from rhino_jax.attention.softmax import TracedValue, fact_of, literal_value
from rhino_jax.attention.written import AS_WRITTEN, Attention
from rhino_jax.frontend.forms.calls import CallTrace, in_cache_keys
from rhino_jax.frontend.provenance import source_of
from rhino_jax.frontend.regions import (
    PLAIN_CALLS,
    REMATS,
    closed_region_jaxprs,
    entering,
    evaluate,
    inline_call,
    inner_equations,
    rebuild_jaxpr,
    with_jaxprs,
)
from rhino_jax.frontend.registry import traits_of
from rhino_jax.ir.traits import OpKind


def find_written(jaxpr: Any) -> CallTrace:
    """Return a trace of the attentions that a jaxpr writes out, as calls of forms."""
    calls = CallTrace()
    run = functools.partial(_run, calls=calls, runs=False)
    # As of `rhino.choose`: what is traced here, JAX caches apart.
    with in_cache_keys()(object()), fused_attention_traced():
        _evaluated(jaxpr, [TracedValue(v.aval) for v in open_jaxpr(jaxpr).invars], run)
    return calls


@contextlib.contextmanager
def replacing(calls: CallTrace) -> Iterator[Callable[..., Any]]:
    """Trace functions within this context with the chosen forms of attention.

    Args:
      calls: chooses the forms, and records the attentions.
    Yields:
      A function that returns a function of arrays with them.
    """

    def replaced(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def run(*args: Any) -> Any:
            leaves, tree = jax.tree.flatten(args)
            made: list[Any] = []

            def flat(*leaves: Any) -> list[Any]:
                results, out = jax.tree.flatten(fn(*jax.tree.unflatten(tree, leaves)))
                made[:] = results, out
                return [x for x in results if isinstance(x, jax.Array)]

            closed = jax.make_jaxpr(flat)(*leaves)
            if open_jaxpr(closed).effects:
                return fn(*args)
            arrays = iter(_replaced(closed, leaves, calls))
            results, out = made
            # What is no array is returned as it is.
            every = [next(arrays) if isinstance(x, jax.Array) else x for x in results]
            return jax.tree.unflatten(out, every)

        return run

    with _LOCK:
        vjp, thread = jax.vjp, threading.get_ident()

        @functools.wraps(vjp)
        def new(fn: Callable[..., Any], *args: Any, **more: Any) -> Any:
            is_here = threading.get_ident() == thread
            return vjp(replaced(fn) if is_here else fn, *args, **more)

        with instead_of_vjp(new):
            yield replaced


_LOCK = threading.RLock()
"""Held while `jax.vjp` is another function."""


def _replaced(closed: Any, arrays: Sequence[Any], calls: CallTrace) -> list[Any]:
    run = functools.partial(_run, calls=calls, runs=True)
    avals = (v.aval for v in open_jaxpr(closed).invars)
    values = [TracedValue(aval, x) for aval, x in zip(avals, arrays, strict=True)]
    return [v.array for v in _evaluated(closed, values, run)]


def _evaluated(
    jaxpr: Any, values: Sequence[TracedValue], run: Any
) -> list[TracedValue]:
    consts = jaxpr_consts(jaxpr)
    return evaluate(open_jaxpr(jaxpr), consts, values, run, literal_value)


def _run(
    eqn: Any, operands: list[TracedValue], *, calls: CallTrace, runs: bool
) -> list[TracedValue]:
    """Return the values of an equation's results.

    Args:
      eqn: the equation.
      operands: its operands.
      calls: chooses the form of attention.
      runs: whether the values have arrays.
    """
    run = functools.partial(_run, calls=calls, runs=runs)
    name, avals = eqn.primitive.name, [v.aval for v in eqn.outvars]
    if name in PLAIN_CALLS:
        return inline_call(eqn, operands, run, literal_value)
    facts: list[Any] = [None] * len(avals)
    if name in (*REMATS, "scan") and _has_softmax(eqn):
        (body,) = closed_region_jaxprs(eqn)
        known = [v.fact for found in entering(eqn, operands) for v in found]

        def inside(*arrays: Any) -> list[TracedValue]:
            types = (v.aval for v in open_jaxpr(body).invars)
            more = [*known, *[None] * (len(arrays) - len(known))]
            values = map(TracedValue, types, arrays, more)
            return _evaluated(body, [*values], run)

        if not runs:
            inside(*[None] * len(open_jaxpr(body).invars))
            return [*map(TracedValue, avals)]

        def traced(*arrays: Any) -> list[Any]:
            return [v.array for v in inside(*arrays)]

        given = [v.array for v in operands]
        if name == "scan":
            params = with_jaxprs(eqn, [rebuild_jaxpr(traced, body)])
            return [*map(TracedValue, avals, bind_eqn(eqn, given, params))]
        more = {key: eqn.params[key] for key in ("prevent_cse", "policy")}
        return [*map(TracedValue, avals, jax.checkpoint(traced, **more)(*given))]
    found = Attention.at(eqn, operands) if len(avals) == 1 else None
    if found is not None:
        avals_in = [v.aval for v in found.operands]
        given = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals_in]
        forms, source = found.forms(), source_of(eqn.source_info)
        form = calls.form(forms, given, {}, (source, found.types))
        if runs and form != AS_WRITTEN:
            result = forms[form](*[v.array for v in found.operands])
            return [TracedValue(avals[0], result)]
    if len(avals) == 1 and not closed_region_jaxprs(eqn):
        facts = [fact_of(eqn, operands)]
    if not runs:
        return [
            TracedValue(a, None, fact) for a, fact in zip(avals, facts, strict=True)
        ]
    arrays = bind_eqn(eqn, [v.array for v in operands], eqn.params)
    return [*map(TracedValue, avals, arrays, facts)]


def _has_softmax(eqn: Any) -> bool:
    (body,) = closed_region_jaxprs(eqn)
    kinds = (traits_of(e.primitive.name).kind for e in inner_equations(body))
    return OpKind.EXPONENTIAL in kinds
