"""Cases of convolutions, pooling and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.frontend.rule_cases import Case, Rng, bound, fixed, normals


def conv(
    image: Sequence[int],
    kernel: Sequence[int],
    layout: tuple[str, str, str] = ("NHWC", "HWIO", "NHWC"),
    grad: int | None = None,
    **options: Any,
) -> Case:
    """A convolution, or its gradient with respect to one operand."""
    options = {"window_strides": (1, 1), "padding": "SAME", **options}

    def run(x: Any, k: Any) -> Any:
        return lax.conv_general_dilated(x, k, dimension_numbers=layout, **options)

    def gradient(x: Any, k: Any) -> Any:
        y, pull = jax.vjp(run, x, k)
        return pull(jnp.sin(y))[grad or 0]

    def case(rng: Rng) -> tuple[Any, tuple[Any, ...]]:
        fn = run if grad is None else gradient
        return fn, (normals(rng, *image), normals(rng, *kernel))

    return case


CONVS = (
    conv((4, 8, 8, 6), (3, 3, 6, 4)),
    conv((4, 8, 8, 6), (3, 3, 6, 4), window_strides=(2, 2)),
    conv((2, 8, 6, 4), (2, 3, 4, 2), padding="VALID"),
    conv((2, 8, 8, 4), (3, 3, 4, 4), rhs_dilation=(2, 1)),
    conv((2, 4, 4, 4), (3, 3, 4, 2), lhs_dilation=(2, 2), padding=((1, 2), (1, 2))),
    conv((2, 4, 8, 8), (8, 2, 3, 3), ("NCHW", "OIHW", "NCHW"), feature_group_count=2),
    conv((2, 8, 8, 4), (3, 3, 1, 8), feature_group_count=4),
    conv((4, 8, 8, 2), (3, 3, 2, 8), batch_group_count=2),
    conv((2, 8, 8, 4), (5, 5, 4, 2), window_strides=(4, 2), padding=((0, 1), (3, 2))),
    conv((2, 8, 8, 4), (1, 1, 4, 2), window_strides=(2, 2), padding="VALID"),
    conv((2, 8, 8, 4), (3, 3, 4, 2), padding=((0, 2), (2, 0))),
    conv((2, 8, 8, 4), (3, 3, 4, 2), padding=((-1, 3), (3, -1))),
    *(
        conv((4, 8, 8, 4), (3, 3, 4, 2), grad=operand, window_strides=(stride, 1))
        for operand in (0, 1)
        for stride in (1, 2)
    ),
    conv((2, 8, 8, 4), (3, 3, 1, 8), grad=0, feature_group_count=4),
    conv((2, 8, 8, 4), (3, 3, 1, 8), grad=1, feature_group_count=4),
    conv((2, 8, 8, 4), (3, 3, 2, 8), grad=1, feature_group_count=2),
    conv((2, 8, 8, 4), (2, 2, 4, 2), grad=0, window_strides=(2, 2), padding="VALID"),
    conv((2, 8, 8, 4), (2, 2, 4, 2), grad=1, window_strides=(2, 2), padding="VALID"),
    conv((2, 8, 8, 4), (3, 3, 4, 2), grad=1, rhs_dilation=(2, 2)),
)


def pool(
    kind: str, window: int, stride: int, padding: Any = "SAME", **more: Any
) -> Any:
    init, fn = {
        "sum": (0.0, lax.add),
        "max": (-jnp.inf, lax.max),
        "min": (jnp.inf, lax.min),
        "any": (1.0, lambda a, b: a * b),
    }[kind]
    return lambda x: lax.reduce_window(
        x, init, fn, (1, window, 1, 2), (1, stride, 1, 1), padding, **more
    )


def pools(kind: str) -> tuple[Case, ...]:
    fns = [
        pool(kind, 3, 2),
        pool(kind, 2, 2),
        pool(kind, 3, 1),
        pool(kind, 2, 4, "VALID"),
        pool(kind, 3, 1, "VALID"),
        pool(kind, 5, 2, ((0, 0), (1, 3), (0, 0), (2, 2))),
        pool(
            kind, 3, 1, ((0, 0), (2, 2), (0, 0), (0, 1)), window_dilation=(1, 2, 1, 1)
        ),
        pool(kind, 3, 1, ((0, 0), (1, 2), (0, 0), (0, 1)), base_dilation=(1, 2, 1, 1)),
    ]
    return tuple(fixed(fn, 2, 8, 4, 4) for fn in fns)


def gradient_of(fn: Any) -> Any:
    return lambda x: jax.vjp(fn, x)[1](jnp.sin(fn(x)))[0]


def tangent_of(fn: Any) -> Any:
    return lambda x: jax.jvp(fn, (x,), (jnp.sin(x),))[1]


def two_pools(rng: Rng) -> tuple[Any, tuple[Any, ...]]:
    """Largest element and where it was: two operands and two initial values."""

    def pick(a: Any, b: Any) -> Any:
        return tuple(jnp.where(a[0] >= b[0], x, y) for x, y in zip(a, b, strict=True))

    def fn(x: Any) -> Any:
        place = lax.broadcasted_iota(jnp.int32, x.shape, 1)
        return lax.reduce_window(
            (x, place), (-jnp.inf, -1), pick, (1, 3, 1), (1, 2, 1), "SAME"
        )

    return fn, (normals(rng, 2, 8, 4),)


def select_and_scatter(rng: Rng) -> tuple[Any, tuple[Any, ...]]:
    """The generic op, which has no public face."""
    select = jax.make_jaxpr(lax.ge)(0.0, 0.0)
    scatter = jax.make_jaxpr(lax.add)(0.0, 0.0)
    fn = bound(
        "select_and_scatter",
        select_jaxpr=getattr(select, "jaxpr", select),
        select_consts=(),
        scatter_jaxpr=getattr(scatter, "jaxpr", scatter),
        scatter_consts=(),
        window_dimensions=(1, 2),
        window_strides=(1, 2),
        padding=((0, 0), (0, 0)),
    )
    return fn, (normals(rng, 4, 8), normals(rng, 4, 4), np.float32(0))


WINDOW_CASES: dict[str, tuple[Case, ...]] = {
    "conv_general_dilated": CONVS,
    "reduce_window": (*pools("any"), two_pools),
    "reduce_window_sum": pools("sum"),
    "reduce_window_max": pools("max"),
    "reduce_window_min": pools("min"),
    "select_and_scatter_add": tuple(
        fixed(gradient_of(pool("max", *options)), 2, 8, 4, 4)
        for options in [(2, 2, "VALID"), (3, 2), (2, 4, "VALID"), (1, 1)]
    ),
    "select_and_gather_add": tuple(
        fixed(tangent_of(pool("max", *options)), 2, 8, 4, 4)
        for options in [(2, 2), (3, 2), (3, 1)]
    ),
    "select_and_scatter": (select_and_scatter,),
}
