"""Programs whose traffic is known in closed form, for any mesh of axes x and y.

The texts beside it are what the compilers made of them (`compiled.as_text()`,
folders cut from the file names), named `program.target.jax version.hlo.gz`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P


Program = tuple[Callable[..., Any], list[Any]]

ROWS, WIDTH, LAYERS = 2048, 1024, 6
BATCH, SEQUENCE, MODEL, HIDDEN = 32, 1024, 2048, 8192


def lower(program: Callable[[Mesh], Program], mesh: Mesh) -> jax.stages.Lowered:
    fn, args = program(mesh)
    return jax.jit(fn).lower(*args)


def array(mesh: Mesh, shape: tuple[int, ...], *spec: Any, dtype=jnp.bfloat16):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def pin(mesh: Mesh, x: jax.Array, *spec: Any) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def by_hand(mesh: Mesh, fn: Callable[..., Any], ins: Any, outs: Any):
    return jax.shard_map(fn, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)


def round_the_ring(mesh: Mesh, axis: str) -> list[tuple[int, int]]:
    size = mesh.shape[axis]
    return [(i, (i + 1) % size) for i in range(size)]


def one_of_each(mesh: Mesh) -> Program:
    """Every kind once, of a float32 array of WIDTH × WIDTH."""

    def fn(a):
        a = jnp.tanh(jax.lax.psum(a, "x"))
        a = jnp.sin(jax.lax.psum_scatter(a, "y", tiled=True))
        a = jnp.cos(jax.lax.all_gather(a, "y", tiled=True))
        a = jax.lax.all_to_all(a, "x", split_axis=1, concat_axis=0, tiled=True)
        a = jax.lax.ppermute(jnp.tanh(a), "y", round_the_ring(mesh, "y"))
        return jax.lax.psum(jnp.tanh(a), ("x", "y"))

    arg = array(mesh, (WIDTH, WIDTH), dtype=jnp.float32)
    return by_hand(mesh, fn, P(), P()), [arg]


def scanned(mesh: Mesh) -> Program:
    """A gather, a scatter, a permute and an all-to-all in each of LAYERS runs."""
    copies = mesh.shape["y"]

    def layer(a, w):
        a = jnp.tanh(a @ jax.lax.all_gather(w, "y", tiled=True))
        part = jax.lax.psum_scatter(a, "y", scatter_dimension=1, tiled=True)
        a = jnp.concatenate([part] * copies, 1)
        a = jax.lax.ppermute(a, "x", round_the_ring(mesh, "x"))
        b = jax.lax.all_to_all(a, "y", split_axis=1, concat_axis=0, tiled=True)
        return jnp.tanh(b).reshape(a.shape), None

    def fn(a, ws):
        return jax.lax.scan(layer, a, ws)[0]

    args = [
        array(mesh, (ROWS, WIDTH), "x"),
        array(mesh, (LAYERS, WIDTH, WIDTH), None, "y"),
    ]
    return by_hand(mesh, fn, (P("x"), P(None, "y")), P("x")), args


def nested(mesh: Mesh) -> Program:
    """An all-reduce in LAYERS runs of a loop that runs 3 times."""
    width = WIDTH // mesh.shape["y"]

    def inner(a, w):
        return jnp.tanh(jax.lax.psum(a @ w, "y"))[:, :width], None

    def fn(a, ws):
        def outer(a, _):
            return jax.lax.scan(inner, a, ws)[0], None

        return jax.lax.scan(outer, a, None, length=3)[0]

    args = [
        array(mesh, (ROWS, WIDTH), "x", "y"),
        array(mesh, (LAYERS, WIDTH, WIDTH), None, "y"),
    ]
    return by_hand(mesh, fn, (P("x", "y"), P(None, "y")), P("x", "y")), args


def sharded_weights(mesh: Mesh) -> Program:
    """FSDP by hand: each of LAYERS weights gathered, its gradient scattered."""
    axes = ("x", "y")

    def loss(a, ws):
        def layer(a, w):
            return jnp.tanh(a @ jax.lax.all_gather(w, axes, tiled=True)), None

        return jnp.sum(jax.lax.scan(layer, a, ws)[0].astype(jnp.float32))

    args = [
        array(mesh, (ROWS, WIDTH), axes),
        array(mesh, (LAYERS, WIDTH, WIDTH), None, axes),
    ]
    specs = (P(axes), P(None, axes))
    return by_hand(mesh, jax.grad(loss, argnums=1), specs, specs[1]), args


def ring(mesh: Mesh) -> Program:
    """Keys passed on once per device of an axis, as in ring attention."""

    def fn(q, k):
        def step(_, state):
            total, k = state
            total = total + jnp.tanh(q @ k.T) @ k
            return total, jax.lax.ppermute(k, "y", round_the_ring(mesh, "y"))

        return jax.lax.fori_loop(0, mesh.shape["y"], step, (jnp.zeros_like(q), k))[0]

    args = [array(mesh, (ROWS, WIDTH), "y")] * 2
    return by_hand(mesh, fn, (P("y"), P("y")), P("y")), args


def halo(mesh: Mesh) -> Program:
    """A 3 × 3 convolution with rows cut over y."""

    def fn(image, kernel):
        out = jax.lax.conv_general_dilated(
            image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return pin(mesh, out, "x", "y")

    return fn, [array(mesh, (8, 256, 256, 64), "x", "y"), array(mesh, (3, 3, 64, 64))]


def gather_rows(mesh: Mesh) -> Program:
    """Activations cut over y along the sequence, gathered for a matmul."""

    def fn(a, w):
        return pin(mesh, jnp.einsum("bsd,dh->bsh", a, w), "x", None, "y")

    return fn, [
        array(mesh, (BATCH, SEQUENCE, MODEL), "x", "y"),
        array(mesh, (MODEL, HIDDEN), None, "y"),
    ]


def scatter_rows(mesh: Mesh) -> Program:
    """Sums over y, scattered along the sequence."""

    def fn(a, w):
        return pin(mesh, jnp.einsum("bsh,hd->bsd", a, w), "x", "y", None)

    return fn, [
        array(mesh, (BATCH, SEQUENCE, HIDDEN), "x", None, "y"),
        array(mesh, (HIDDEN, MODEL), "y"),
    ]


def gather_weight(mesh: Mesh) -> Program:
    """A weight cut over x, gathered for a matmul."""

    def fn(a, w):
        return pin(mesh, jnp.einsum("bsd,dh->bsh", a, w), "x", None, "y")

    return fn, [
        array(mesh, (BATCH, SEQUENCE, MODEL), "x"),
        array(mesh, (MODEL, HIDDEN), "x", "y"),
    ]


def scatter_weight(mesh: Mesh) -> Program:
    """A weight's gradient, summed over x and cut over it."""

    def fn(a, b):
        return pin(mesh, jnp.einsum("bsd,bsh->dh", a, b), "x", "y")

    return fn, [
        array(mesh, (BATCH, SEQUENCE, MODEL), "x"),
        array(mesh, (BATCH, SEQUENCE, HIDDEN), "x", None, "y"),
    ]


