"""Cases of contractions, indices, sorting and factorisations."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import linalg

from rhino_jax._compat import fused_attention_traced
from tests.frontend.rule_cases import Case, Rng, bound, ints, normals, on, shape


def dot(rng: Rng) -> tuple[Any, tuple[Any, ...]]:
    """Random numbers of batch, contracted and free dims, in random places."""
    counts = rng.integers(0, 3, 4)
    letters = iter("abcdefgh")
    batch, contract, left, right = (
        [next(letters) for _ in range(int(n))] for n in counts
    )
    sizes = dict(zip("abcdefgh", shape(rng, 8), strict=True))
    lhs = list(rng.permutation(batch + contract + left))
    rhs = list(rng.permutation(batch + contract + right))
    numbers = tuple(
        tuple(tuple(side.index(x) for x in names) for side in (lhs, rhs))
        for names in (contract, batch)
    )
    args = tuple(normals(rng, *(sizes[x] for x in side)) for side in (lhs, rhs))
    return lambda x, y: lax.dot_general(x, y, numbers), args


SETS = (
    lax.RaggedDotDimensionNumbers((((3,), (2,)), ((0,), (0,))), [2], [1]),
    lax.RaggedDotDimensionNumbers((((1, 2), (1, 2)), ((0,), (0,))), [2], []),
)
"""Dims of grouped matmuls of [batch, blocks, rows, columns]: by rows, by matrices."""


def in_sets(rng: Rng) -> np.ndarray:
    """Sizes of two groups in two batches of two blocks."""
    return rng.integers(0, 5, (2, 2, 2), dtype=np.int32)


def attention(*, bias: Any = (), is_gradient: bool = False, **options: Any) -> Case:
    """cuDNN's attention of eight heads on four key heads; an option that is a shape is
    one of lengths of rows."""

    def case(rng: Rng) -> tuple[Any, tuple[Any, ...]]:
        lengths = {
            name: rng.integers(4, 9, given, dtype=np.int32)
            for name, given in options.items()
            if name.endswith("lengths")
        }
        arrays = [normals(rng, 4, 8, heads, 16) for heads in (8, 4, 4)]
        arrays += [normals(rng, *bias, 8, 8)] if bias else []

        def fn(*arrays: Any) -> Any:
            with fused_attention_traced():
                out = jax.nn.dot_product_attention(
                    *(x.astype(jnp.float16) for x in arrays),
                    implementation="cudnn",
                    **options | lengths,
                )
            return jnp.sin(out.astype(jnp.float32)).sum() if is_gradient else out

        grad = jax.grad(fn, tuple(range(len(arrays))))
        return grad if is_gradient else fn, tuple(arrays)

    return case


TABLE = np.array([[0, 7], [3, 9], [7, 2], [-1, 5]], np.int32)
"""Indices into eight rows, with some out of range."""


def at(method: str, mode: str | None = None) -> Case:
    """`x.at[i].add(u)` and its kin, with repeated and out-of-range indices."""

    def case(rng: Rng) -> tuple[Any, tuple[Any, ...]]:
        def fn(x: Any, i: Any, u: Any) -> Any:
            return getattr(x.at[i], method)(u, mode=mode)

        return fn, (normals(rng, 8, 6), TABLE, normals(rng, 4, 2, 6))

    return case


def scatters(method: str) -> tuple[Case, ...]:
    modes = (None, "drop", "clip", "promise_in_bounds")
    rows = [at(method, mode) for mode in modes[:3]]

    def batched(rng: Rng) -> tuple[Any, tuple[Any, ...]]:
        fn = jax.vmap(lambda x, i, u: getattr(x.at[i], method)(u))
        return fn, (normals(rng, 4, 8, 2), ints(rng, 4, 4), normals(rng, 4, 4, 2))

    def pairs(rng: Rng) -> tuple[Any, tuple[Any, ...]]:
        def fn(x: Any, i: Any, j: Any, u: Any) -> Any:
            return getattr(x.at[i, :, j], method)(u)

        return fn, (
            normals(rng, 8, 2, 4),
            ints(rng, 4),
            ints(rng, 4, high=6),
            normals(rng, 4, 2),
        )

    def windows(rng: Rng) -> tuple[Any, tuple[Any, ...]]:
        def fn(x: Any, i: Any, u: Any) -> Any:
            return getattr(x.at[i], method)(u, mode="promise_in_bounds")

        return jax.vmap(fn, (1, None, 1)), (
            normals(rng, 8, 4),
            ints(rng, 2),
            normals(rng, 2, 4),
        )

    return (*rows, batched, pairs, windows)


def take(mode: str, axis: int = 0) -> Case:
    def fn(x: Any, i: Any) -> Any:
        return jnp.take(x, i, axis=axis, mode=mode)

    return lambda rng: (fn, (normals(rng, 8, 8, 2), TABLE))


GATHERS: tuple[Case, ...] = (
    take("fill"),
    take("clip", 1),
    take("wrap"),
    lambda rng: (lambda x, i: x[i], (normals(rng, 8, 4), ints(rng, 4, 2))),
    lambda rng: (lambda x, i: x[i], (ints(rng, 8, 4), TABLE)),
    lambda rng: (lambda x, i: jnp.take(x, i, 0), (normals(rng, 8) > 0, ints(rng, 4))),
    lambda rng: (
        lambda x, i, j: x[i, :, j],
        (normals(rng, 8, 4, 6), ints(rng, 4), ints(rng, 4, high=6)),
    ),
    lambda rng: (
        lambda x, i: jnp.take_along_axis(x, i, 1),
        (normals(rng, 4, 8, 2), ints(rng, 4, 6, 2)),
    ),
    lambda rng: (
        jax.vmap(lambda x, i: lax.dynamic_slice(x, (i, 0), (1, 4))),
        (normals(rng, 4, 8, 4), ints(rng, 4)),
    ),
    lambda rng: (
        jax.vmap(lambda x, i: lax.dynamic_slice(x, (i, 0), (3, 4))),
        (normals(rng, 4, 8, 4), ints(rng, 4)),
    ),
    lambda rng: (lambda k, i: k[i], (jax.random.split(jax.random.key(0), 8), TABLE)),
)


def update(length: int) -> Case:
    """Some rows of eight, from a place that may lie outside."""

    def fn(x: Any, u: Any, i: Any) -> Any:
        return lax.dynamic_update_slice(x, u, (0, i, 0))

    return lambda rng: (
        fn,
        (
            normals(rng, 4, 8, 2),
            normals(rng, 4, length, 2),
            np.int32(rng.integers(-9, 12)),
        ),
    )


def symmetric(rng: Rng) -> np.ndarray:
    x = normals(rng, 4, 2, 4, 4)
    return (x @ x.swapaxes(-1, -2) + 2 * np.eye(4)).astype(np.float32)


def on_matrices(fn: Any, *dims: int) -> tuple[Case, ...]:
    return (lambda rng: (fn, (normals(rng, *(dims or (4, 2, 6, 4))),)),)


def on_symmetric(fn: Any) -> tuple[Case, ...]:
    return (lambda rng: (fn, (symmetric(rng),)),)


DATA_CASES: dict[str, tuple[Case, ...]] = {
    "dot_general": (dot, dot, dot, dot),
    "dot_product_attention_fwd_wrapper": (
        attention(),
        attention(is_causal=True),
        attention(bias=(4, 8)),
        attention(bias=(1, 8)),
    ),
    "dot_product_attention_bwd_wrapper": (
        attention(is_gradient=True, is_causal=True, local_window_size=(2, 0)),
        attention(is_gradient=True, bias=(4, 8)),
        attention(is_gradient=True, bias=(4, 1)),
        attention(is_gradient=True, query_seq_lengths=(4,), key_value_seq_lengths=(4,)),
    ),
    "ragged_dot_general": (
        lambda rng: (
            lax.ragged_dot,
            (normals(rng, 8, 4), normals(rng, 2, 4, 6), np.array([3, 5], np.int32)),
        ),
        lambda rng: (
            jax.grad(lambda x, w, n: jnp.sin(lax.ragged_dot(x, w, n)).sum(), (0, 1)),
            (normals(rng, 8, 4), normals(rng, 4, 4, 6), np.array([0, 5, 0, 2], "i4")),
        ),
        # Sets of group sizes, along a batch dim and blocks of rows.
        lambda rng: (
            partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=SETS[0]),
            (normals(rng, 2, 2, 8, 4), normals(rng, 2, 2, 4, 6), in_sets(rng)),
        ),
        lambda rng: (
            partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=SETS[1]),
            (normals(rng, 2, 2, 8, 4), normals(rng, 2, 2, 8, 6), in_sets(rng)),
        ),
    ),
    "gather": GATHERS,
    "scatter": (
        *scatters("set"),
        lambda rng: (
            lambda x, i: x.at[i].apply(jnp.sin),
            (normals(rng, 8, 4), ints(rng, 2)),
        ),
    ),
    "scatter-add": (
        *scatters("add"),
        lambda rng: (
            lambda x, i: jax.ops.segment_sum(x, i, 4),
            (normals(rng, 8, 2), ints(rng, 8, high=5)),
        ),
        lambda rng: (
            jax.grad(lambda x, i: jnp.sin(x[i]).sum()),
            (normals(rng, 8, 4), TABLE),
        ),
        lambda rng: (
            jax.grad(lambda x, i: jnp.sin(jnp.take_along_axis(x, i, 1)).sum()),
            (normals(rng, 4, 8), ints(rng, 4, 2)),
        ),
    ),
    "scatter-sub": scatters("subtract"),
    "scatter-mul": scatters("multiply"),
    "scatter-min": scatters("min"),
    "scatter-max": scatters("max"),
    "dynamic_slice": (
        lambda rng: (
            lambda x, i: lax.dynamic_slice(x, (i, 0, i), (2, 4, 1)),
            (normals(rng, 8, 4, 6), np.int32(rng.integers(-2, 9))),
        ),
    ),
    "dynamic_update_slice": tuple(update(length) for length in (1, 1, 1, 3, 8)),
    "sort": (
        on(3, lambda x: lax.sort(x, dimension=1)),
        on(2, lambda x: lax.sort((x.round(), x, -x), dimension=0, num_keys=2)),
        on(2, jnp.argsort),
    ),
    "top_k": (
        lambda rng: (lambda x: lax.top_k(x, 3), (normals(rng, 4, 2, 6),)),
        lambda rng: (lambda x: lax.top_k(x, 2, axis=0), (normals(rng, 4, 6),)),
    ),
    "approx_top_k": (
        lambda rng: (lambda x: lax.approx_max_k(x, 2), (normals(rng, 4, 8),)),
        lambda rng: (
            lambda x: lax.approx_min_k(x, 2, reduction_dimension=0),
            (normals(rng, 8, 4),),
        ),
    ),
    "fft": (
        on(3, jnp.fft.fft),
        lambda rng: (jnp.fft.rfft2, (normals(rng, 4, 2, 6, 8),)),
        lambda rng: (jnp.fft.irfft, (normals(rng, 4, 6).astype(np.complex64),)),
    ),
    "cholesky": on_symmetric(linalg.cholesky),
    "lu": on_matrices(linalg.lu),
    "lu_pivots_to_permutation": (
        lambda rng: (
            lambda p: linalg.lu_pivots_to_permutation(p, 6),
            (ints(rng, 4, 2, 4, high=6),),
        ),
    ),
    "qr": on_matrices(lambda x: linalg.qr(x, full_matrices=False)),
    "geqrf": on_matrices(bound("geqrf")),
    "geqp3": (
        lambda rng: (
            bound("geqp3", use_magma=None),
            (normals(rng, 4, 6, 4), np.zeros((4, 4), np.int32)),
        ),
    ),
    "householder_product": (
        lambda rng: (
            linalg.householder_product,
            (normals(rng, 4, 6, 4), normals(rng, 4, 4)),
        ),
    ),
    "ormqr": (
        lambda rng: (
            linalg.ormqr,
            (normals(rng, 4, 6, 4), normals(rng, 4, 4), normals(rng, 4, 6, 2)),
        ),
    ),
    "eigh": on_symmetric(linalg.eigh),
    "eig": on_matrices(linalg.eig, 4, 4, 4),
    "svd": (
        *on_matrices(linalg.svd),
        *on_matrices(lambda x: linalg.svd(x, full_matrices=False)),
    ),
    "schur": on_matrices(linalg.schur, 4, 4, 4),
    "hessenberg": on_matrices(linalg.hessenberg, 4, 4, 4),
    "tridiagonal": on_symmetric(linalg.tridiagonal),
    "triangular_solve": (
        lambda rng: (
            lambda a, b: linalg.triangular_solve(a, b, left_side=True),
            (symmetric(rng)[:, 0], normals(rng, 4, 4, 6)),
        ),
        lambda rng: (
            lambda a, b: linalg.triangular_solve(a, b, left_side=False),
            (symmetric(rng)[:, 0], normals(rng, 4, 6, 4)),
        ),
    ),
    "tridiagonal_solve": (
        lambda rng: (
            linalg.tridiagonal_solve,
            (
                normals(rng, 4, 4),
                normals(rng, 4, 4) + 5,
                normals(rng, 4, 4),
                normals(rng, 4, 4, 2),
            ),
        ),
    ),
    "symmetric_product": (
        lambda rng: (
            lambda a, c: linalg.symmetric_product(a, c, beta=1.0),
            (normals(rng, 4, 4, 6), symmetric(rng)[:, 0]),
        ),
    ),
    "cholesky_update": (
        lambda rng: (linalg.cholesky_update, (np.eye(4, dtype="f"), normals(rng, 4))),
    ),
}
