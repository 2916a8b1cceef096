"""Element types in which operands of products are sent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import rhino_jax as rhino


def sent_bytes(fn, args, specs, precision, hardware) -> dict[str, float]:
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in args]
    plan = rhino.plan(
        lambda *xs: fn(*xs, precision),
        *arrays,
        mesh={"x": 4},
        hardware=hardware,
        in_shardings=specs,
        out_shardings=specs[0],
    )
    sent: dict[str, float] = {}
    for c in plan.collectives:
        sent[c.kind] = sent.get(c.kind, 0) + c.bytes
    return sent


@pytest.mark.parametrize(
    ("precision", "hardware", "item"),
    [(None, "v5e:2x2", 2), ("highest", "v5e:2x2", 4), (None, "h100:4", 4)],
)
def test_gathered_weights_are_rounded(precision, hardware, item):
    """As in HLO of v5e, libtpu 0.0.52; XLA:GPU gathers float32."""

    def fn(x, w, precision):
        return jnp.dot(x, w, precision=precision)

    args, specs = [(65536, 512), (512, 512)], (P("x"), P("x"))
    sent = sent_bytes(fn, args, specs, precision, hardware)
    assert sent == {"all-gather": item * 512 * 512 * 3 // 4}


@pytest.mark.parametrize(("precision", "item"), [(None, 2), ("highest", 4)])
def test_halos_of_convolutions_are_rounded(precision, item):
    def fn(x, w, precision):
        return lax.conv_general_dilated(x, w, (1,), "SAME", precision=precision)

    args, specs = [(64, 128, 4096), (128, 128, 3)], (P(None, None, "x"), P())
    sent = sent_bytes(fn, args, specs, precision, "v5e:2x2")
    assert sent == {"collective-permute": item * 64 * 128 * 2}
