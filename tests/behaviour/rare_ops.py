"""Ops of random programs that are rarer than those of `random_programs`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.passes.microbatch.random_programs import Maker


def _matrices(m: Maker) -> Any:
    """Symmetric, positive definite, one for each row of the batch."""
    x = m.params["w"] * m.batch["x"][:, :, None]
    return x @ x.mT / m.d + 2 * jnp.eye(m.d, dtype=x.dtype)


def _start(m: Maker) -> Any:
    """A position that may lie outside."""
    return m.batch["y"][0] * m.chance.choice([1, 3, -2]) - m.chance.randrange(3)


def _like(m: Maker, x: Any) -> Any:
    return m.chance.choice([v for v in m.values if v.shape == x.shape])


def solved(m: Maker) -> Any:
    a, b = _matrices(m), m.batch["x"][..., None]
    fns = [
        lambda: jnp.linalg.solve(a, b),
        lambda: jnp.linalg.cholesky(a),
        lambda: jnp.linalg.inv(a),
        lambda: jnp.linalg.slogdet(a)[1],
        lambda: jax.scipy.linalg.solve_triangular(a, b, lower=True),
        lambda: jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(a), True), b),
        lambda: jnp.linalg.qr(a)[1],
        lambda: lax.stop_gradient(jnp.linalg.eigvalsh(a)),
        lambda: jnp.linalg.svd(a, compute_uv=False),
    ]
    return m.chance.choice(fns)()


def transformed(m: Maker) -> Any:
    x, at = m.any(1), -1
    if m.chance.random() < 0.5:
        at = m.axis(x)
    fns = [
        lambda: jnp.abs(jnp.fft.fft(x, axis=at)) ** 2,
        lambda: jnp.fft.rfft(x, axis=at).real,
        lambda: jnp.fft.ifft(x + 1j * x, axis=at).imag,
    ]
    return m.chance.choice(fns)() / 4


def windowed(m: Maker) -> Any:
    x = m.any(1)
    at, size, stride = m.axis(x), m.chance.choice([2, 3]), m.chance.choice([1, 2])
    window, strides = [1] * x.ndim, [1] * x.ndim
    window[at], strides[at] = size, stride
    padding = m.chance.choice(["SAME", "VALID"])
    if padding == "VALID" and x.shape[at] < size:
        padding = "SAME"
    start, op = m.chance.choice([(0.0, lax.add), (-jnp.inf, lax.max)])
    start = np.asarray(start, x.dtype)
    return lax.reduce_window(x, start, op, window, strides, padding) / 2


def ranked(m: Maker) -> Any:
    x = m.any(1)
    at = m.axis(x)
    fns = [
        lambda: lax.top_k(x, max(x.shape[-1] // 2, 1))[0],
        lambda: jnp.argsort(x, at),
        lambda: jnp.argmax(x, at),
        lambda: jnp.take_along_axis(x, jnp.argsort(x, at), at),
        lambda: lax.sort((x, _like(m, x)), dimension=at, num_keys=1)[1],
        lambda: jnp.median(x, at),
        lambda: jax.nn.one_hot(jnp.argmin(x, at), 4),
    ]
    return m.chance.choice(fns)()


def accumulated(m: Maker) -> Any:
    x = m.any(1)
    at, back = m.axis(x), m.chance.random() < 0.5
    fns = [
        lambda: lax.cumsum(x, at, reverse=back),
        lambda: lax.cummax(x, at, reverse=back),
        lambda: lax.cumlogsumexp(x, at, reverse=back),
        lambda: lax.cumprod(1 + x / 8, at, reverse=back),
        lambda: lax.associative_scan(lambda a, b: a * 0.5 + b, x, axis=at),
        lambda: jnp.diff(x, axis=at) if x.shape[at] > 1 else x,
    ]
    return m.chance.choice(fns)()


def shifted(m: Maker) -> Any:
    x = m.any(1)
    at, by = m.axis(x), m.chance.choice([-1, 1, 2])
    low, high = m.chance.randrange(3), m.chance.randrange(3)
    pads = [(0, 0, 0)] * x.ndim
    pads[at] = (low, high, m.chance.randrange(2))
    fns = [
        lambda: jnp.roll(x, by, at),
        lambda: x + jnp.roll(x, by, at) - jnp.roll(x, -by, at),
        lambda: lax.pad(x, jnp.zeros((), x.dtype), pads),
        lambda: lax.slice_in_dim(x, 0, None, 2, at),
        lambda: jnp.flip(x, at) * x,
        lambda: jnp.repeat(x, 2, at),
        lambda: jnp.tile(x, 2),
        lambda: jnp.split(x, [x.shape[at] // 2], at)[1],
        lambda: jnp.triu(x) if x.ndim > 1 else x,
    ]
    return m.chance.choice(fns)()


def written(m: Maker) -> Any:
    x = m.any(1)
    at, start = m.axis(x), _start(m)
    n = m.chance.choice([1, 1, x.shape[at], max(x.shape[at] // 2, 1)])
    new = lax.slice_in_dim(_like(m, x), 0, n, axis=at) * 2
    fns = [
        lambda: lax.dynamic_update_slice_in_dim(x, new, start, at),
        lambda: lax.dynamic_slice_in_dim(x, start, n, at),
        lambda: lax.dynamic_index_in_dim(x, start, at),
        lambda: x.at[start].add(x[0]),
        lambda: x.at[m.batch["y"]].set(x[0], mode="drop"),
        lambda: x.at[..., :n].multiply(0.5),
        lambda: jnp.take(x, m.batch["y"] - 2, at, mode="clip"),
        lambda: jnp.take(x, m.batch["y"] - 2, at, mode="fill", fill_value=0),
    ]
    return m.chance.choice(fns)()


def segments(m: Maker) -> Any:
    rows, ids = m.batch["h"][:, 0] @ m.params["w"], m.batch["t"][:, 0]
    fns = [
        lambda: jax.ops.segment_sum(rows, ids, m.v),
        lambda: jnp.zeros((m.v, m.d), rows.dtype).at[ids].max(rows),
        lambda: jnp.ones((m.v, m.d), rows.dtype).at[ids].min(rows),
        lambda: jnp.nan_to_num(jax.ops.segment_max(rows, ids, m.v), neginf=0)[ids],
        lambda: m.params["e"].at[ids].set(rows, mode="drop").sum(0),
        lambda: jax.vmap(lambda r, i: r[i])(rows, m.batch["y"]),
    ]
    return m.chance.choice(fns)()


def while_looped(m: Maker) -> Any:
    x = lax.stop_gradient(m.any(1))

    def body(carry: Any) -> Any:
        i, v = carry
        return i + 1, jnp.sin(v) + v.mean()

    times = m.chance.choice([3, m.batch["t"][0, 0] + 1])
    return lax.while_loop(lambda c: c[0] < times, body, (0, x))[1]


def counted(m: Maker) -> Any:
    x = m.any(2)
    at, back = m.axis(x), m.chance.random() < 0.5
    rows = jnp.moveaxis(x, at, 0)

    def write(i: Any, v: Any) -> Any:
        return v.at[i].set(jnp.sin(v[i]) + v[i - 1])

    def cell(carry: Any, row: Any) -> Any:
        state, i = carry
        state = lax.dynamic_update_slice_in_dim(state, row[None], i, 0)
        return (state, i + 2), state.sum(0) * 0.5

    state = jnp.zeros((m.chance.choice([2, 4]), *rows.shape[1:]), x.dtype)
    fns = [
        lambda: lax.fori_loop(1, rows.shape[0], write, rows),
        lambda: lax.scan(cell, (state, 0), rows, reverse=back)[1],
        lambda: lax.map(lambda r: jnp.sort(r, 0) if r.ndim else r, rows),
    ]
    return m.chance.choice(fns)()


def switched(m: Maker) -> Any:
    x = m.any()
    branches = [jnp.sin, lambda v: v * v.mean(), lambda v: jnp.full_like(v, 0.5)]
    return lax.switch(m.batch["t"][0, 0] - 1, branches, x)


def rounded(m: Maker) -> Any:
    x = m.any()
    fns = [
        lambda: x.astype(jnp.bfloat16).astype(x.dtype) * 0 + x,
        lambda: jnp.round(lax.stop_gradient(x) * 4),
        lambda: (lax.stop_gradient(x) > 0) & (x < 0.5),
        lambda: lax.population_count((x > 0).astype(jnp.uint8)),
        lambda: jnp.where(jnp.isnan(x / x), 0.0, x),
        lambda: lax.clamp(-0.5, x, 0.5) if x.dtype == jnp.float32 else x,
    ]
    return m.chance.choice(fns)()


@jax.custom_vjp
def _halved(x: Any) -> Any:
    return x / 2


_halved.defvjp(lambda x: (x / 2, x), lambda x, g: (g * jnp.cos(x),))


def wrapped(m: Maker) -> Any:
    x = m.any(1)
    fns = [
        lambda: _halved(x),
        lambda: jax.jit(lambda v: jnp.sin(v).sum(-1))(x),
        lambda: jax.checkpoint(lambda v: jnp.sin(jnp.cos(v)))(x),
        lambda: jax.vmap(lambda v: v - v.mean())(x),
        lambda: lax.optimization_barrier(x) * 2,
        lambda: jax.nn.logsumexp(x, -1),
        lambda: jax.scipy.special.erf(x) + lax.lgamma(jnp.abs(x) + 1),
    ]
    return m.chance.choice(fns)()


def multiplied(m: Maker) -> Any:
    x, h, w = m.batch["x"], m.batch["h"], m.params["w"]
    fns = [
        lambda: jnp.einsum("bd,bsd,de->bse", x, h, w) / m.d,
        lambda: jnp.einsum("bsd,btd->bst", h, h) / m.d,
        lambda: jnp.kron(x[:2], w)[: m.d],
        lambda: jnp.outer(x[:, 0], x[:, 1]),
        lambda: jnp.cov(x, rowvar=False),
        lambda: jnp.einsum("bsd,vd->bsv", h, m.params["e"]) / m.d,
        lambda: jnp.polyval(x[:3], h),
    ]
    return m.chance.choice(fns)()


RARE = [
    solved, transformed, windowed, ranked, accumulated, shifted, written, segments,
    while_looped, counted, switched, rounded, wrapped, multiplied,
]  # fmt: skip
"""Ops to be drawn with those of `random_programs`; some more than once, as a family."""
