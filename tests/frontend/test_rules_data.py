"""Rules of indexing, windows and contractions on generated parameters and models."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from jax import lax

from rhino_jax.frontend.check.rule import check_rule
from tests.cases import covering
from tests.frontend.check.index_ops import gather_of, indexing, normals, scatter_of


EXAMPLES = covering([3, 25])


def on_examples(count: int, test: Any, *strategies: Any) -> None:
    """Run a test on so many examples, the same in every run."""
    options = settings(
        deadline=None, derandomize=True, max_examples=count, database=None
    )
    options(given(*strategies)(test))()


@pytest.fixture(autouse=True, scope="module")
def quick_compiles() -> Iterator[None]:
    """Thousands of tiny ops are compiled once each: optimising them is wasted."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def count(name: str, fn: Any, *args: Any, **options: Any) -> int:
    report = check_rule(fn, *args, only={name}, **{"max_pairs": 3, **options})
    assert report.strategies
    return report.num_strategies


@st.composite
def same_product(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of as many elements, of primes in different groups."""
    primes = draw(st.lists(st.sampled_from([2, 2, 2, 3]), min_size=1, max_size=6))

    def grouped() -> tuple[int, ...]:
        dims = [1] * draw(st.integers(1, 4))
        for prime in draw(st.permutations(primes)):
            dims[draw(st.integers(0, len(dims) - 1))] *= prime
        return tuple(dims)

    return grouped(), grouped()


@pytest.mark.parametrize("examples", covering([4, 40]))
def test_reshape(examples: int) -> None:
    def test(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        old, new = shapes
        if old != new:
            count("reshape", lambda x: lax.reshape(x, new), normals(*old))

    on_examples(examples, test, same_product())


def test_reshape_keeps_what_the_major_side_shares() -> None:
    assert count("reshape", lambda x: x.reshape(6, 4), normals(4, 6)) == 1
    assert count("reshape", lambda x: x.reshape(8, 3), normals(4, 6), max_pairs=0) == 3


def check_gather(case: dict[str, Any]) -> None:
    fn, args = gather_of(case)
    count("gather", fn, *args)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_gather(examples: int) -> None:
    on_examples(examples, check_gather, indexing())


def check_scatter(kind: str, case: dict[str, Any]) -> None:
    # XLA:CPU loses updates where index vectors are empty (three into one element).
    assume(case["indexed"])
    fn, args = scatter_of(kind, case)
    count(kind.replace("_", "-"), fn, *args)


@pytest.mark.parametrize(
    ("kind", "examples"),
    covering(
        [
            ("scatter_add", 3),
            ("scatter", 8),
            ("scatter_add", 8),
            ("scatter_max", 8),
            ("scatter_mul", 8),
        ]
    ),
)
def test_scatter(kind: str, examples: int) -> None:
    on_examples(examples, lambda case: check_scatter(kind, case), indexing())


@st.composite
def windows(draw: st.DrawFn) -> dict[str, Any]:
    """One windowed dim: sizes, steps, dilations and padding that give a result."""
    while True:
        size, window = draw(st.sampled_from([4, 8, 12])), draw(st.integers(1, 4))
        stride, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 2))
        base = draw(st.sampled_from([1, 1, 1, 2]))
        low = draw(st.integers(0, 3))
        # Often exactly as much as makes operand and result divide alike.
        fitting = (size // stride - 1) * stride + (window - 1) * dilation + 1
        high = draw(st.sampled_from([0, 1, max(fitting - low - size, 0)]))
        padded = (size - 1) * base + 1 + low + high
        if padded >= (window - 1) * dilation + 1:
            return {
                "size": size,
                "window": window,
                "stride": stride,
                "dilation": dilation,
                "base": base,
                "padding": (low, high),
            }


def check_reduce_window(w: dict[str, Any], op: Any) -> None:
    start = 0.0 if op is lax.add else -jnp.inf

    def fn(x: Any) -> Any:
        return lax.reduce_window(
            x,
            start,
            op,
            (1, w["window"]),
            (1, w["stride"]),
            ((0, 0), w["padding"]),
            base_dilation=(1, w["base"]),
            window_dilation=(1, w["dilation"]),
        )

    name = "reduce_window_sum" if op is lax.add else "reduce_window_max"
    count(name, fn, normals(4, w["size"]))


@pytest.mark.parametrize("examples", EXAMPLES)
def test_reduce_window(examples: int) -> None:
    ops = st.sampled_from([lax.add, lax.max])
    on_examples(examples, check_reduce_window, windows(), ops)


def check_conv(w: dict[str, Any], groups: tuple[int, int], grad: int) -> None:
    """A one-dimensional convolution (0), its input's (1) and kernel's gradient (2)."""

    def fn(x: Any, k: Any) -> Any:
        return lax.conv_general_dilated(
            x,
            k,
            window_strides=(w["stride"],),
            padding=(w["padding"],),
            lhs_dilation=(w["base"],),
            rhs_dilation=(w["dilation"],),
            feature_group_count=groups[0],
            batch_group_count=groups[1],
            dimension_numbers=("NWC", "WIO", "NWC"),
        )

    def run(x: Any, k: Any) -> Any:
        if not grad:
            return fn(x, k)
        return jax.vjp(fn, x, k)[1](jnp.cos(fn(x, k)))[grad - 1]

    args = normals(4, w["size"], 4), normals(w["window"], 4 // groups[0], 4)
    count("conv_general_dilated", run, *args, num_shards=(2,))


@pytest.mark.parametrize("examples", covering([2, 15]))
def test_conv(examples: int) -> None:
    groups = st.sampled_from([(1, 1), (2, 1), (1, 2)])
    on_examples(examples, check_conv, windows(), groups, st.integers(0, 2))


def test_kernel_gradient_can_be_cut_in_space() -> None:
    """Where the kernel of the gradient is the image's size: taps are summed."""

    def loss(k: Any, x: Any) -> Any:
        y = lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.sin(y).sum()

    report = check_rule(
        jax.grad(loss),
        normals(3, 3, 2, 2),
        normals(2, 8, 8, 2),
        only={"conv_general_dilated"},
        max_pairs=4,
    )
    rules = [rule for _, rule, _ in report.strategies]
    assert any("t0~" in rule for rule in rules), rules


def embed(table: Any, tokens: Any) -> Any:
    return table[tokens]


def moe(x: Any, router: Any, up: Any, down: Any) -> Any:
    """Top-2 dispatch to experts by einsum, as in GShard."""
    logits = jax.nn.softmax(x @ router)
    weights, chosen = lax.top_k(logits, 2)
    onehot = jax.nn.one_hot(chosen, router.shape[1])
    place = jnp.cumsum(onehot.sum(1), 0) * onehot.sum(1) - 1
    slots = jax.nn.one_hot(place.astype(int), 4) * onehot.sum(1)[..., None]
    combine = jnp.einsum("tk,tke,tec->tec", weights, onehot, slots)
    inside = jnp.einsum("tec,tm->ecm", slots, x)
    hidden = jax.nn.gelu(jnp.einsum("ecm,emf->ecf", inside, up))
    return jnp.einsum("tec,ecm->tm", combine, jnp.einsum("ecf,efm->ecm", hidden, down))


def attend(x: Any, w: Any, mask: Any) -> Any:
    """Causal attention with heads split off a merged dim, and dropout."""
    q, k, v = jnp.split((x @ w).reshape(2, 8, 2, 12), 3, -1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(4)
    scores = jnp.where(jnp.tril(jnp.ones((8, 8), bool)), scores, -1e9)
    kept = jax.random.bernoulli(mask, 0.9, scores.shape)
    weights = jnp.where(kept, jax.nn.softmax(scores), 0)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(2, 8, 8)


def cross_entropy(logits: Any, labels: Any) -> Any:
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -picked.mean()


def summed(fn: Any) -> Any:
    return lambda *args: jnp.sin(fn(*args)).sum()


TOKENS = np.array([[1, 7, 3, 3], [0, 5, 2, 6]], np.int32)
MODELS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "embedding": (jax.grad(summed(embed)), (normals(8, 4), TOKENS)),
    "moe": (
        jax.grad(summed(moe), (0, 1, 2)),
        (normals(8, 4), normals(4, 4), normals(4, 4, 6), normals(4, 6, 4)),
    ),
    "attention": (
        jax.grad(summed(attend), (0, 1)),
        (normals(2, 8, 8), normals(8, 24), jax.random.key(0)),
    ),
    "cross_entropy": (
        jax.grad(cross_entropy),
        (normals(2, 4, 8), TOKENS),
    ),
    "scan": (
        jax.grad(lambda w, x: lax.scan(_cell, x[0], x)[0].sum() + (w * x).sum()),
        (normals(4), normals(8, 4)),
    ),
    "segment_sum": (
        jax.grad(lambda x, i: (jax.ops.segment_sum(x, i, 4) ** 2).sum()),
        (normals(8, 4), np.array([0, 1, 1, 3, 2, 0, 0, 3], np.int32)),
    ),
}


def _cell(carry: Any, x: Any) -> tuple[Any, Any]:
    carry = jnp.tanh(carry + x)
    return carry, carry


@pytest.mark.parametrize("name", covering(MODELS, ["segment_sum"]))
def test_every_op_of_a_gradient(name: str) -> None:
    fn, args = MODELS[name]
    report = check_rule(fn, *args, num_shards=(2,), max_pairs=1)
    assert report.num_strategies > 10
    assert not report.unknown


def test_vocabulary_can_be_sharded_forward_and_backward() -> None:
    fn, args = MODELS["embedding"]
    options: dict[str, Any] = {"num_shards": (2,), "max_pairs": 0}
    options["only"] = {"gather", "scatter-add"}
    report = check_rule(fn, *args, **options)
    rules = {name: rule for name, rule, _ in report.strategies}
    assert rules["gather"] == "c@ d, a b _ -> a b d"
    assert rules["scatter-add"] == "c@ d, a b _, a b d -> c@ d"


def test_cache_can_be_written_where_the_sequence_is_cut() -> None:
    def write(cache: Any, new: Any, i: Any) -> Any:
        return lax.dynamic_update_slice(cache, new, (0, i, 0))

    report = check_rule(write, normals(2, 8, 4), normals(2, 1, 4), np.int32(5))
    assert report.strategies[-1][1] == "a b@ c, a _ c, ·, ·, · -> a b@ c"
