"""Programs whose partial sums meet, and the same written by hand with `shard_map`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import rhino_jax as rhino


LAYERS, TRIPS = 4, 8


@dataclass(frozen=True)
class Case:
    """A program and its layout.

    Attributes:
      fn: of one device.
      by_hand: of one device's shards; sums over axis x where that is needed.
      args: shapes.
      pins: of arguments and results, for the planner.
      specs: of the arguments, as `by_hand` takes them.
      results: likewise.
    """

    fn: Callable[..., Any]
    by_hand: Callable[..., Any]
    args: tuple[Any, ...]
    pins: Mapping[str, P]
    specs: tuple[Any, ...]
    results: Any


def same(x: Any) -> Any:
    return x


def two_products(a: Any, b: Any, c: Any, d: Any) -> Any:
    return a @ b + c @ d


def two_products_by_hand(a: Any, b: Any, c: Any, d: Any) -> Any:
    return lax.psum(a @ b + c @ d, "x")


def _residual(end: Any) -> Any:
    """Layers of products that meet in the residual stream, as the gradients of separate
    projections do; `end` is what is done to each one's sum."""

    def stream(layers: Any, x: Any) -> Any:
        for ups, downs in layers:
            parts = [
                jnp.tanh(x @ up) @ down for up, down in zip(ups, downs, strict=True)
            ]
            x = end(x, functools.reduce(jnp.add, parts))
        return x

    return stream


def _layers(count: int, rows: int, size: int) -> Case:
    shape = jax.ShapeDtypeStruct((size, size), jnp.float32)
    layers = [((shape,) * count, (shape,) * count)] * LAYERS
    spec = (P(None, "x"),) * count, (P("x", None),) * count
    pins = {
        f"layers[{i}][{k}][{n}]": spec[k][n]
        for i in range(LAYERS)
        for k in range(2)
        for n in range(count)
    }
    return Case(
        _residual(lambda x, parts: rhino.pin(x + parts, P())),
        _residual(lambda x, parts: x + lax.psum(parts, "x")),
        (layers, jax.ShapeDtypeStruct((rows, size), jnp.float32)),
        {**pins, "x": P()},
        ([spec] * LAYERS, P()),
        P(),
    )


def _accumulated(total: Any) -> Any:
    def loss(w: Any, x: Any) -> Any:
        return (jnp.tanh(x @ w["a"]) @ w["b"]).sum()

    def step(w: Any, xs: Any) -> Any:
        def one(sums: Any, x: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(w, x)
            return jax.tree.map(jnp.add, sums, grads), value

        zeros = jax.tree.map(jnp.zeros_like, w)
        sums, values = lax.scan(one, zeros, xs)
        return total(sums), total(values)

    return step


def _accumulation(rows: int, size: int) -> Case:
    shape = jax.ShapeDtypeStruct((size, size), jnp.float32)
    xs = jax.ShapeDtypeStruct((TRIPS, rows, size), jnp.float32)
    return Case(
        _accumulated(same),
        _accumulated(lambda sums: lax.psum(sums, "x")),
        ({"a": shape, "b": shape}, xs),
        {"w['a']": P(), "w['b']": P(), "xs": P(None, "x")},
        (P(), P(None, "x")),
        P(),
    )


def _products(rows: int, size: int) -> Case:
    left_, right = (
        jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, size), (size, rows))
    )
    specs = (P(None, "x"), P("x", None)) * 2
    return Case(
        two_products,
        two_products_by_hand,
        (left_, right) * 2,
        {**dict(zip("abcd", specs, strict=True)), "out": P()},
        specs,
        P(),
    )


def _filters(total: Any) -> Any:
    def loss(w: Any, x: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        for _ in range(2):
            x = jax.nn.relu(
                lax.conv_general_dilated(
                    x, w, (1, 1), "SAME", dimension_numbers=numbers
                )
            )
        return (x * x).sum()

    def step(w: Any, xs: Any) -> Any:
        def one(sums: Any, x: Any) -> Any:
            return sums + jax.grad(loss)(w, x), None

        return total(lax.scan(one, jnp.zeros_like(w), xs)[0])

    return step


def _convolutions(images: int, channels: int) -> Case:
    args = [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((3, 3, channels, channels), (TRIPS, images, 28, 28, channels))
    ]
    return Case(
        _filters(same),
        _filters(lambda sums: lax.psum(sums, "x")),
        tuple(args),
        {"w": P(), "xs": P(None, "x")},
        (P(), P(None, "x")),
        P(),
    )


def _recurrent(total: Any) -> Any:
    def loss(w: Any, xs: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            return jnp.tanh(h @ w + x), None

        return (lax.scan(step, jnp.zeros_like(xs[0]), xs)[0] ** 2).sum()

    return lambda w, xs: total(jax.grad(loss)(w, xs))


def _recurrence(rows: int, size: int) -> Case:
    return Case(
        _recurrent(same),
        _recurrent(lambda sums: lax.psum(sums, "x")),
        (
            jax.ShapeDtypeStruct((size, size), jnp.float32),
            jax.ShapeDtypeStruct((32, rows, size), jnp.float32),
        ),
        {"w": P(), "xs": P(None, "x")},
        (P(), P(None, "x")),
        P(),
    )


def more_cases() -> dict[str, Case]:
    """Sums of other ops, and of loops that nobody wrote to add up gradients."""
    return {
        "convolutions": _convolutions(512, 128),
        "recurrence": _recurrence(1024, 1024),
    }


def cases(rows: int, size: int) -> dict[str, Case]:
    """The cases, with matrices of this many rows and features."""
    return {
        "two products": _products(rows, size),
        "q, k, v": _layers(3, rows, size),
        "gate and up": _layers(2, rows, size),
        "accumulation": _accumulation(rows, size),
    }
