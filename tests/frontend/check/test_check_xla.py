"""The second truth: what XLA's partitioner makes of the cuts that rules allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rhino_jax.frontend import registry
from rhino_jax.frontend.registry import OpContext, OpRule
from rhino_jax.ir.factor import parse_rule
from tests.cases import covering
from tests.frontend.check.with_xla import check_with_xla


X = np.random.default_rng(1).standard_normal((8, 4)).astype(np.float32)


def pool(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (3, 1), (1, 1), "SAME")


TABLE = np.array([[0, 7], [3, 9], [7, 2], [-1, 5]], np.int32)
XLA_CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "einsum": (
        lambda x, y: jnp.einsum("ab,cb->ac", x, y),
        (np.ones((8, 8), "f"), np.ones((3, 8), "f")),
    ),
    "reductions": (lambda x: (x.sum(0), x.max(1), x.argmax(1)), (X.repeat(2, 1),)),
    "look-up": (lambda x, i: jnp.take(x, i, 0), (X, TABLE)),
    "scatter": (lambda x, i: x.at[i].add(1.0), (X, TABLE.repeat(2, 0))),
    "scatter-max": (
        lambda x, i: x.at[i].max(jnp.ones((8, 2, 4))),
        (X, TABLE.repeat(2, 0)),
    ),
    "cache": (lambda x, i: lax.dynamic_update_slice(x, x[:1], (i, 0)), (X, 5)),
    "pool": (pool, (np.arange(64, dtype=np.float32).reshape(16, 4),)),
    "pool gradient": (
        jax.grad(
            lambda x: lax.reduce_window(
                x, -jnp.inf, lax.max, (2, 1), (2, 1), "VALID"
            ).sum()
        ),
        (np.arange(64, dtype=np.float32).reshape(16, 4) % 7,),
    ),
    "conv": (
        lambda x, k: lax.conv_general_dilated(x, k, (1,), "SAME"),
        (np.ones((2, 4, 16), "f"), np.ones((8, 4, 3), "f")),
    ),
    "steps": (
        jax.grad(lambda x: (x[::2] * x[1::2]).sum() + jnp.sin(x[3::4]).sum()),
        (X.repeat(4, 0),),
    ),
    "steps between borders": (
        jax.grad(lambda x: (x[1:-1:2] ** 2).sum()),
        (X.repeat(9, 0)[:66],),
    ),
    "reshape": (lambda x: x.reshape(8, 2, 4).reshape(16, 4), (X.repeat(2, 0),)),
    "bits": (lambda k: jax.random.bits(k, (8, 8)), (jax.random.key(0),)),
    "sort": (lambda x: lax.sort((x, x), dimension=1, num_keys=1), (X,)),
    "cholesky": (
        lax.linalg.cholesky,
        (np.broadcast_to(np.eye(3, dtype=np.float32), (8, 3, 3)),),
    ),
}


GAPS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    # openxla/xla#47945: grouped convolutions that are not depthwise are gathered.
    "conv_general_dilated": (
        lambda x, k: lax.conv_general_dilated(
            x, k, (1,), "SAME", feature_group_count=2
        ),
        (np.ones((8, 4, 6), "f"), np.ones((4, 2, 3), "f")),
    ),
    # openxla/xla#24, jax-ml/jax#15680: batches of transforms, too (jax 0.10; not 0.12).
    "fft": (jnp.fft.fft, (np.ones((8, 6), "f"),)),
    # XLA:CPU; TPU keeps batches apart (openxla/xla#49006).
    "top_k": (lambda x: lax.top_k(x, 2), (np.ones((8, 6), "f"),)),
}
"""True rules of which XLA does not make use: it gathers the operands instead."""


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:8]), ("x",))


@pytest.mark.parametrize("name", GAPS)
def test_what_xla_moves_beyond_a_rule_is_told(
    name: str, mesh: jax.sharding.Mesh
) -> None:
    fn, args = GAPS[name]
    report = check_with_xla(fn, *args, mesh=mesh)
    assert report.num_strategies > 0
    assert {(m.op, m.kinds) for m in report.moved} <= {(name, ("all-gather",))}


LONG = {"cholesky", "scatter", "bits", "pool gradient"}


@pytest.mark.parametrize("name", covering(XLA_CASES, lambda name: name not in LONG))
def test_xla_agrees(name: str, mesh: jax.sharding.Mesh) -> None:
    fn, args = XLA_CASES[name]
    report = check_with_xla(fn, *args, mesh=mesh)
    assert report.num_strategies > 0
    assert not report.moved


def test_xla_tells_what_a_rule_conceals(
    monkeypatch: pytest.MonkeyPatch, mesh: jax.sharding.Mesh
) -> None:
    """A false rule gives the right result still, as XLA gathers what it needs."""

    def rule(ctx: OpContext) -> OpRule:
        return OpRule(parse_rule("a b -> a b", ctx.in_shapes, ctx.out_shapes))

    monkeypatch.setitem(registry._RULES, "cumsum", rule)
    report = check_with_xla(lambda x: lax.cumsum(x, 0), X, mesh=mesh)
    assert [(m.op, m.factor) for m in report.moved] == [("cumsum", "a")]
