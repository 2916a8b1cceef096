"""Which scores of attention XLA:TPU stores, as `analysis.materialised` has it."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from rhino_jax.hardware.lowering import OBSERVED
from rhino_jax.models.layers import attention
from rhino_jax.verify.compile import compile_lowered
from rhino_jax.verify.hlo.module import parse_module
from tests.verify.extras import mesh_of_target


pytestmark = pytest.mark.compile_only


@pytest.mark.parametrize(
    ("length", "types"),
    [(OBSERVED.longest_row, {"f32", "bf16"}), (2 * OBSERVED.longest_row, {"bf16"})],
)
def test_long_rows_are_stored_as_the_matmul_makes_them(
    length: int, types: set[str]
) -> None:
    mesh = mesh_of_target("v5e:2x2", {"x": 4})
    heads = jax.ShapeDtypeStruct(
        (1, length, 2, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P())
    )

    def step(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        mask = jnp.tril(jnp.ones((length, length), bool))
        _, pull = jax.vjp(lambda *x: attention(*x, scale=0.125, mask=mask), q, k, v)
        return pull(v)

    lowered = jax.jit(step).lower(heads, heads, heads)
    module = parse_module(compile_lowered(lowered, mesh=mesh).hlo_text)
    scores = re.compile(rf"(\w+)\[(?:1,)?2,{length},{length}\]")
    found = {
        dtype
        for i in module.computations[module.entry]
        if i.opcode == "fusion"
        for dtype in scores.findall(i.type)
    }
    assert found & {"f32", "bf16"} == types
