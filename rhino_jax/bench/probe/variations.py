"""Variations of a function: each changes one thing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rhino_jax.bench.probe.functions import ProbedFunction


TRIPS = 4
"""Trips of the loops that functions run in."""

UNEVEN = 24
"""What uneven dims lack: 1,000 for 1,024 divides neither by eight devices and the lanes
of a TPU, nor by the tiles of a tensor core."""

WIDE = 64
"""Smaller dims (windows, heads, channels of an image) stay as they are."""


class AbstractCall(NamedTuple):
    """A function, and the abstract arguments that it is called with."""

    fn: Callable[..., Any]
    args: tuple[jax.ShapeDtypeStruct, ...]


def variation(function: ProbedFunction, name: str) -> AbstractCall | None:
    """Return a variation of a function; None where it has no such variation:
    other shapes or types, or its gradient, are an error."""
    call = VARIATIONS[name](function)
    try:
        if call is not None:
            jax.eval_shape(call.fn, *call.args)
    except (TypeError, ValueError, NotImplementedError):
        return None
    return call


def _call(function: ProbedFunction, dtype: Any = jnp.bfloat16) -> AbstractCall:
    args = (jax.ShapeDtypeStruct(shape, own or dtype) for shape, own in function.args)
    return AbstractCall(function.fn, tuple(args))


def _uneven(function: ProbedFunction) -> AbstractCall | None:
    """Make wide dims uneven, but for the batch."""
    fn, args = _call(function)
    batch = args[0].shape[0]
    sizes = [[n - UNEVEN * (n >= WIDE and n != batch) for n in x.shape] for x in args]
    uneven = [x.update(shape=tuple(n)) for x, n in zip(args, sizes, strict=True)]
    return None if tuple(uneven) == args else AbstractCall(fn, tuple(uneven))


def _in_float32(function: ProbedFunction) -> AbstractCall | None:
    return (
        _call(function, jnp.float32) if None in dict(function.args).values() else None
    )


def _in_other_order(function: ProbedFunction) -> AbstractCall | None:
    """Take all floating-point arguments with their dims reversed."""
    fn, args = _call(function)
    turns = [_is_float(x) and x.ndim > 1 for x in args]

    def turned(*given: Any) -> Any:
        return fn(*(x.T if t else x for x, t in zip(given, turns, strict=True)))

    shapes = [x.shape[::-1] if t else x.shape for x, t in zip(args, turns, strict=True)]
    new = [x.update(shape=s) for x, s in zip(args, shapes, strict=True)]
    return AbstractCall(turned, tuple(new)) if any(turns) else None


def _with_neighbours(call: AbstractCall | None) -> AbstractCall | None:
    """Compute the first argument by an elementwise op, and read the result in one."""
    if call is None or not _is_float(call.args[0]) or not _one_float(call):
        return None

    def fused(x: Any, *rest: Any) -> Any:
        return jnp.tanh(call.fn(jax.nn.gelu(x), *rest)) * 0.5

    return AbstractCall(fused, call.args)


def _gradient(call: AbstractCall | None) -> AbstractCall | None:
    """Return gradients by all floating-point arguments, which all are results."""
    if call is None or not _one_float(call):
        return None
    by = tuple(i for i, x in enumerate(call.args) if _is_float(x))

    def loss(*args: Any) -> jax.Array:
        return jnp.sum(call.fn(*args).astype(jnp.float32) ** 2)

    return AbstractCall(jax.grad(loss, by), call.args) if by else None


def _in_a_loop(call: AbstractCall | None) -> AbstractCall | None:
    """Run `TRIPS` times, on the last result where types allow, else on each slice."""
    if call is None or not _one_float(call):
        return None
    first, rest = call.args[0], call.args[1:]
    made = jax.eval_shape(call.fn, *call.args)
    if (made.shape, made.dtype) == (first.shape, first.dtype):

        def again(x: Any, *rest: Any) -> Any:
            step = lambda x, _: (call.fn(x, *rest), None)  # noqa: E731
            return lax.scan(step, x, length=TRIPS)[0]

        return AbstractCall(again, call.args)

    def each(xs: Any, *rest: Any) -> Any:
        return lax.map(lambda x: call.fn(x, *rest), xs)

    return AbstractCall(each, (first.update(shape=(TRIPS, *first.shape)), *rest))


VARIATIONS: Mapping[str, Callable[[ProbedFunction], AbstractCall | None]] = {
    "forward": _call,
    "gradient": lambda p: _gradient(_call(p)),
    "float32": _in_float32,
    "uneven": _uneven,
    "other order": _in_other_order,
    "neighbours": lambda p: _with_neighbours(_call(p)),
    "gradient, neighbours": lambda p: _gradient(_with_neighbours(_call(p))),
    "loop": lambda p: _in_a_loop(_call(p)),
    "gradient, loop": lambda p: _gradient(_in_a_loop(_call(p))),
}
"""The variations, by name: of the function in bfloat16, whose sizes divide."""


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _one_float(call: AbstractCall) -> bool:
    """Whether the result is one floating-point array."""
    made = jax.eval_shape(call.fn, *call.args)
    return isinstance(made, jax.ShapeDtypeStruct) and _is_float(made)
