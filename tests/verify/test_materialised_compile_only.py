"""Which scores of attention XLA:TPU stores, as `analysis.materialised` has it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from rhino_jax.analysis.graph import NodeKind
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.lowering import OBSERVED
from rhino_jax.models.layers import attention
from rhino_jax.verify.compile import compile_lowered
from rhino_jax.verify.hlo.module import arrays_of, parse_module
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


def weighted(scores: jax.Array, v: jax.Array) -> jax.Array:
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(mask, scores * 0.125, -1e9), axis=-1)
    return weights.astype(v.dtype)


def in_float32(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k).astype(jnp.float32)
    return jnp.einsum("bhqs,bshk->bqhk", weighted(scores, v), v)


def in_bfloat16(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    weights = weighted(jnp.einsum("bqhk,bshk->bhqs", q, k), v)
    return jnp.einsum("bhqs,bshk->bqhk", weights, v)


def of_grouped_queries(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    q = q.reshape(*q.shape[:2], 4, -1, q.shape[-1])
    k, v = k[:, :, :4], v[:, :, :4]
    scores = jnp.einsum("bqgrk,bsgk->bgrqs", q, k).astype(jnp.float32)
    return jnp.einsum("bgrqs,bsgk->bqgrk", weighted(scores, v), v)


@pytest.mark.parametrize(
    ("attend", "length", "wide", "narrow"),
    [(in_float32, 512, 1, 2), (in_float32, 1536, 1, 2), (in_float32, 4096, 2, 2),
     (in_bfloat16, 512, 0, 2), (in_bfloat16, 2048, 0, 2),
     (of_grouped_queries, 512, 0, 2), (of_grouped_queries, 2048, 0, 2)],
)  # fmt: skip
def test_scores_or_exponentials_are_stored_as_compiled(
    attend: Callable[..., jax.Array], length: int, wide: int, narrow: int
) -> None:
    """Of a gradient's arrays over queries and keys: in float32 exponentials, or scores
    as well; in bfloat16 the gradients of both, or scores and one gradient."""
    mesh = mesh_of_target("v5e:2x2", {"x": 4})
    heads = jax.ShapeDtypeStruct(
        (2, length, 16, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P())
    )

    def loss(*args: jax.Array) -> jax.Array:
        return jnp.square(attend(*args).astype(jnp.float32)).sum()

    step = jax.grad(loss, (0, 1, 2))
    lowered = jax.jit(step).lower(heads, heads, heads)
    module = parse_module(compile_lowered(lowered, mesh=mesh).hlo_text)
    compiled = Counter(
        array.element
        for i in module.computations[module.entry]
        if i.opcode == "fusion"
        for array in arrays_of(i.type)
        if array.size == 2 * 16 * length**2
    )
    program = trace(step, (heads,) * 3, {}).program
    analysis = ProgramAnalysis.of(program, load_target("v5e:2x2"))
    graph, live = analysis.graph, analysis.liveness
    stored = [
        graph.value(p.id)
        for p in graph.ports
        if live.is_materialised[p.id] and graph.nodes[p.node].kind is NodeKind.OP
    ]
    planned = Counter(
        v.dtype for v in stored if math.prod(v.shape) == 2 * 16 * length**2
    )
    assert (planned["float32"], planned["bfloat16"]) == (wide, narrow)
    assert (compiled["f32"], compiled["bf16"]) == (wide, narrow)
