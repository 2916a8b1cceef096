"""Random losses of one example each, and train steps on a batch of them, by seed.

There is no product of matrices, unless by chance: what is learned are factors, shifts
and phases of single numbers, as where a sensor or a physical model is calibrated.
`python random_losses.py FIRST COUNT` runs some, as `random_programs.py` does.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax


B, S, D, BINS = 8, 4, 6, 5


def params_of(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"a": (D,), "b": (S, D), "s": (), "t": (BINS,)}
    return {k: rng.normal(size=n).astype(np.float32) for k, n in shapes.items()}


def batch_of(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed + 1)
    return {
        "x": rng.normal(size=(B, D)).astype(np.float32),
        "h": rng.normal(size=(B, S, D)).astype(np.float32),
        "k": rng.integers(BINS, size=(B, D), dtype=np.int32),
        "y": rng.normal(size=B).astype(np.float32),
        "m": (rng.uniform(size=B) < 0.7).astype(np.float32),
    }


class Maker:
    """Values of one example so far, and the next one by chance."""

    def __init__(self, seed: int, params: Any, example: Any) -> None:
        self.chance, self.params, self.example = random.Random(seed), params, example
        self.values = [example["x"], example["h"]]

    def any(self, least: int = 0) -> Any:
        found = [v for v in self.values[-4:] if v.ndim >= least]
        return self.chance.choice(found or [self.example["h"]])

    def axis(self, x: Any) -> int:
        return self.chance.randrange(x.ndim)

    def step(self) -> None:
        made = self.chance.choice(OPS)(self)
        if jnp.iscomplexobj(made):
            made = jnp.abs(made + 0.1) if self.chance.random() < 0.5 else made.real
        if not jnp.issubdtype(made.dtype, jnp.floating):
            made = made.astype(jnp.float32) / 8
        self.values.append(jnp.tanh(made))


def weight(m: Maker) -> Any:
    x = m.any()
    fits = [p for p in m.params.values() if p.shape == x.shape[x.ndim - p.ndim :]]
    fn = m.chance.choice([jnp.multiply, jnp.add, jnp.subtract, jnp.maximum])
    return fn(x, m.chance.choice(fits))


def unary(m: Maker) -> Any:
    fn = m.chance.choice([
        jnp.sin, jnp.exp, jnp.square, jnp.abs, jax.nn.softplus, lax.erf, jnp.arctan,
        lambda x: jnp.sqrt(x * x + 1), lambda x: jnp.clip(x, -0.5, 0.5),
        lambda x: jnp.power(jnp.abs(x) + 0.1, 1.5), jnp.round,
    ])  # fmt: skip
    return fn(m.any())


def binary(m: Maker) -> Any:
    x = m.any()
    others = [v for v in m.values if v.shape == x.shape[x.ndim - v.ndim :]]
    fn = m.chance.choice([jnp.add, jnp.multiply, jnp.minimum, jnp.hypot, jnp.arctan2])
    return fn(x, m.chance.choice(others) + 0.01)


def reduced(m: Maker) -> Any:
    x = m.any(1)
    fn = m.chance.choice([
        jnp.sum, jnp.mean, jnp.max, jnp.min, jax.nn.logsumexp, jnp.argmax, jnp.prod,
        jnp.linalg.norm,
    ])  # fmt: skip
    return fn(x, axis=m.axis(x))


def along(m: Maker) -> Any:
    """A function along one axis, whose shape is kept."""
    x = m.any(1)
    fn = m.chance.choice([
        jnp.cumsum, jnp.cumprod, jnp.sort, jax.nn.softmax, jax.nn.log_softmax,
        jnp.argsort, lambda v, axis: jnp.roll(v, 1, axis), jnp.flip, lax.cummax,
    ])  # fmt: skip
    return fn(x, axis=m.axis(x))


def fourier(m: Maker) -> Any:
    x = m.any(1)
    spectrum = jnp.fft.rfft(x, axis=-1)
    way = m.chance.randrange(3)
    if way == 0:
        return spectrum
    if way == 1:
        return jnp.fft.irfft(spectrum * m.params["s"], n=x.shape[-1], axis=-1)
    return jnp.fft.fft(x, axis=m.axis(x))


def chosen(m: Maker) -> Any:
    x = m.any()
    way = m.chance.randrange(3)
    if way == 0:
        return jnp.where(x > m.params["s"], x, 0.1 * x)
    if way == 1:
        return lax.cond(x.sum() > 0, jnp.sin, lambda v: 2 * v, x)
    return lax.select(jnp.zeros(x.shape) < x, x, -x)


def scattered(m: Maker) -> Any:
    """A histogram, weighted."""
    x = m.any(1)
    x = x if x.shape[-1] == D else m.example["x"]
    row = x.reshape(-1, D).sum(0)
    way = m.chance.randrange(3)
    if way == 0:
        return jnp.zeros(BINS).at[m.example["k"]].add(row)
    if way == 1:
        return jnp.zeros(BINS).at[m.example["k"]].max(row)
    return jax.ops.segment_sum(row * m.params["s"], m.example["k"], BINS)


def looked_up(m: Maker) -> Any:
    x = m.any(1)
    way = m.chance.randrange(3)
    if way == 0:
        return m.params["t"][m.example["k"]]
    if way == 1:
        return jnp.take(x, m.example["k"] % x.shape[-1], axis=-1)
    return jnp.interp(x, jnp.linspace(-2.0, 2.0, BINS), m.params["t"])


def looped(m: Maker) -> Any:
    """A recurrence, a fixed number of iterations, or a map."""
    x = m.any(1)
    way = m.chance.randrange(4)
    if way == 0:

        def cell(h: Any, row: Any) -> Any:
            return (h := jnp.tanh(h * m.params["s"] + row)), h

        last, every = lax.scan(cell, jnp.zeros(x.shape[1:]), x)
        return last if m.chance.random() < 0.5 else every
    if way == 1:
        return lax.fori_loop(0, 3, lambda i, v: jnp.sin(v * m.params["s"]), x)
    if way == 2:
        return lax.map(lambda row: jnp.cos(row) * m.params["s"], x)
    return lax.associative_scan(jnp.add, x)


def windowed(m: Maker) -> Any:
    x = m.any(1)
    if x.shape[-1] < 3:
        return x * 2
    if m.chance.random() < 0.5:
        return jnp.convolve(x.reshape(-1), m.params["t"], mode="same")
    return jnp.diff(x) if m.chance.random() < 0.5 else jnp.gradient(x, axis=-1)


def joined(m: Maker) -> Any:
    x = m.any(1)
    alike = [v for v in m.values if v.shape == x.shape]
    way = m.chance.randrange(3)
    if way == 0:
        return jnp.concatenate([x, m.chance.choice(alike)])[: x.shape[0]]
    if way == 1:
        return jnp.pad(x[..., 1:], [(0, 0)] * (x.ndim - 1) + [(1, 0)])
    return x.reshape(-1)


def outer(m: Maker) -> Any:
    """All pairs: distances, or products summed."""
    x = m.any(1).reshape(-1)[:D]
    pairs = x[:, None] - x[None, :]
    return (
        jnp.exp(-(pairs**2)).sum(1) if m.chance.random() < 0.5 else x @ jnp.cos(pairs)
    )


def drawn(m: Maker) -> Any:
    x = m.any()
    key = jax.random.key(m.chance.randrange(9))
    return x + 0.1 * jax.random.normal(key, x.shape)


OPS = [
    weight, weight, weight, unary, unary, binary, reduced, along, along, fourier,
    chosen, scattered, looked_up, looped, windowed, joined, outer, drawn,
]  # fmt: skip


def loss_of(seed: int) -> Callable[..., Any]:
    """The loss of an example, and what else its user wants to see of it."""

    def loss(params: Any, example: Any) -> Any:
        maker = Maker(seed, params, example)
        for _ in range(maker.chance.randint(3, 8)):
            maker.step()
        last = maker.values[-1]
        error = (last.mean() + maker.values[-2].sum() / 4 - example["y"]) ** 2
        return error + 1e-3 * params["s"] ** 2, last

    return loss


def of_batch(seed: int) -> Callable[..., Any]:
    """The loss of a batch, and metrics."""
    chance = random.Random(seed + 10_000)
    rows = chance.choice(["vmap", "vmap", "vmap", "map", "map of some"])
    total = chance.choice(["mean", "mean", "sum", "masked"])
    metrics = chance.sample(["max", "squares", "share", "rows", "last", "norm"], 2)
    one = loss_of(seed)

    def loss(params: Any, batch: Any) -> Any:
        def of_one(example: Any) -> Any:
            return one(params, example)

        if rows == "vmap":
            each, last = jax.vmap(of_one)(batch)
        else:
            size = None if rows == "map" else 2
            each, last = lax.map(of_one, batch, batch_size=size)
        value = {
            "mean": each.mean,
            "sum": each.sum,
            "masked": lambda: (each * batch["m"]).sum() / batch["m"].sum(),
        }[total]()
        made = {
            "max": each.max,
            "squares": lambda: (last**2).mean(),
            "share": lambda: (each < 0.5).mean(),
            "rows": lambda: each,
            "last": lambda: last,
            "norm": lambda: jnp.sqrt((last**2).sum()),
        }
        return value, [made[name]() for name in metrics]

    return loss


def step_of(seed: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step and its arguments: parameters, optimizer state, a batch."""
    chance = random.Random(seed + 20_000)
    tx = chance.choice([
        optax.sgd(0.1), optax.sgd(0.1, momentum=0.9), optax.adam(1e-2),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    ])  # fmt: skip
    loss, params = of_batch(seed), params_of(seed)

    def step(params: Any, state: Any, batch: Any) -> Any:
        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, metrics

    return step, (params, tx.init(params), batch_of(seed))


def main(first: int, count: int) -> None:
    from helpers_microbatch import outcome

    found: dict[str, list[int]] = {}
    for seed in range(first, first + count):
        what = outcome(*step_of(seed), (0, 1), (3, 4))
        found.setdefault(what, []).append(seed)
    for what, seeds in found.items():
        print(f"{what}: {len(seeds)}", *(seeds if what != "equal" else ()))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
