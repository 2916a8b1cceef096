"""Writes and reads in steps, and slices of padded arrays: pads and slices in their
place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rhino_jax._compat import new_primitive
from rhino_jax.frontend.tracing.transforms import transformed


X = jnp.asarray(np.random.default_rng(0).standard_normal((16, 9)), jnp.float32)

INDEXED = {"gather", "scatter", "scatter-add", "scatter-mul", "scatter-max"}


def both(fn: Callable[[Any], Any]) -> tuple[set[str], Any, Any]:
    """Return the primitives of a function once transformed, its result, and that of the
    function itself."""
    closed = jax.make_jaxpr(fn)(X)
    found, _ = transformed(closed, "fn")
    names = {eqn.primitive.name for eqn in found.jaxpr.eqns}
    results = (jax.core.eval_jaxpr(j.jaxpr, j.consts, X)[0] for j in (found, closed))
    return names, *results


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.at[::2].set(x[1::2]),
        lambda x: x.at[1:-1:2, 1:-1].add(x[1:-1:2, 1:-1]),
        lambda x: x.at[::4, ::2].multiply(x[1::4, ::2]),
        lambda x: x.at[:, 1::3].max(x[:, ::3]),
        lambda x: x.reshape(4, 4, 9).at[:, ::2, ::2].set(2.0),
        lambda x: jax.vmap(lambda row: row.at[::2].set(2 * row[::2]))(x),
        lambda x: x.at[jax.jit(lambda: 2 * jax.lax.iota(int, 8))()].set(0.0),
        jax.grad(lambda x: (x.at[::2].set(jnp.sin(x[1::2])) ** 2).sum()),
    ],
)
def test_writes_in_steps_are_pads(fn: Callable[[Any], Any]) -> None:
    names, got, want = both(fn)
    assert not names & INDEXED
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.at[jnp.arange(0, 18, 2)].add(1.0),
        lambda x: x.at[jnp.arange(8) * 2, jnp.arange(8)].set(1.0),
        lambda x: x.at[:4:2].multiply(3.0),
        lambda x: x.at[::-2].set(x[::2]),
        lambda x: x.at[jax.random.categorical(jax.random.key(0), x[0])].set(1.0),
    ],
)
def test_other_writes_stay(fn: Callable[[Any], Any]) -> None:
    names, got, want = both(fn)
    assert names & INDEXED
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "fn",
    [
        lambda q: q[2:, 1:-1] + q[:-2, 1:-1] + q[1:-1, 1:-1],
        lambda q: q[1::2, :-2] + q[3::2, 2:].sum(),
        lambda q: q[:-2:3],
    ],
)
def test_slices_of_a_padded_array_are_pads(fn: Callable[[Any], Any]) -> None:
    names, got, want = both(lambda x: fn(jnp.pad(x, 1, constant_values=2.0)))
    closed, _ = transformed(jax.make_jaxpr(lambda x: fn(jnp.pad(x, 1)))(X), "fn")
    slices = [e.params for e in closed.jaxpr.eqns if e.primitive.name == "slice"]
    assert all(set(p["start_indices"]) == {0} for p in slices)
    assert "pad" in names
    np.testing.assert_array_equal(got, want)


def test_a_part_of_the_padding_stays_a_slice() -> None:
    names, got, want = both(lambda x: jnp.pad(x, 20)[:3])
    assert "slice" in names
    np.testing.assert_array_equal(got, want)


def test_literal_indices_may_choose_the_branches_of_a_scan() -> None:
    def chosen(x: Any) -> Any:
        def body(x: Any, kind: Any) -> Any:
            return jax.lax.switch(kind, [jnp.tanh, jnp.negative, jnp.sin], x), None

        return jax.lax.scan(body, x, jnp.array([0, 1, 2, 1, 0]))[0].sum()

    _, got, want = both(jax.grad(chosen))
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("name", ["gather_rows", "scatter_rows", "scattered"])
def test_a_users_op_is_no_gather_by_its_name(name: str) -> None:
    op = new_primitive(name)
    op.def_abstract_eval(lambda x: x)
    jaxpr = jax.make_jaxpr(lambda x: op.bind(x) + 1.0)(jnp.ones((4, 2)))
    found, _ = transformed(jaxpr, "f")
    assert [eqn.primitive.name for eqn in found.eqns] == [name, "add"]
