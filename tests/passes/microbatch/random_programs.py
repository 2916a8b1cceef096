"""Random train steps with batch dims, by seed.

`python random_programs.py FIRST COUNT` runs some and says how many were equal, how
many refused, and which differed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Sizes(NamedTuple):
    """Rows of the batch, its sequence, features, rows of the table."""

    b: int = 6
    s: int = 3
    d: int = 4
    v: int = 5


def arguments(seed: int, sizes: Sizes = Sizes()) -> tuple[Any, Any]:  # noqa: B008
    rng, (b, s, d, v) = np.random.default_rng(seed), sizes

    def normal(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32)

    params = {"w": normal(d, d), "e": normal(v, d), "s": np.float32(0.5)}
    batch = {
        "x": normal(b, d),
        "h": normal(b, s, d),
        "t": rng.integers(v, size=(b, s), dtype=np.int32),
        "y": rng.integers(d, size=b, dtype=np.int32),
    }
    return params, batch


Make = Callable[["Maker"], Any]
"""Makes a value of those so far."""


class Maker:
    """Values so far, and the next one by chance; all numbers stay near one.

    Attributes:
      b, d, v: as of `Sizes`.
    """

    def __init__(self, seed: int, params: Any, batch: Any) -> None:
        (self.b, self.d), (self.v, _) = batch["x"].shape, params["e"].shape
        self.chance, self.params, self.batch = random.Random(seed), params, batch
        self.values = [batch["x"], batch["h"], params["e"][batch["t"]]]

    def any(self, least: int = 0) -> Any:
        found = [v for v in self.values[-6:] + self.values[:3] if v.ndim >= least]
        return self.chance.choice(found or [self.batch["h"]])

    def axis(self, x: Any) -> int:
        return self.chance.randrange(x.ndim)

    def step(self, ops: Sequence[Make]) -> None:
        made = self.chance.choice(ops)(self)
        if made.size > 2000:
            made = made.mean(0)
        if not jnp.issubdtype(made.dtype, jnp.floating):
            made = made.astype(jnp.float32) / 8
        self.values.append(jnp.tanh(made))


def unary(m: Maker) -> Any:
    fn = m.chance.choice([jnp.sin, jnp.exp, jnp.square, jnp.negative, jax.nn.relu])
    return fn(m.any())


def binary(m: Maker) -> Any:
    fn = m.chance.choice([jnp.add, jnp.subtract, jnp.multiply, jnp.maximum])
    x = m.any()
    alike = [v for v in m.values if v.shape == x.shape]
    others = [v for v in m.values if v.shape and x.shape[-v.ndim :] == v.shape]
    return fn(x, m.chance.choice(m.chance.choice([alike, others or alike])))


def weight(m: Maker) -> Any:
    x = m.any(1)
    return x @ m.params["w"] if x.shape[-1] == m.d else x * m.params["s"]


def reduced(m: Maker) -> Any:
    x = m.any(1)
    fn = m.chance.choice([jnp.sum, jnp.mean, jnp.max, jnp.sum, jnp.mean])
    axes = m.axis(x)
    if m.chance.random() < 0.6:
        axes = x.ndim - 1
    return fn(x, axes, keepdims=m.chance.random() < 0.4)


def moved(m: Maker) -> Any:
    x = m.any(2)
    a, b = m.chance.sample(range(x.ndim), 2)
    return jnp.swapaxes(x, a, b)


def merged(m: Maker) -> Any:
    x = m.any(2)
    at = m.chance.randrange(x.ndim - 1)
    shape = x.shape
    return x.reshape(*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])


def split(m: Maker) -> Any:
    x = m.any(1)
    at, n = m.axis(x), m.chance.choice([2, 3])
    if x.shape[at] % n:
        return x + 1
    shape = x.shape
    return x.reshape(*shape[:at], n, shape[at] // n, *shape[at + 1 :])


def joined(m: Maker) -> Any:
    x = m.any(1)
    alike = [v for v in m.values if v.shape == x.shape]
    return jnp.concatenate([x, m.chance.choice(alike)], m.axis(x))


def part(m: Maker) -> Any:
    x = m.any(1)
    at = m.axis(x)
    size = m.chance.choice([x.shape[at], max(x.shape[at] - 1, 1)])
    return lax.slice_in_dim(x, 0, size, axis=at)


def ordered(m: Maker) -> Any:
    x = m.any(1)
    at = x.ndim - 1 if m.chance.random() < 0.7 else m.axis(x)
    fn: Callable[..., Any] = m.chance.choice(
        [jnp.cumsum, jnp.sort, jax.nn.softmax, lambda v, a: jnp.flip(v, a)]
    )
    return fn(x, at)


def against(m: Maker) -> Any:
    """A contraction of two values over a common dim."""
    x, y = m.any(1), m.any(1)
    a = m.axis(x)
    for b in range(y.ndim):
        if y.shape[b] == x.shape[a]:
            return jnp.tensordot(x, y, ((a,), (b,))) / 4
    return x * 0.5


def by_batch(m: Maker) -> Any:
    x, y = m.any(2), m.any(2)
    if x.shape[0] != y.shape[0] or x.shape[-1] != y.shape[-1]:
        return x - 0.5
    return jax.vmap(lambda a, b: jnp.tensordot(a, b, ((-1,), (-1,))))(x, y) / 4


def looked_up(m: Maker) -> Any:
    x = m.any(1)
    way = m.chance.randrange(4)
    if way == 0:
        return m.params["e"][m.batch["t"][:, 0]]
    if way == 1 and x.ndim == 2 and x.shape[0] == m.b:
        return x[jnp.arange(m.b), m.batch["y"] % x.shape[1]]
    if way == 2 and x.shape[0] == m.b:
        at = m.batch["y"].reshape(m.b, *(1,) * (x.ndim - 1)) % x.shape[-1]
        return jnp.take_along_axis(x, at, -1)
    return x[m.batch["y"] % x.shape[0]]


def placed(m: Maker) -> Any:
    x = m.any(1)
    at = lax.broadcasted_iota(jnp.float32, x.shape, m.axis(x))
    return x * jnp.cos(at)


def drawn(m: Maker) -> Any:
    x = m.any(1)
    key = jax.random.key(m.chance.randrange(100))
    return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x, 0)


def scattered(m: Maker) -> Any:
    rows = m.batch["x"] if m.chance.random() < 0.5 else m.batch["h"][:, 0]
    return jnp.zeros((m.v, m.d)).at[m.batch["t"][:, 0]].add(rows @ m.params["w"])


def looped(m: Maker) -> Any:
    x = m.any(2)
    at = m.axis(x) if m.chance.random() < 0.3 else x.ndim - 1

    def cell(h: Any, row: Any) -> Any:
        h = jnp.tanh(h * m.params["s"] + row)
        return h, h

    rows = jnp.moveaxis(x, at, 0)
    last, every = lax.scan(cell, jnp.zeros(rows.shape[1:]), rows)
    return last if m.chance.random() < 0.5 else every


def layers(m: Maker) -> Any:
    x = m.any(1)
    if x.shape[-1] != m.d:
        return x * m.params["s"]

    @jax.checkpoint
    def layer(h: Any, w: Any) -> Any:
        return jnp.tanh(h @ w), h.mean() ** power

    power = m.chance.choice([1, 2])
    stack = jnp.stack([m.params["w"], 0.5 * m.params["w"]])
    last, means = lax.scan(layer, x, stack)
    return last + means.sum()


def chosen(m: Maker) -> Any:
    return lax.cond(m.params["s"] > 0, jnp.sin, lambda v: v * 2, m.any())


OPS = [
    unary, binary, binary, weight, weight, reduced, moved, merged, split, joined, part,
    ordered, against, by_batch, looked_up, placed, drawn, scattered, looped, layers,
    chosen,
]  # fmt: skip


def step_of(seed: int, more: Sequence[Make] = ()) -> Callable[..., Any]:
    """A step of `arguments(seed)`: new parameters, the loss, a value.

    Args:
      seed: of what is drawn.
      more: ops beyond `OPS`.
    """
    ops = [*OPS, *more]

    def loss(params: Any, batch: Any) -> Any:
        maker = Maker(seed, params, batch)
        for _ in range(maker.chance.randint(3, 9)):
            maker.step(ops)
        weights = m = batch["t"].astype(jnp.float32).mean(1)
        last = maker.values[-3:]
        total = sum(v.mean() for v in last) + m.sum() / (1 + weights.sum())
        return total, last[-1]

    def step(params: Any, batch: Any) -> Any:
        (value, out), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value, out

    return step


def main(first: int, count: int) -> None:
    from helpers_microbatch import outcome

    found: dict[str, list[int]] = {}
    for seed in range(first, first + count):
        found.setdefault(outcome(step_of(seed), arguments(seed), (0,)), []).append(seed)
    for what, seeds in found.items():
        print(f"{what}: {len(seeds)}", *(seeds if "equal" not in what else ()))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
