"""Rules of elementwise ops, shape ops, products, convolutions, reductions, bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from imported import op_of
from jax import lax

from rhino_jax.frontend.registry import OpContext, lookup
from rhino_jax.frontend.rules.reshape import reshape_rule
from rhino_jax.ir.factor import FactorKind


def key(*shape: int, impl: str = "threefry2x32") -> jax.Array:
    one = jax.random.key(0, impl=impl)
    return jax.random.split(one, shape) if shape else one


def bound(name: str, *args: Any, shapes: Any, **params: Any) -> str:
    """A rule's text, for a primitive that has no public face on all versions."""
    rule_fn = lookup(name)
    assert rule_fn is not None
    ctx = OpContext(
        primitive=name,
        in_shapes=args,
        in_dtypes=("float32",) * len(args),
        out_shapes=tuple(shapes),
        out_dtypes=("float32",) * len(shapes),
        params=params,
    )
    return str(rule_fn(ctx).rule)


def dot(lhs: Any, rhs: Any, lhs_batch: Any = (), rhs_batch: Any = ()) -> Any:
    numbers = ((lhs, rhs), (lhs_batch, rhs_batch))
    return lambda x, y: lax.dot_general(x, y, numbers)


def conv(stride: int = 1, padding: Any = "SAME", **options: Any) -> Any:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        strides = (stride,) * (x.ndim - 2)
        return lax.conv_general_dilated(x, w, strides, padding, **options)

    return fn


CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    # elementwise
    "unary": (jnp.sin, ((4, 8),), "a b -> a b"),
    "binary with scalar": (lambda x: x * 2.0, ((4, 8),), "a b, · -> a b"),
    "size one is expanded": (lax.add, ((4, 8), (4, 1)), "a b, a _ -> a b"),
    "scalars": (lax.add, (1.0, 2.0), "·, · -> ·"),
    "select by scalar": (
        lambda p, x, y: lax.select_n(p, x, y), (True, (4,), (4,)), "·, a, a -> a",
    ),
    "clamp by scalars": (
        lambda x: lax.clamp(0.0, x, 1.0), ((4, 2),), "·, a b, · -> a b",
    ),
    "barrier": (
        lambda x, y: lax.optimization_barrier((x, y)), ((4, 2), (4,)),
        "a b, c -> a b, c",
    ),
    "bitcast, same width": (
        lambda x: lax.bitcast_convert_type(x, "int32"), ((4,),), "a -> a",
    ),
    "bitcast, narrower": (
        lambda x: lax.bitcast_convert_type(x, "uint8"), ((4,),), "a -> a b!",
    ),
    "bitcast, wider": (
        lambda x: lax.bitcast_convert_type(x, "float32"),
        (np.ones((3, 4), np.uint8),), "a b! -> a",
    ),
    # shape
    "broadcast": (lambda x: jnp.broadcast_to(x, (3, 4)), ((4,),), "b -> a b"),
    "broadcast of size one": (
        lambda x: lax.broadcast_in_dim(x, (3, 4), (0, 1)), ((3, 1),), "a _ -> a b",
    ),
    "transpose": (lambda x: x.transpose(2, 0, 1), ((2, 3, 4),), "a b c -> c a b"),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), ((2, 1, 4),), "a _ b -> a b"),
    "reverse": (lambda x: lax.rev(x, (1,)), ((2, 4),), "a b! -> a b!"),
    "iota": (lambda: lax.broadcasted_iota("int32", (2, 3), 0), (), " -> a b"),
    "slice": (lambda x: lax.slice(x, (0, 1), (4, 4)), ((4, 8),), "a b! -> a c!"),
    "slice of most": (lambda x: x[:, 1:6], ((4, 8),), "a b~ -> a b~"),
    "slice of one": (lambda x: lax.slice(x, (0, 1), (4, 2)), ((4, 8),), "a b@ -> a _"),
    "slice of a few": (lambda x: x[:, -2:], ((4, 8),), "a b@ -> a _"),
    "pad": (
        lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, -2, 0))), ((4, 8),),
        "a b~, · -> a b~",
    ),
    "pad between elements": (
        lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 0, 1))), ((4, 8),),
        "a b~, · -> a b~",
    ),
    "pad that leaves out dilated elements": (
        lambda x: lax.pad(x, 0.0, ((0, 0, 0), (-1, 0, 1))), ((4, 8),),
        "a b!, · -> a c!",
    ),
    "slice in steps": (lambda x: x[:, 1::2], ((4, 8),), "a b~ -> a b~"),
    "slice of a few in steps": (lambda x: x[:, :4:2], ((4, 16),), "a b! -> a c!"),
    "pad of a few": (
        lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 5, 0))), ((4, 2),),
        "a _, · -> a b",
    ),
    "concatenate": (
        lambda x, y: lax.concatenate([x, y], 1), ((4, 3), (4, 3)), "a b!, a c! -> a d!",
    ),
    "concatenate at a border": (
        lambda x, y: lax.concatenate([x, y], 1), ((4, 2), (4, 3)), "a c!, a b~ -> a b~",
    ),
    "split": (
        lambda x: lax.split(x, (2, 6), 1), ((4, 8),), "a b! -> a c!, a d!",
    ),
    "stack": (lambda x: jnp.stack([x, x], 1), ((4, 8),), "a c, a c -> a b! c"),
    "tile": (lambda x: lax.tile(x, (3, 2)), ((4, 8),), "a b -> (c a) (d b)"),
    # products
    "matmul": (jnp.matmul, ((8, 4), (4, 6)), "m k, k n -> m n"),
    "dot with batch": (
        dot((2,), (1,), (0,), (0,)), ((3, 8, 4), (3, 4, 6)), "b m k, b k n -> b m n",
    ),
    "dot, batch at the end": (
        dot((0,), (2,), (2,), (0,)), ((4, 8, 3), (3, 6, 4)), "k m b, b n k -> b m n",
    ),
    "dot, two of each": (
        dot((1, 3), (2, 0), (0,), (3,)), ((2, 3, 4, 5, 6), (5, 7, 3, 2)),
        "b k0 m0 k1 m1, k1 n k0 b -> b m0 m1 n",
    ),
    "outer product": (dot((), ()), ((3,), (4,)), "m, n -> m n"),
    "inner product": (dot((0,), (0,)), ((4,), (4,)), "k, k -> ·"),
    "ragged": (
        lax.ragged_dot, ((6, 4), (2, 4, 8), np.array([2, 4], np.int32)),
        "m@ k, g! k n, g! -> m@ n",
    ),
    # convolutions
    "conv": (
        conv(), ((2, 3, 8, 8), (4, 3, 3, 3)),
        "n i y0~ y1~, o i t0! t1! -> n o y0~ y1~",
    ),
    "conv, channels last": (
        conv(2, dimension_numbers=("NHWC", "HWIO", "NHWC")),
        ((2, 8, 8, 3), (4, 4, 3, 6)), "n y0~ y1~ i, t0! t1! i o -> n y0~ y1~ o",
    ),
    "conv without padding": (
        conv(padding="VALID"), ((2, 3, 8), (4, 3, 3)), "n i x0!, o i t0! -> n o y0!",
    ),
    "grouped conv": (
        conv(feature_group_count=2), ((2, 6, 8), (4, 3, 3)),
        "n (g i) y0~, (g o) i t0! -> n (g o) y0~",
    ),
    "depthwise conv": (
        conv(feature_group_count=6), ((2, 6, 8), (6, 1, 3)),
        "n (g i) y0~, (g o) i t0! -> n (g o) y0~",
    ),
    "conv with batch groups": (
        conv(batch_group_count=2), ((4, 3, 8), (6, 3, 3)),
        "(g n) i y0~, (g o) i t0! -> n (g o) y0~",
    ),
    "transposed conv": (
        conv(padding=((1, 2),), lhs_dilation=(2,)), ((2, 3, 4), (4, 3, 3)),
        "n i y0~, o i t0! -> n o y0~",
    ),
    # reductions
    "sum": (lambda x: lax.reduce_sum(x, (0, 2)), ((2, 3, 4),), "a b c -> b"),
    "argmax": (lambda x: lax.argmax(x, 1, "int32"), ((2, 3),), "a b^ -> a"),
    "any function": (
        lambda x: lax.reduce(x, 0.0, lambda a, b: a + 2 * b, (0,)), ((2, 3),),
        "a! b, · -> b",
    ),
    "running sum": (lambda x: lax.cumsum(x, 1), ((2, 3),), "a b^ -> a b^"),
    # random numbers
    "bits": (
        lambda k: jax.random.key_data(k).sum() + jax.random.bits(k, (4, 8)), (key(),),
        "·, a b -> a b",
    ),
    "key data": (jax.random.key_data, (key(3),), "a -> a b!"),
    "key from data": (
        jax.random.wrap_key_data, (np.ones((3, 2), np.uint32),), "a b! -> a",
    ),
    "fold in": (
        lambda k: jax.vmap(jax.random.fold_in)(k, jnp.arange(3)), (key(3),),
        "a, a -> a",
    ),
    "generator": (
        lambda k: lax.rng_bit_generator(k, (4,)), (np.ones(4, np.uint32),), "_ -> _, _",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_rule_text(name: str) -> None:
    fn, args, text = CALLS[name]
    op = op_of(fn, *args)
    assert op.is_known
    assert str(op.rule) == text


@pytest.mark.parametrize(
    ("name", "operands", "results", "params", "text"),
    [
        ("expand_dims", [(4, 3)], [(1, 4, 3)], {"dimensions": (0,)}, "a b -> _ a b"),
        ("unstack", [(2, 4)], [(4,), (4,)], {"axis": 0}, "a! b -> b, b"),
        ("tie", [(3,), (4,)], [(4,)], {}, "_, a -> a"),
        ("random_gamma", [(3,), (3, 4)], [(3, 4)], {}, "a, a b -> a b"),
        ("threefry2x32", [(), (), (4,), (4,)], [(4,), (4,)], {}, "·, ·, a, a -> a, a"),
        ("device_put", [(3,), (4,)], [(3,), (4,)], {}, "a, b -> a, b"),
        ("reshape", [(6,)], [(2, 3)], {"dimensions": (0,)}, "(a b) -> a b"),
        ("reshape", [(3, 3, 1, 64, 1)], [(3, 3, 64, 1)],
         {"dimensions": (0, 1, 3, 2, 4)}, "a b _ c _ -> a b c _"),
        ("reshape", [(4, 2, 8)], [(16, 4)], {"dimensions": (1, 2, 0)},
         "c a b -> (a b) c"),
        ("optimization_barrier", [(3,), (4,)], [(3,)], {}, "_, _ -> _"),
        ("add", [(3,), (4, 4)], [(4, 4)], {}, "_, _ _ -> _ _"),
    ],
)  # fmt: skip
def test_rule_text_of_bare_primitives(
    name: str, operands: Any, results: Any, params: Any, text: str
) -> None:
    assert bound(name, *operands, shapes=results, **params) == text


RESHAPES = [
    ((6, 4), (24,), "a b -> (a b)"),
    ((24,), (6, 4), "(a b) -> a b"),
    ((2, 3, 4), (6, 4), "a b c -> (a b) c"),
    ((4, 6), (8, 3), "a (b c) -> (a b) c"),
    ((8, 3), (4, 6), "(a b) c -> a (b c)"),
    ((8, 3), (2, 12), "(a b) c -> a (b c)"),
    ((12, 5), (4, 3, 5), "(a b) c -> a b c"),
    ((4, 6), (6, 4), "(a b!) _ -> (a c!) _"),
    ((6, 4, 5), (4, 6, 5), "(a b!) _ d -> (a c!) _ d"),
    ((3, 4), (4, 3), "_ _ -> _ _"),
    ((4, 9), (6, 6), "(a b!) _ -> (a c!) _"),
    ((2, 10), (4, 5), "a (b c) -> (a b) c"),
    ((4, 5, 2), (2, 10, 2), "(a b) c d -> a (b c) d"),
    ((2, 15), (10, 3), "a (b c) -> (a b) c"),
    ((1, 4, 1), (2, 1, 2), "_ (a b) _ -> a _ b"),
    ((4,), (4, 1), "a -> a _"),
    ((1,), (), "_ -> ·"),
    ((0, 3), (3, 0), "_ _ -> _ _"),
    ((4, 0), (0,), "_ _ -> _"),
    ((2, 6, 4), (4, 12), "a (b c) d -> (a b) (c d)"),
]


@pytest.mark.parametrize(("operand", "result", "text"), RESHAPES)
def test_reshape(operand: Any, result: Any, text: str) -> None:
    assert str(reshape_rule(operand, result)) == text


def test_reshape_keeps_the_sequence_in_a_merged_batch() -> None:
    rule = reshape_rule((8, 128, 4, 64), (1024, 256))
    assert str(rule) == "a b c d -> (a b) (c d)"
    assert [f.size for f in rule.factors] == [8, 128, 4, 64]


@pytest.mark.parametrize(
    ("fn", "kind", "reducer"),
    [
        (jnp.sum, FactorKind.REDUCE, "sum"),
        (jnp.max, FactorKind.REDUCE, "max"),
        (jnp.min, FactorKind.REDUCE, "min"),
        (jnp.prod, FactorKind.REDUCE, "prod"),
        (lambda x: lax.reduce_and(x > 0, (0,)), FactorKind.REDUCE, "and"),
        (lambda x: lax.reduce_or(x > 0, (0,)), FactorKind.REDUCE, "or"),
        (lambda x: lax.reduce_xor(x > 0, (0,)), FactorKind.WHOLE, None),
    ],
)
def test_reducers(fn: Any, kind: FactorKind, reducer: str | None) -> None:
    op = op_of(fn, (4,))
    assert op.rule is not None
    (factor,) = op.rule.factors
    assert (factor.kind, factor.reducer) == (kind, reducer)
    assert op.rule.partial_results(0) == ((0,) if reducer else ())
    assert not op.is_fusible


@pytest.mark.parametrize(
    ("fn", "args", "flops"),
    [
        (jnp.matmul, ((8, 4), (4, 6)), 2 * 8 * 4 * 6),
        (dot((2,), (1,), (0,), (0,)), ((3, 8, 4), (3, 4, 6)), 2 * 3 * 8 * 4 * 6),
        # Taps on the padding of one element on each side count not.
        (conv(), ((2, 3, 8, 8), (4, 3, 3, 3)), 2 * (2 * 4 * 3) * (3 * 8 - 2) ** 2),
        (conv(feature_group_count=6), ((2, 6, 8), (6, 1, 3)), 2 * (2 * 6) * 22),
        (conv(batch_group_count=2), ((4, 3, 8), (6, 3, 3)), 2 * (2 * 6) * 22 * 3),
        # Nor those on zeros between the elements: every second one of 15.
        (
            conv(padding=[(0, 0)], lhs_dilation=(2,)),
            ((1, 3, 8), (4, 3, 3)),
            2 * (4 * 3) * (7 * 2 + 6 * 1),
        ),
        (
            lax.ragged_dot,
            ((6, 4), (2, 4, 8), np.array([2, 4], np.int32)),
            2 * 6 * 4 * 8,
        ),
        (jnp.tanh, ((4, 8),), 32),
        (lambda x: lax.reduce_sum(x, (0,)), ((4, 8),), 32),
        (lambda x: x.T, ((4, 8),), 0),
    ],
)
def test_flops(fn: Any, args: Any, flops: float) -> None:
    assert op_of(fn, *args).flops == flops


HALOS = [
    # (size, kernel, stride, dilation, padding) -> halo of the output position
    ((8, 3, 1, 1, "SAME"), (1, 1)),
    ((8, 4, 1, 1, "SAME"), (1, 2)),
    ((8, 3, 2, 1, "SAME"), (0, 1)),
    ((8, 7, 2, 1, "SAME"), (2, 3)),
    ((8, 3, 1, 2, "SAME"), (2, 2)),
    ((8, 1, 1, 1, "SAME"), (0, 0)),
    ((8, 2, 2, 1, "VALID"), (0, 0)),
    ((8, 3, 1, 1, ((2, 0),)), (2, 0)),
    ((8, 3, 1, 1, ((-1, 3),)), (0, 3)),
    ((8, 3, 1, 1, "VALID"), None),
    ((9, 3, 2, 1, "SAME"), None),
]


@pytest.mark.parametrize(("case", "halo"), HALOS)
def test_halo_of_convolution(case: Any, halo: tuple[int, int] | None) -> None:
    size, kernel, stride, dilation, padding = case
    fn = conv(stride, padding, rhs_dilation=(dilation,))
    op = op_of(fn, (1, 1, size), (1, 1, kernel))
    assert op.rule is not None
    found = [f for f in op.rule.factors if f.kind is FactorKind.HALO]
    assert [f.halo for f in found] == ([] if halo is None else [halo])


@pytest.mark.parametrize(("stride", "halo"), [(1, (1, 1)), (2, (0, 1))])
def test_gradient_of_weights_may_be_cut_in_space(stride: int, halo: Any) -> None:
    def gradient(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.grad(lambda w: (conv(stride)(x, w) ** 2).sum())(w)

    op = op_of(gradient, (2, 3, 8), (4, 3, 3), name="conv_general_dilated")
    assert str(op.rule) == "i n t0~, i o t0~ -> o n y0!"
    assert op.rule is not None
    (factor,) = [f for f in op.rule.factors if f.name == "t0"]
    assert (factor.size, factor.halo, factor.reducer) == (8 // stride, halo, "sum")


@pytest.mark.parametrize(
    ("impl", "text"), [("threefry2x32", "a -> a b c"), ("rbg", "a -> a b! c!")]
)
def test_random_bits_are_free_where_the_generator_counts(impl: str, text: str) -> None:
    fn = jax.vmap(lambda k: jax.random.bits(k, (4, 8)))
    op = op_of(fn, key(3, impl=impl), name="random_bits")
    assert str(op.rule) == text


def test_fusible_ops() -> None:
    fusible = (jnp.exp, lambda x: x.T, lambda x: jnp.broadcast_to(x, (3, 4, 8)))
    assert all(op_of(fn, (4, 8)).is_fusible for fn in fusible)
    made = (lambda x: x @ x.T, lambda x: lax.cumsum(x, 0), lambda x: jnp.stack([x, x]))
    assert not any(op_of(fn, (4, 8)).is_fusible for fn in made)


@pytest.mark.parametrize("text", ["bts,bst->bts", "bt,bs->bts"])
def test_a_product_that_contracts_nothing_is_a_multiplication(text: str) -> None:
    """`jnp.einsum` makes them of three operands; no matrix unit runs them."""
    sizes = dict(b=4, t=8, s=8)
    args = [jnp.zeros([sizes[d] for d in dims]) for dims in text[:-5].split(",")]
    op = op_of(lambda *a: jnp.einsum(text, *a), *args)
    assert op.name == "dot_general"
    assert op.is_fusible and not op.traits.is_contraction and op.flops == 4 * 8 * 8


@pytest.mark.parametrize(
    ("image", "kernel", "options", "expected"),
    [
        (
            (4, 14, 14, 8),
            (3, 3, 8, 16),
            {},
            (([8, 16, 1], False), ([16, 8, 1], False), ([8, 16, 1], True)),
        ),
        (
            (4, 14, 14, 8),
            (3, 3, 2, 16),
            {"feature_group_count": 4},
            (([2, 4, 4], False), ([4, 2, 4], False), ([2, 4, 4], True)),
        ),
        # 4 x 4 patches of 16 x 16: the batch has the part of channels in gradients.
        (
            (4, 64, 64, 3),
            (16, 16, 3, 32),
            {"stride": 16, "padding": "VALID"},
            (([3, 32, 1], False), ([32, 4, 1], False), ([4, 32, 1], False)),
        ),
        # A kernel that is larger than the result is taken for that of a gradient.
        (
            (4, 7, 7, 8),
            (7, 7, 8, 16),
            {"padding": "VALID"},
            (([4, 16, 1], True), ([16, 8, 1], False), ([4, 16, 1], False)),
        ),
        (
            (4, 1, 1, 8),
            (1, 1, 8, 16),
            {},
            (([8, 16, 1], False), ([16, 8, 1], False), ([4, 16, 1], False)),
        ),
    ],
)
def test_channels_of_convolutions_and_their_gradients(
    image: tuple[int, ...],
    kernel: tuple[int, ...],
    options: dict[str, Any],
    expected: Any,
) -> None:
    """Input channels, output channels, groups, and whether a kernel's gradient."""
    fn = conv(**options, dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def channels(arg: int | None) -> tuple[list[int], bool]:
        step = fn if arg is None else jax.grad(lambda x, w: fn(x, w).sum(), arg)
        name = "conv_general_dilated"
        op = op_of(step, image, kernel, name=name)
        assert op.rule is not None
        sizes = [op.rule.factors[c].size if c is not None else 1
                 for c in op.traits.channels]  # fmt: skip
        return sizes, op.traits.is_kernel_gradient

    assert tuple(map(channels, (None, 0, 1))) == expected
