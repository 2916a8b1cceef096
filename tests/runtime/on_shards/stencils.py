"""Programs whose elements move by a few places along dims that are worth sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def steps(body: Callable[[Any], Any], state: Any) -> Any:
    return lax.scan(lambda c, _: (body(c), None), state, None, length=3)[0]


def heat(u: Any) -> Any:
    """Periodic, by rolls."""
    rolls = [jnp.roll(u, by, d) for by in (1, -1) for d in (0, 1)]
    return u + 0.1 * (sum(rolls) - 4 * u)


def wave(u: Any, v: Any) -> tuple[Any, Any]:
    """One step of two grids, of which one is read at shifted positions."""
    v = v + (heat(u) - u)
    return u + 0.1 * v, v


def wave_twice(u: Any, v: Any) -> tuple[Any, Any]:
    return wave(*wave(u, v))


def wave_in_scan(u: Any, v: Any) -> Any:
    return lax.scan(lambda c, _: (wave(*c), None), (u, v), None, length=20)[0]


def inside(u: Any) -> Any:
    around = u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2]
    return around - 4 * u[1:-1, 1:-1]


def padded(u: Any) -> Any:
    """Slices, padded with zeros."""
    return jnp.pad(jnp.tanh(inside(u)) + u[1:-1, 1:-1], 1)


def window(u: Any) -> Any:
    """A scatter of the inner part, and a source."""
    return u.at[1:-1, 1:-1].add(0.1 * inside(u)).at[3, 4].add(1.0)


def overwritten(u: Any) -> Any:
    """A window set, the edges by rows."""
    u = u.at[1:-1, 1:-1].set(0.25 * inside(u) + jnp.sin(u[1:-1, 1:-1]))
    return u.at[0].set(u[1]).at[:, -3:].multiply(0.5).at[:, :].add(1.0)


def upwind(u: Any) -> Any:
    """Edges repeated, one side only."""
    p = jnp.pad(u, ((1, 0), (2, 0)), mode="edge")
    return u - 0.3 * (u - p[:-1, 2:]) * jnp.abs(u) - 0.2 * (u - p[1:, :-2])


def periodic(u: Any) -> Any:
    """Halos of width 2, by concatenation."""
    p = jnp.concatenate([u[-2:], u, u[:2]], 0)
    return 0.2 * (p[:-4] * p[3:-1] + p[4:] + u)


def staggered(u: Any) -> Any:
    """Two grids, each half a place apart."""
    e, h = u, u[1:] * 0.5
    h = h.at[:, :-1].add(0.5 * (e[1:, 1:] - e[1:, :-1]))
    return e.at[1:-1].add(0.5 * (h[1:] - h[:-1])) + 0.1 * jnp.gradient(e, axis=1)


def shifted_tokens(u: Any) -> Any:
    """The token before, as RWKV reads it, through a convolution's worth of mixing."""
    before = jnp.concatenate([jnp.zeros_like(u[:1]), u[:-1]], 0)
    return jnp.tanh(0.3 * u + 0.7 * before + 0.1 * jnp.pad(u, ((2, 0), (0, 0)))[:-2])


def blocked(u: Any) -> Any:
    """A write at a constant place, by a dynamic slice."""
    return lax.dynamic_update_slice(u, jnp.sin(u[2:, 2:]), (1, 1))


def edged(u: Any) -> Any:
    """Narrow writes to what elementwise ops make, and no shifts."""
    u = jnp.tanh(1.1 * u).at[:3].set(0.5).at[-2:].add(1.0)
    return jnp.sin(u).at[:, 5].multiply(2.0).at[9:11, 1:4].min(0.1)


def by_padding(u: Any) -> Any:
    """Zeros around: slices of a padded array, in steps, too."""
    q = jnp.pad(u, 1)
    around = q[2:, 1:-1] + q[:-2, 1:-1] + q[1:-1, 2:] + q[1:-1, :-2]
    odd = q[2::2, 1:-1] * 0.1
    return u + 0.1 * (around - 4 * u) + jnp.repeat(odd, 2, 0)[: u.shape[0]]


def cycle(u: Any) -> Any:
    """A multigrid cycle of two grids, to the coarse one and back."""
    r = by_padding(u)
    coarse = r[::2, ::2] + r[1::2, ::2] + r[::2, 1::2] + r[1::2, 1::2]
    coarse = jnp.tanh(by_padding(0.1 * coarse))
    return 0.3 * r + jnp.repeat(jnp.repeat(coarse, 2, 0), 2, 1)


def cycle_by_reshape(u: Any) -> Any:
    n, m = u.shape
    coarse = by_padding(0.1 * u.reshape(n // 2, 2, m // 2, 2).sum((1, 3)))
    return 0.3 * u + jnp.repeat(jnp.repeat(coarse, 2, 0), 2, 1)


def red_black(u: Any) -> Any:
    """Every second row is smoothed with those between, then those."""
    red = 0.5 * u[::2] + 0.25 * (u[1::2] + jnp.roll(u[1::2], 1, 0))
    black = 0.5 * u[1::2] + 0.25 * (red + jnp.roll(red, -1, 0))
    return jnp.stack([red, black], 1).reshape(u.shape)


def red_black_inside(u: Any) -> Any:
    """Likewise, between borders, written where they are read."""
    u = u.at[1:-1:2].set(0.5 * (u[:-2:2] + u[2::2]))
    return u.at[2:-1:2, 1:-1].add(0.1 * (u[1:-2:2, 2:] - u[3::2, :-2]))


def depth(u: Any) -> Any:
    """Space to depth, and back by dilated pads."""
    even, odd = jnp.tanh(u[:, ::2]), u[:, 1::2]
    even = lax.pad(even, 0.0, ((0, 0, 0), (0, 1, 1)))
    return even + lax.pad(0.5 * odd, 0.0, ((0, 0, 0), (1, 0, 1)))


BODIES = (
    heat, padded, window, overwritten, upwind, periodic, staggered, shifted_tokens,
    blocked, edged, by_padding, cycle, cycle_by_reshape, red_black, red_black_inside,
    depth,
)  # fmt: skip


def step_of(body: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A few steps, and the gradient of their sum of squares."""

    def step(u: Any) -> Any:
        return jax.value_and_grad(lambda u: (steps(body, u) ** 2).sum())(u)

    return step
