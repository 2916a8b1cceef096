"""For every primitive that has a rule, functions that make use of it, and arguments.

A case takes a random generator and returns `(fn, args)`; shapes differ from call
to call. `CASES` here holds elementwise ops, movements, reductions and random
numbers; `rule_cases_data` and `rule_cases_windows` hold the rest.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name


Rng = np.random.Generator
Case = Callable[[Rng], tuple[Callable[..., Any], tuple[Any, ...]]]


def primitive(name: str) -> Any:
    """A primitive of this JAX by its name; None where this version has none."""
    for module in [m for n, m in list(sys.modules.items()) if n.startswith("jax")]:
        for value in list(vars(module).values()):
            if getattr(value, "name", None) == name and hasattr(value, "bind"):
                return value
    return None


def shape(rng: Rng, rank: int) -> tuple[int, ...]:
    """Mostly even sizes, of which the last can be cut into four."""
    sizes = [int(n) for n in rng.choice([1, 2, 3, 4, 6, 8], rank)]
    return (*sizes[:-1], int(rng.choice([4, 8])))[:rank]


def floats(rng: Rng, *dims: int) -> np.ndarray:
    """Within (0.1, 0.9), where every special function is smooth."""
    return rng.uniform(0.1, 0.9, dims).astype(np.float32)


def normals(rng: Rng, *dims: int) -> np.ndarray:
    return rng.standard_normal(dims).astype(np.float32)


def ints(rng: Rng, *dims: int, high: int = 8) -> np.ndarray:
    return rng.integers(0, high, dims).astype(np.int32)


def bools(rng: Rng, *dims: int) -> np.ndarray:
    return rng.integers(0, 2, dims).astype(bool)


def complexes(rng: Rng, *dims: int) -> np.ndarray:
    return (normals(rng, *dims) + 1j * normals(rng, *dims)).astype(np.complex64)


def words(rng: Rng, *dims: int) -> np.ndarray:
    return rng.integers(0, 2**32, dims).astype(np.uint32)


def each(fn: Callable[..., Any], *makers: Callable[..., np.ndarray]) -> Case:
    """All arguments have one random shape."""

    def case(rng: Rng) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        dims = shape(rng, 2)
        return fn, tuple(make(rng, *dims) for make in makers)

    return case


def on(rank: int, fn: Callable[..., Any], make: Any = normals) -> Case:
    """One argument of a random shape of this rank."""
    return lambda rng: (fn, (make(rng, *shape(rng, rank)),))


def fixed(fn: Callable[..., Any], *dims: int) -> Case:
    """One argument of this shape."""
    return lambda rng: (fn, (normals(rng, *dims),))


def bound(name: str, count: int = 1, **params: Any) -> Callable[..., Any]:
    """A function that binds a primitive, for those without a public face."""

    def fn(*args: Any) -> Any:
        return primitive(name).bind(*args, **params)

    return fn


def keys(rng: Rng, *dims: int) -> jax.Array:
    return jax.random.wrap_key_data(words(rng, *dims, 2))


UNARY = (
    "abs acos asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma"
    " erf erf_inv erfc exp exp2 expm1 floor is_finite lgamma log log1p log2 logistic"
    " neg one_minus_square round rsqrt sign sin sinh sqrt square tan tanh"
).split()

BINARY = (
    "add atan2 complex div eq ge gt igamma igamma_grad_a igammac le lt max min mul ne"
    " nextafter pow rem sub"
).split()


def _reshape_permuted(x: Any, new: tuple[int, ...], order: tuple[int, ...]) -> Any:
    """What gradients of grouped convolutions bind; jnp transposes first."""
    return lax.reshape(x, new, order)


CASES: dict[str, tuple[Case, ...]] = {
    **{
        name: (each(getattr(lax, name), floats),)
        for name in UNARY
        if hasattr(lax, name)
    },
    **{name: (each(getattr(lax, name), floats, floats),) for name in BINARY},
    "acosh": (each(lambda x: lax.acosh(x + 1), floats),),
    "add": (each(lax.add, ints, ints), on(2, lambda x: x[:, :1] + x)),
    "add_any": (each(bound("add_any"), floats, floats),),
    "and": (each(lax.bitwise_and, bools, bools),),
    "or": (each(lax.bitwise_or, ints, ints),),
    "xor": (each(lax.bitwise_xor, ints, ints),),
    "not": (each(lax.bitwise_not, bools),),
    "clz": (each(lax.clz, ints),),
    "population_count": (each(lax.population_count, ints),),
    "conj": (each(lax.conj, complexes),),
    "real": (each(lax.real, complexes),),
    "imag": (each(lax.imag, complexes),),
    "integer_pow": (each(lambda x: x**3, floats),),
    "reduce_precision": (each(lambda x: lax.reduce_precision(x, 5, 10), floats),),
    "convert_element_type": (each(lambda x: x.astype(jnp.bfloat16), floats),),
    "eq_to": (each(bound("eq_to"), floats, floats),),
    "le_to": (each(bound("le_to"), floats, floats),),
    "lt_to": (each(bound("lt_to"), floats, floats),),
    "mulhi": (each(lax.mulhi, words, words),),
    "shift_left": (each(lax.shift_left, ints, ints),),
    "shift_right_logical": (each(lax.shift_right_logical, ints, ints),),
    "shift_right_arithmetic": (each(lax.shift_right_arithmetic, ints, ints),),
    "polygamma": (each(lax.polygamma, floats, floats),),
    "zeta": (each(lambda x, y: lax.zeta(x + 1, y), floats, floats),),
    "regularized_incomplete_beta": (each(lax.betainc, floats, floats, floats),),
    "polynomial": (each(lambda x: lax.polynomial(x, [1.0, 2.0, 3.0]), floats),),
    "clamp": (
        each(lax.clamp, floats, floats, floats),
        on(2, lambda x: lax.clamp(-0.5, x, 0.5)),
    ),
    "select_n": (
        each(lax.select_n, bools, floats, floats),
        on(2, lambda x: lax.select_n(x[0, 0] > 0, x, -x)),
    ),
    "copy": (on(2, jnp.copy),),
    "device_put": (on(2, jax.device_put),),
    "name": (on(2, lambda x: checkpoint_name(x, "x")),),
    "stop_gradient": (on(2, bound("stop_gradient")),),
    "optimization_barrier": (
        lambda rng: (
            lambda x, y: lax.optimization_barrier((x, y)),
            (normals(rng, 4, 2), normals(rng, 8)),
        ),
    ),
    "tie": (lambda rng: (bound("tie"), (normals(rng, 4), normals(rng, 2, 6))),),
    "bitcast_convert_type": (
        on(2, lambda x: lax.bitcast_convert_type(x, jnp.int32)),
        on(2, lambda x: lax.bitcast_convert_type(x, jnp.int16)),
        lambda rng: (
            lambda x: lax.bitcast_convert_type(x, jnp.uint32),
            (ints(rng, 4, 6, 2).astype(np.int16),),
        ),
    ),
    "broadcast_in_dim": (
        on(1, lambda x: jnp.broadcast_to(x[:, None], (x.shape[0], 4))),
        on(2, lambda x: lax.broadcast_in_dim(x, (4, *x.shape, 2), (1, 2))),
        on(0, lambda x: lax.broadcast(x, (4, 2))),
        on(1, lambda x: jnp.broadcast_to(x[None, :1], (6, 8))),
    ),
    "iota": (lambda rng: (lambda: lax.broadcasted_iota(jnp.int32, (4, 8), 1), ()),),
    "iota_2x32_shape": (lambda rng: (bound("iota_2x32_shape", shape=(4, 6)), ()),),
    "transpose": (on(3, lambda x: lax.transpose(x, (2, 0, 1))),),
    "squeeze": (lambda rng: (jnp.squeeze, (normals(rng, 4, 1, 6, 1),)),),
    "rev": (on(3, lambda x: lax.rev(x, (1,))),),
    "slice": (
        lambda rng: (lambda x: x[1:, :, ::2], (normals(rng, 4, 6, 8),)),
        lambda rng: (lambda x: x[:, 2:4], (normals(rng, 8, 6),)),
        lambda rng: (lambda x: x[2:-2, 1:9], (normals(rng, 16, 12),)),
        lambda rng: (lambda x: x[3:6, -1:], (normals(rng, 16, 12),)),
        lambda rng: (lambda x: x[1::2, 2::4], (normals(rng, 16, 32),)),
        lambda rng: (lambda x: x[3:-1:3, 1:-1:2], (normals(rng, 16, 14),)),
    ),
    "pad": (
        on(3, lambda x: lax.pad(x, 1.0, ((1, 2, 0), (0, 0, 0), (0, 0, 1)))),
        lambda rng: (
            lambda x: lax.pad(x, 1.0, ((-1, 1, 0), (0, 0, 0), (0, 1, 1))),
            (normals(rng, 4, 6, 8),),
        ),
        lambda rng: (
            lambda x: lax.pad(x, 1.0, ((1, 3, 0), (3, -3, 0), (7, 8, 0))),
            (normals(rng, 12, 8, 1),),
        ),
        lambda rng: (
            lambda x: lax.pad(x, 1.0, ((1, 0, 1), (0, 3, 3), (5, -1, 2))),
            (normals(rng, 4, 2, 8),),
        ),
        lambda rng: (
            lambda x: lax.pad(x, 1.0, ((-2, 1, 1), (2, -2, 1), (-1, -1, 0))),
            (normals(rng, 9, 8, 6),),
        ),
    ),
    "concatenate": (
        lambda rng: (
            lambda *xs: lax.concatenate(xs, 0),
            (normals(rng, 1, 6), normals(rng, 12, 6), normals(rng, 3, 6)),
        ),
        on(2, lambda x: jnp.concatenate([x, x * 2], 1)),
        lambda rng: (
            lambda *xs: lax.concatenate(xs, 0),
            (normals(rng, 4, 6), normals(rng, 2, 6), normals(rng, 2, 6)),
        ),
    ),
    "split": (
        lambda rng: (lambda x: lax.split(x, (2, 4), 1), (normals(rng, 8, 6, 2),)),
    ),
    "stack": (lambda rng: (lambda *x: lax.stack(x, 1), (normals(rng, 4, 6),) * 2),),
    "unstack": (on(3, lambda x: lax.unstack(x, 1)),),
    "tile": (
        on(2, lambda x: lax.tile(x, (2, 4))),
        on(1, lambda x: lax.tile(x, (4,))),
    ),
    "reshape": tuple(
        fixed(functools.partial(jnp.reshape, shape=new), *old)
        for old, new in [
            ((8, 6), (48,)),
            ((48,), (8, 6)),
            ((4, 6), (8, 3)),
            ((4, 6), (6, 4)),
            ((4, 6, 8), (4, 48)),
            ((4, 48), (4, 6, 8)),
            ((2, 3, 4), (4, 3, 2)),
            ((8, 1, 6), (2, 4, 6, 1)),
            ((2, 16, 12), (2, 16, 4, 3)),
            ((12, 8), (8, 12)),
            ((4, 4, 9), (16, 3, 3)),
            ((2, 4, 8, 2), (16, 8)),
        ]
    )
    + tuple(
        fixed(functools.partial(_reshape_permuted, new=new, order=order), *old)
        for old, new, order in [
            ((3, 2, 1, 8, 1), (3, 2, 8, 1), (0, 1, 3, 2, 4)),
            ((4, 2, 8), (16, 4), (1, 2, 0)),
            ((4, 6), (8, 3), (1, 0)),
        ]
    ),
    **{
        f"reduce_{name}": (on(3, fn), on(2, lambda x, fn=fn: fn(x[None])))
        for name, fn in {
            "sum": lambda x: x.sum((0, 2)),
            "max": lambda x: x.max((0, 2)),
            "min": lambda x: x.min((0, 2)),
            "prod": lambda x: x.prod((0, 2)),
            "and": lambda x: (x > 0).all((0, 2)),
            "or": lambda x: (x > 0).any((0, 2)),
        }.items()
    },
    "reduce_xor": (on(3, lambda x: lax.reduce_xor(x, (0, 2)), ints),),
    "reduce": (
        on(3, lambda x: lax.reduce(x, 1.0, lambda a, b: a + b + a * b, (0, 2))),
        on(2, lambda x: lax.reduce((x, -x), (0.0, 0.0), _add_pairs, (1,))),
    ),
    "argmax": (on(3, lambda x: jnp.argmax(x, 1)),),
    "argmin": (on(2, lambda x: jnp.argmin(x, 0)),),
    "cumsum": (on(3, lambda x: lax.cumsum(x, 1)),),
    "cumprod": (on(3, lambda x: lax.cumprod(x, 0)),),
    "cummax": (on(3, lambda x: lax.cummax(x, 2, reverse=True)),),
    "cummin": (on(3, lambda x: lax.cummin(x, 1)),),
    "cumlogsumexp": (on(3, lambda x: lax.cumlogsumexp(x, 1)),),
    "random_bits": (
        lambda rng: (lambda k: jax.random.bits(k, (8, 6)), (keys(rng),)),
        lambda rng: (lambda k: jax.random.normal(k, (4,)), (jax.random.PRNGKey(3),)),
        lambda rng: (jax.vmap(lambda k: jax.random.bits(k, (4, 2))), (keys(rng, 4),)),
        lambda rng: (
            lambda k: jax.random.bits(k, (4,)),
            (jax.random.key(3, impl="rbg"),),
        ),
    ),
    "random_split": (
        lambda rng: (lambda k: jax.random.split(k, 4), (keys(rng),)),
        lambda rng: (jax.vmap(lambda k: jax.random.split(k, (2, 2))), (keys(rng, 4),)),
    ),
    "random_seed": (lambda rng: (jax.vmap(jax.random.key), (ints(rng, 8),)),),
    "random_fold_in": (
        lambda rng: (jax.vmap(jax.random.fold_in), (keys(rng, 8), ints(rng, 8))),
        lambda rng: (
            jax.vmap(jax.random.fold_in, (None, 0)),
            (keys(rng), ints(rng, 8)),
        ),
    ),
    "random_clone": (lambda rng: (jax.random.clone, (keys(rng, 8, 2),)),),
    "random_wrap": (lambda rng: (jax.random.wrap_key_data, (words(rng, 8, 4, 2),)),),
    "random_unwrap": (lambda rng: (jax.random.key_data, (keys(rng, 8, 4),)),),
    "random_gamma": (
        lambda rng: (
            lambda k, a: jax.random.gamma(k, a),
            (keys(rng), floats(rng, 8, 4)),
        ),
    ),
    "threefry2x32": (each(bound("threefry2x32"), words, words, words, words),),
    "threefry4x32": (each(bound("threefry4x32"), *[words] * 8),),
    "philox2x32": (each(bound("philox2x32"), *[words] * 3),),
    "philox4x32": (each(bound("philox4x32"), *[words] * 6),),
}


def _add_pairs(a: Any, b: Any) -> Any:
    return a[0] + b[0], a[1] + b[1]
