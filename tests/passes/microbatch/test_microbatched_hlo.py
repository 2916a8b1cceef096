"""Pieces of a batch that is cut over devices: nothing moves but sums."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from rhino_jax._compat import jaxpr_consts, open_jaxpr
from rhino_jax.frontend.trace import trace
from rhino_jax.passes.microbatch import run_in_microbatches


B, S, D = 64, 4, 16
COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\("
)


def collectives(fn, args, specs, out_specs):
    mesh = jax.make_mesh((8,), ("data",))
    shardings = [NamedSharding(mesh, s) for s in specs]
    outs = tuple(NamedSharding(mesh, s) for s in out_specs)
    jitted = jax.jit(fn, in_shardings=shardings, out_shardings=outs)
    return COLLECTIVE.findall(jitted.lower(*args).compile().as_text())


def step(w, x):
    def loss(w):
        keep = jax.random.bernoulli(jax.random.key(0), 0.9, (B, S, D))
        h = jnp.tanh(x.reshape(B * S, D) @ w).reshape(B, S, D) * keep
        return jnp.mean(h**2), h

    (value, h), grad = jax.value_and_grad(loss, has_aux=True)(w)
    return w - grad, value, h


ARGS = tuple(jax.ShapeDtypeStruct(s, "float32") for s in ((D, D), (B, S, D)))


@pytest.mark.parametrize("count", [2, 4])
def test_of_a_batch_over_devices_only_sums_move(count):
    traced = trace(step, ARGS, {}, donate_argnums=(0,))
    new, _ = run_in_microbatches(
        traced.closed_jaxpr, traced.program, f'{{"count": {count}}}'
    )
    opened, consts = open_jaxpr(new), jaxpr_consts(new)
    found = collectives(
        lambda *xs: tuple(jax.core.eval_jaxpr(opened, consts, *xs)),
        ARGS,
        (P(), P("data")),
        (P(), P(), P("data")),
    )
    assert found and {kind for _, kind in found} == {"all-reduce"}


def test_contiguous_pieces_would_be_gathered():
    """Why pieces are strided."""

    def contiguous(w, x):
        pieces = x.reshape(4, B // 4, S, D)
        total, _ = lax.scan(
            lambda t, p: (t + jnp.sum(jnp.sin(p @ w)), None), 0.0, pieces
        )
        return (total,)

    found = collectives(contiguous, ARGS, (P(), P("data")), (P(),))
    assert "all-gather" in {kind for _, kind in found}