def sequence_parallel(mesh: Mesh) -> Program:
    """`gather_rows` and `scatter_rows` in each of 3 runs of a scan."""

    def layer(a, w):
        h = pin(mesh, jnp.tanh(jnp.einsum("bsd,dh->bsh", a, w[0])), "x", None, "y")
        return pin(mesh, jnp.tanh(jnp.einsum("bsh,hd->bsd", h, w[1])), "x", "y"), None

    def fn(a, ws):
        return jax.lax.scan(layer, a, ws)[0]

    weights = (
        array(mesh, (3, MODEL, HIDDEN), None, None, "y"),
        array(mesh, (3, HIDDEN, MODEL), None, "y"),
    )
    return fn, [array(mesh, (BATCH, SEQUENCE, MODEL), "x", "y"), weights]


GPT_LAYERS, GPT_WIDTH, GPT_VOCABULARY, GPT_HEADS = 4, 1024, 8192, 8


def gpt(mesh: Mesh) -> Program:
    """A training step: scan with remat, weights cut over x and heads over y."""
    width = GPT_WIDTH

    def block(a, w):
        q, k, v = [
            pin(mesh, a @ w[i], "x", None, "y").reshape(BATCH, SEQUENCE, GPT_HEADS, -1)
            for i in range(3)
        ]
        scores = jnp.einsum("bshd,bthd->bhst", q, k).astype(jnp.float32)
        p = jax.nn.softmax(scores).astype(a.dtype)
        mixed = jnp.einsum("bhst,bthd->bshd", p, v).reshape(a.shape)
        a = pin(mesh, a + mixed @ w[3], "x")
        h = pin(mesh, jax.nn.gelu(a @ w[4]), "x", None, "y")
        return pin(mesh, a + h @ w[5], "x"), None

    def loss(params, tokens):
        embedding, ws = params
        a = pin(mesh, embedding[tokens], "x")
        a = jax.lax.scan(jax.checkpoint(block), a, ws)[0]
        logits = pin(mesh, a @ embedding.T, "x", None, "y").astype(jnp.float32)
        right = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - right)

    def step(params, tokens):
        grads = jax.grad(loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    up, down = (None, "x", "y"), (None, "y", "x")
    shapes = [((width, width), up)] * 3 + [
        ((width, width), down),
        ((width, 4 * width), up),
        ((4 * width, width), down),
    ]
    weights = [array(mesh, (GPT_LAYERS, *s), *spec) for s, spec in shapes]
    embedding = array(mesh, (GPT_VOCABULARY, width), "y")
    tokens = array(mesh, (BATCH, SEQUENCE), "x", dtype=jnp.int32)
    return step, [(embedding, weights), tokens]
