"""Masks are evaluated where data are unknown: the bounds hold for all data."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rhino_jax._compat import is_literal, jaxpr_consts
from rhino_jax.attention.masks import Bounds, evaluated, exactly


S = 6
ROW = lax.broadcasted_iota(jnp.int32, (S, S), 0)
COLUMN = lax.broadcasted_iota(jnp.int32, (S, S), 1)


def _rows(x):
    return lax.broadcast_in_dim(x, (S, S), (0,))


def _columns(x):
    return lax.broadcast_in_dim(x, (S, S), (1,))


def _floats(x):
    return lax.convert_element_type(x, jnp.float32)


def _half(x):
    return lax.convert_element_type(x, jnp.bfloat16)


MASKS = {
    "causal": lambda t: ROW >= COLUMN,
    "padding": lambda t: (ROW >= COLUMN) & (_columns(t != 0) | (ROW == COLUMN)),
    "segments": lambda t: (ROW >= COLUMN) & (_rows(t) == _columns(t)),
    "not later": lambda t: ~(ROW < COLUMN) ^ _columns(t > 3),
    "a product": lambda t: _floats(ROW >= COLUMN) * _floats(_columns(t != 0)) != 0,
    "a sum": lambda t: _floats(ROW >= COLUMN) - _floats(_columns(t > 1)) > 0.5,
    "added": lambda t: lax.select(_columns(t != 0), 0.0 * _floats(ROW), ROW * -1e9),
    "a multiple": lambda t: _floats(_columns(t == 0)) * -1e9,
    "distances": lambda t: lax.max(_floats(COLUMN - ROW) * 0.5, -1e9 + 0.0 * ROW),
    "rounded": lambda t: _half(ROW + 256) >= _half(COLUMN + 256),
    "tenths": lambda t: _floats(ROW) * 0.1 >= _floats(COLUMN) / 10,
    "in one dim": lambda t: lax.reshape(ROW >= COLUMN, (S * S,)),
    "turned": lambda t: lax.transpose(_rows(t == 2) | (ROW > COLUMN), (1, 0)),
    "a part": lambda t: lax.slice(_rows(t > 0) & (ROW > COLUMN), (1, 0), (S, 2)),
}


def bounds_of(fn) -> Bounds | None:
    """Bounds of a function of data that are not known."""
    closed = jax.make_jaxpr(fn)(jnp.zeros(S, jnp.int32))
    jaxpr = closed.jaxpr
    of = dict(zip(jaxpr.constvars, map(exactly, jaxpr_consts(closed)), strict=True))

    def read(atom):
        return exactly(atom.val) if is_literal(atom) else of.get(atom)

    for eqn in jaxpr.eqns:
        of[eqn.outvars[0]] = evaluated(eqn, [read(v) for v in eqn.invars])
    return read(jaxpr.outvars[0])


@pytest.mark.parametrize("name", MASKS)
def test_bounds_hold_for_all_data(name):
    fn, rng = MASKS[name], np.random.default_rng(0)
    bounds = bounds_of(fn)
    assert bounds is not None
    low, high = (np.asarray(x, float) for x in (bounds.low, bounds.high))
    for _ in range(8):
        x = np.asarray(fn(jnp.asarray(rng.integers(0, 5, S), jnp.int32)), float)
        assert np.all((low <= x) & (x <= high))
        assert low.ndim == x.ndim


def test_what_depends_on_positions_alone_is_known():
    known = {name for name, fn in MASKS.items() if bounds_of(fn).is_exact}
    assert known == {"causal", "distances", "in one dim"}


def test_compilers_may_keep_what_a_type_rounds():
    """In bfloat16 257 is 256, or it is compared before it is rounded."""
    bounds = bounds_of(MASKS["rounded"])
    assert (bool(bounds.low[0, 1]), bool(bounds.high[0, 1])) == (False, True)


def test_dims_along_which_nothing_differs_have_size_one():
    bounds = bounds_of(lambda t: lax.broadcast_in_dim(ROW, (8, S, S, 4), (1, 2)))
    assert bounds.low.shape == (1, S, S, 1)
