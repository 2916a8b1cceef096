"""Shards of one op: the block of every operand and result that each device holds.

Plain NumPy, no devices: this is a second, as simple as possible implementation of the
meaning of a rule, which rules are tested against.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rhino_jax.ir.factor import Dim, FactorKind, Layout, Rule


@dataclass(frozen=True, slots=True)
class FactorSharding:
    """One mesh axis of `count` devices that shards one factor."""

    factor: int
    count: int


Strategy = tuple[FactorSharding, ...]
"""The factor that each mesh axis shards; earlier axes are major."""


class ShardMismatch(Exception):
    """Shards that do not combine as the rule states.

    Args:
      why: what is wrong.
      difference: largest absolute difference, where one was measured.
    """

    def __init__(self, why: str, difference: float | None = None) -> None:
        super().__init__(why)
        self.why, self.difference = why, difference


@dataclass(frozen=True, slots=True)
class Shard:
    """One device's part of an op.

    Attributes:
      rule: the op's rule.
      strategy: the factor that each mesh axis shards.
      coordinates: the device's position on every axis.
    """

    rule: Rule
    strategy: Strategy
    coordinates: tuple[int, ...]

    def is_sharded(self, factor: int) -> bool:
        return any(cut.factor == factor for cut in self.strategy)

    def only(self, factors: Collection[int]) -> Shard:
        """Return this shard as it is where no factors but these are sharded."""
        kept = [i for i, cut in enumerate(self.strategy) if cut.factor in factors]
        return Shard(
            self.rule,
            tuple(self.strategy[i] for i in kept),
            tuple(self.coordinates[i] for i in kept),
        )

    def size(self, factor: int) -> int:
        """Return the number of indices of `factor` in this shard."""
        cuts = (cut.count for cut in self.strategy if cut.factor == factor)
        return self.rule.factors[factor].size // math.prod(cuts)

    def start(self, factor: int) -> int:
        """Return the first index of `factor` in this shard."""
        start, size = 0, self.rule.factors[factor].size
        for cut, coordinate in zip(self.strategy, self.coordinates, strict=True):
            if cut.factor == factor:
                size //= cut.count
                start += coordinate * size
        return start

    def halo_range(self, factor: int, dim_size: int) -> tuple[int, int]:
        """Return the range [begin, end) of operand elements of a HALO dim, including
        neighbours'."""
        whole = self.rule.factors[factor]
        if whole.shift is not None:
            return whole.moved_range(self.start(factor), self.size(factor))
        lower, upper = whole.halo
        begin = self.start(factor) * dim_size // whole.size
        end = begin + self.size(factor) * dim_size // whole.size
        return max(begin - lower, 0), min(end + upper, dim_size)

    def local_shape(self, layout: Layout, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of this shard of a result of global `shape`."""
        return tuple(
            math.prod(self.size(f) for f in dim)
            if any(self.is_sharded(f) for f in dim)
            else size
            for dim, size in zip(layout, shape, strict=True)
        )

    def index(self, dim: Dim) -> tuple[slice, ...]:
        """Return this shard's slices of a dim, viewed as the product of its factors."""
        return tuple(slice(self.start(f), self.start(f) + self.size(f)) for f in dim)


def shards_of(rule: Rule, strategy: Strategy) -> list[Shard]:
    """Return the shards of all devices, the last axis fastest."""
    ranges = [range(cut.count) for cut in strategy]
    return [Shard(rule, strategy, c) for c in itertools.product(*ranges)]


def is_legal(
    rule: Rule, factor: int, count: int, shapes: Sequence[tuple[int, ...]]
) -> bool:
    """Whether `factor`, and every dim that it slides over, divides by `count`."""
    whole = rule.factors[factor]
    if not whole.is_cuttable or whole.size % count:
        return False
    if whole.kind is FactorKind.MERGE:
        return False  # The primitive alone does not merge shards' results.
    if whole.kind is not FactorKind.HALO:
        return True
    layouts = (*rule.operands, *rule.results)
    return all(
        factor not in dim or size % count == 0
        for layout, shape in zip(layouts, shapes, strict=True)
        for dim, size in zip(layout, shape, strict=True)
    )


def legal_strategies(
    rule: Rule,
    shapes: Sequence[tuple[int, ...]],
    num_shards: Sequence[int],
    max_pairs: int,
) -> list[Strategy]:
    """Return all strategies that shard one factor, and up to `max_pairs` that shard
    two, 2 × 2.

    Args:
      rule: the op's rule.
      shapes: shapes of all operands, then of all results.
      num_shards: numbers of shards of a single factor.
      max_pairs: number of pairs; sampled, with a fixed seed, where there are more.
    """
    factors = range(len(rule.factors))
    strategies: list[Strategy] = [
        (FactorSharding(f, n),)
        for n in num_shards
        for f in factors
        if is_legal(rule, f, n, shapes)
    ]
    halves = [f for f in factors if is_legal(rule, f, 2, shapes)]
    pairs: list[Strategy] = [
        (FactorSharding(f, 2), FactorSharding(g, 2))
        for f, g in itertools.permutations(halves, 2)
    ]
    if len(pairs) > max_pairs:
        pairs = random.Random(0).sample(pairs, max_pairs)
    return strategies + pairs


def shard_operand(
    array: np.ndarray, layout: Sequence[Dim], shard: Shard, has_halo: bool
) -> np.ndarray:
    """Return a shard's block of an operand; with `has_halo`, including the neighbours'
    elements that its HALO factors need."""
    for position, dim in enumerate(layout):
        if not any(shard.is_sharded(f) for f in dim):
            continue
        is_halo = len(dim) == 1 and shard.rule.factors[dim[0]].kind is FactorKind.HALO
        if is_halo and has_halo:
            begin, end = shard.halo_range(dim[0], array.shape[position])
            array = array[(slice(None),) * position + (slice(begin, end),)]
            continue
        view = _as_factors(array, position, dim, shard.rule)
        block = view[(slice(None),) * position + shard.index(dim)]
        tail = array.shape[position + 1 :]
        local = math.prod(shard.size(f) for f in dim)
        array = block.reshape((*array.shape[:position], local, *tail))
    return array


def _as_factors(array: np.ndarray, position: int, dim: Dim, rule: Rule) -> np.ndarray:
    sizes = tuple(rule.factors[f].size for f in dim)
    if math.prod(sizes) != array.shape[position]:
        raise ShardMismatch(
            f"a dim of size {array.shape[position]} cannot be cut: its factors have"
            f" sizes {sizes}"
        )
    head, tail = array.shape[:position], array.shape[position + 1 :]
    return array.reshape(head + sizes + tail)


REDUCERS: Mapping[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def combine(
    rule: Rule,
    strategy: Strategy,
    result: int,
    shape: tuple[int, ...],
    parts: Mapping[tuple[int, ...], np.ndarray],
) -> np.ndarray:
    """Combine the shards of one result as the rule states.

    Args:
      rule: the op's rule.
      strategy: the factor that each mesh axis shards.
      result: position of the result.
      shape: its global shape.
      parts: coordinates of a device → the result that it computed.

    Raises:
      ShardMismatch: copies that should be equal are not.
    """
    layout = rule.results[result]
    held = {f for dim in layout for f in dim}
    for axis in reversed(range(len(strategy))):
        factor = strategy[axis].factor
        if factor in held:
            continue
        groups: dict[tuple[int, ...], list[np.ndarray]] = {}
        for c, part in parts.items():
            groups.setdefault((*c[:axis], 0, *c[axis + 1 :]), []).append(part)
        if result in rule.partial_results(factor):
            reducer = REDUCERS[rule.factors[factor].reducer or "sum"]
            parts = {c: functools.reduce(reducer, g) for c, g in groups.items()}
        else:
            for group in groups.values():
                for part in group[1:]:
                    compare(part, group[0], "shards differ on a complete result")
            parts = {c: g[0] for c, g in groups.items()}
    first = next(iter(parts.values()))
    # PRNG keys are passed as words, in trailing dims that no layout names.
    words = first.shape[len(shape) :]
    sizes = [tuple(rule.factors[f].size for f in d) or (s,) for d, s in
             zip(layout, shape, strict=True)]  # fmt: skip
    whole = np.zeros([n for group in sizes for n in group] + list(words), first.dtype)
    for coordinates, part in parts.items():
        shard = Shard(rule, strategy, coordinates)
        local = shard.local_shape(layout, shape)
        if part.shape != local + words:
            raise ShardMismatch(
                f"a shard of result {result} has shape {part.shape}, the rule says"
                f" {local}"
            )
        index = tuple(s for d in layout for s in (shard.index(d) or (slice(None),)))
        whole[index] = part.reshape(whole[index].shape)
    return whole.reshape(shape + words)


TOLERANCES = {"f2": 2e-2, "f4": 3e-5, "f8": 1e-10, "c8": 3e-5, "c16": 1e-10}
"""Kind and bytes of an element type → tolerance relative to the largest element, for
sums in another order."""


def compare(got: np.ndarray, expected: np.ndarray, why: str) -> None:
    """Raise `ShardMismatch` where two arrays differ by more than rounding."""
    if got.shape != expected.shape:
        raise ShardMismatch(f"{why}: shapes {got.shape} and {expected.shape}")
    if got.dtype != expected.dtype:
        raise ShardMismatch(f"{why}: types {got.dtype} and {expected.dtype}")
    if got.dtype.kind in "biu":
        if not np.array_equal(got, expected):
            wide = got.astype(np.float64) - expected.astype(np.float64)
            raise ShardMismatch(why, float(np.abs(wide).max()))
        return
    # Narrow floats (bfloat16, float8) are of kind "V" or "f" in NumPy.
    key = f"{got.dtype.kind}{got.dtype.itemsize}"
    is_narrow = got.dtype.itemsize <= 2
    tolerance = 2e-2 if is_narrow else TOLERANCES[key]
    wide_type = np.complex128 if got.dtype.kind == "c" else np.float64
    a, b = got.astype(wide_type), expected.astype(wide_type)
    finite = np.abs(b[np.isfinite(b)])
    scale = float(finite.max()) if finite.size else 0.0
    if not np.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
        with np.errstate(invalid="ignore"):
            raise ShardMismatch(why, float(np.nanmax(np.abs(a - b))))
