"""The strategies of an op: every way to assign mesh axes to its factors.

A strategy assigns each mesh axis to at most one factor, several axes of one factor in a
stated order. From that follow the specs in which the op reads its operands and computes
its results. Where a sharded factor is reduced, the strategy also states, axis by axis,
whether the partial result is all-reduced or reduce-scattered onto one of its dims.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rhino_jax.analysis.padding import merged_factors
from rhino_jax.hardware.mesh import long_axes
from rhino_jax.ir.factor import Dim, Factor, FactorKind, Layout, Rule
from rhino_jax.ir.program import Op
from rhino_jax.ir.spec import Spec, num_shards, shards_per_dim
from rhino_jax.ir.traits import OpKind
from rhino_jax.model.constants import CONSTANTS


Places = tuple[int, ...]
"""For every mesh axis of several devices, the factor or dim that it shards; -1:
none."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run one op.

    Attributes:
      cut: for every factor, the mesh axes that shard it, major first.
      operands: the spec in which each operand is read.
      made: the spec of each result before partial results are combined.
      results: the spec of each result after that.
      partial: mesh axes over which the results are partial before that.
    """

    cut: tuple[tuple[int, ...], ...]
    operands: tuple[Spec, ...]
    made: tuple[Spec, ...]
    results: tuple[Spec, ...]
    partial: tuple[int, ...] = ()


def shards(found: Sequence[Strategy], sizes: tuple[int, ...]) -> np.ndarray:
    """Return [strategies, factors], the number of shards of each factor on a mesh with
    these axis sizes."""
    return np.array([shards_per_dim(s.cut, sizes) for s in found])


def local_factors(
    rule: Rule, found: Sequence[Strategy], sizes: tuple[int, ...]
) -> np.ndarray:
    """Return [strategies, factors], the size of each factor on the device that has most
    of it."""
    return -(-np.array([f.size for f in rule.factors]) // shards(found, sizes))


def _spec_of(
    layout: Layout,
    cut: tuple[tuple[int, ...], ...],
    factor_sizes: tuple[int, ...],
    sizes: tuple[int, ...],
) -> Spec | None:
    """Return the spec of an operand or result, or None where no spec can express it.

    A minor factor of a merged dim, when sharded, is a block-cyclic layout, unless all
    factors before it are sharded to single indices.

    Args:
      layout: the factors of each dim.
      cut: for every factor, the mesh axes that shard it.
      factor_sizes: sizes of the factors.
      sizes: sizes of the mesh axes.
    """
    spec: list[tuple[int, ...]] = []
    for dim in layout:
        one = len(dim) == 1
        axes = cut[dim[0]] if one else _axes_of_dim(dim, cut, factor_sizes, sizes)
        if axes is None:
            return None
        spec.append(axes)
    return tuple(spec)


def _axes_of_dim(
    dim: Dim,
    cut: tuple[tuple[int, ...], ...],
    factor_sizes: tuple[int, ...],
    sizes: tuple[int, ...],
) -> tuple[int, ...] | None:
    axes: list[int] = []
    is_complete = True
    for factor in dim:
        pieces = num_shards(cut[factor], sizes)
        if cut[factor]:
            if not is_complete or factor_sizes[factor] % pieces:
                return None
            axes.extend(cut[factor])
        is_complete = is_complete and pieces == factor_sizes[factor]
    return tuple(axes)


def _is_cut_well(size: int, pieces: int, is_padded: bool) -> bool:
    """Whether a factor of this size may be sharded into so many shards."""
    if size % pieces == 0:
        return True
    return (
        is_padded
        and pieces <= size
        and -(-size // pieces) * pieces <= (CONSTANTS.most_padded * size)
    )


def _assignments(
    factor_sizes: tuple[int, ...],
    cuttable: tuple[int, ...],
    sizes: tuple[int, ...],
    padded: frozenset[int] = frozenset(),
    centres: frozenset[Places] | None = None,
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield all assignments of mesh axes to factors that divide evenly, and uneven ones
    of the factors in `padded`.

    Factors of size zero are not sharded, and axes of one device are not assigned. With
    `centres`, only those are yielded that move at most one axis of one of these. Both
    orders of two axes on one factor are yielded on meshes of up to two axes; with more
    axes only the mesh's order is.
    """
    long = long_axes(sizes)
    cuttable = tuple(f for f in cuttable if factor_sizes[f])

    @functools.cache
    def fits(factor: int, axes: tuple[int, ...]) -> bool:
        pieces = num_shards(axes, sizes)
        return _is_cut_well(factor_sizes[factor], pieces, factor in padded)

    every: Iterable[Places]
    if centres is None:
        every = itertools.product((-1, *cuttable), repeat=len(long))
    else:
        every = _near(centres, (-1, *cuttable))
    for choice in every:
        cut: list[tuple[int, ...]] = [()] * len(factor_sizes)
        for axis, factor in zip(long, choice, strict=True):
            if factor >= 0:
                cut[factor] = (*cut[factor], axis)
        if not all([fits(f, cut[f]) for f in set(choice) if f >= 0]):
            continue
        yield tuple(cut)
        if len(long) == 2 and choice[0] == choice[1] >= 0:
            cut[choice[0]] = long[::-1]
            yield tuple(cut)


def _near(centres: frozenset[Places], ways: tuple[int, ...]) -> list[Places]:
    """Return the assignments that differ from one of `centres` in at most one axis, in
    the order in which all are enumerated."""
    moved = {
        (*centre[:axis], way, *centre[axis + 1 :])
        for centre in centres
        for axis in range(len(centre))
        for way in ways
    }
    return sorted(places for places in moved if set(places) <= {*ways})


def count_assignments(
    factor_sizes: tuple[int, ...], cuttable: tuple[int, ...], sizes: tuple[int, ...]
) -> int:
    """Return the number of even assignments on a mesh of three or more axes; see
    `_assignments`.

    They are not enumerated: factor by factor, the sets of used axes are counted.
    """
    long = long_axes(sizes)
    counts = Counter({frozenset[int](): 1})
    subsets = [
        frozenset(c)
        for n in range(1, len(long) + 1)
        for c in itertools.combinations(long, n)
    ]
    for factor in cuttable:
        size = factor_sizes[factor]
        mine = [s for s in subsets if size and not size % num_shards(s, sizes)]
        more = Counter(counts)
        for taken, count in counts.items():
            for axes in mine:
                if not taken & axes:
                    more[taken | axes] += count
        counts = more
    return sum(counts.values())


def _scatters(
    made: Spec,
    shape: tuple[int, ...],
    partial: tuple[int, ...],
    sizes: tuple[int, ...],
    kept: frozenset[int],
) -> Iterator[Spec]:
    """Yield the specs in which a partial result can be left: axes that a spec does not
    contain are all-reduced, the others reduce-scattered.

    On meshes of more than two axes, all partial axes are treated alike.

    Args:
      made: spec of the partial result.
      shape: shape of the result.
      partial: mesh axes over which it is partial.
      sizes: sizes of the mesh axes.
      kept: dims that must not be sharded further.
    """
    ways = (-1, *(d for d in range(len(made)) if d not in kept))
    together = len(long_axes(sizes)) > 2
    for places in itertools.product(ways, repeat=len(partial)):
        if together and len(set(places)) > 1:
            continue
        spec = list(made)
        for axis, dim in zip(partial, places, strict=True):
            if dim >= 0:
                spec[dim] = (*spec[dim], axis)
        if all(
            d % num_shards(axes, sizes) == 0
            for d, axes, before in zip(shape, spec, made, strict=True)
            if axes != before
        ):
            yield tuple(spec)


def _is_legal_halo(
    rule: Rule, cut: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]
) -> bool:
    """Whether all shards of windows have one size, and each shard is at least as wide
    as the border that it sends."""
    for factor, axes in zip(rule.factors, cut, strict=True):
        pieces = num_shards(axes, sizes)
        if factor.kind is FactorKind.HALO and axes and not _is_wide(factor, pieces):
            return False
    return True


def _is_wide(factor: Factor, pieces: int) -> bool:
    size = factor.size if factor.slides_over is None else factor.slides_over
    if factor.shift is not None:
        border = max(factor.border(pieces))
        return _is_cut_well(size, pieces, True) and border <= -(-size // pieces)
    is_even = size % pieces == 0 or factor.slides_over is None
    return is_even and size // pieces >= max(1, *factor.halo)


_FOUND: dict[tuple[object, ...], tuple[Strategy, ...]] = {}


@functools.cache
def strategies(
    rule: Rule,
    result_shapes: tuple[tuple[int, ...], ...],
    sizes: tuple[int, ...],
    padded: frozenset[int] = frozenset(),
    centres: frozenset[Places] | None = None,
) -> tuple[Strategy, ...]:
    """Return all strategies of an op with this rule on a mesh with these axis sizes.

    The first is replicated. Specs that no NamedSharding can express are left out. Ops
    and meshes with equal strategies share one object.

    Args: as in `enumerate_strategies`.
    """
    key = centres, *_as_seen(rule, result_shapes, sizes, padded)
    found = _FOUND.get(key)
    if found is None:
        every = enumerate_strategies(rule, result_shapes, sizes, padded, centres)
        found = _FOUND[key] = tuple(every)
    return found


def _as_seen(
    rule: Rule,
    result_shapes: tuple[tuple[int, ...], ...],
    sizes: tuple[int, ...],
    padded: frozenset[int],
) -> tuple[object, ...]:
    """Return a key of everything that strategies depend on: of sizes, only how they
    divide."""
    counts = range(len(sizes) + 1)
    axes = [c for n in counts for c in itertools.combinations(sizes, n)]
    pieces = tuple(math.prod(c) for c in axes)
    merged = merged_factors(rule)
    factors = tuple(
        (
            f.is_cuttable,
            f.kind,
            f.reducer,
            _is_cut_by(f.size, pieces),
            f.size == 0,
            tuple(f.size == p for p in pieces) if i in merged else None,
            tuple(_is_cut_well(f.size, p, True) for p in pieces)
            if i in padded
            else None,
            tuple(_is_wide(f, p) for p in pieces)
            if f.kind is FactorKind.HALO
            else None,
        )
        for i, f in enumerate(rule.factors)
    )
    dims = tuple(
        _is_cut_by(size, pieces) for shape in result_shapes[:1] for size in shape
    )
    return len(sizes), long_axes(sizes), rule.operands, rule.results, factors, dims


@functools.cache
def _is_cut_by(size: int, pieces: tuple[int, ...]) -> tuple[bool, ...]:
    return tuple(size % p == 0 for p in pieces)


def enumerate_strategies(
    rule: Rule,
    result_shapes: tuple[tuple[int, ...], ...],
    sizes: tuple[int, ...],
    padded: frozenset[int] = frozenset(),
    centres: frozenset[Places] | None = None,
) -> Iterator[Strategy]:
    """Yield the strategies that `strategies` returns.

    Args:
      rule: the op's factors.
      result_shapes: shapes of its results.
      sizes: mesh axis sizes.
      padded: positions of factors that may be sharded unevenly, see `padding`.
      centres: assignments of mesh axes to factors: only strategies are yielded that
        move at most one axis of one of them; None: all.
    """
    factor_sizes = tuple(f.size for f in rule.factors)
    cuttable = tuple(i for i, f in enumerate(rule.factors) if f.is_cuttable)
    batch_dims = _batch_dims(rule)
    has_index = any(f.kind is FactorKind.INDEX for f in rule.factors)
    has_halo = any(f.kind is FactorKind.HALO for f in rule.factors)
    summed = [i for i in cuttable if rule.partial_results(i)]
    for cut in _assignments(factor_sizes, cuttable, sizes, padded, centres):
        if has_halo and not _is_legal_halo(rule, cut, sizes):
            continue
        operands = [_spec_of(x, cut, factor_sizes, sizes) for x in rule.operands]
        made = [_spec_of(x, cut, factor_sizes, sizes) for x in rule.results]
        if None in operands or None in made:
            continue
        ins = tuple(s for s in operands if s is not None)
        outs = tuple(s for s in made if s is not None)
        partial = tuple(sorted([a for i in summed for a in cut[i]]))
        is_sum = all([rule.factors[i].reducer == "sum" for i in summed if cut[i]])
        if not partial or len(outs) != 1 or not is_sum:
            yield Strategy(cut, ins, outs, outs, partial)
            continue
        # No scatter onto a batch dim that is sharded already: XLA gathers the operands
        # for that; nor onto one of a gather: XLA replicates the mask of the indices in
        # the shard (libtpu 0.0.52).
        kept = frozenset(d for d in batch_dims if outs[0][d] or has_index)
        for spec in _scatters(outs[0], result_shapes[0], partial, sizes, kept):
            yield Strategy(cut, ins, outs, (spec,), partial)


def _batch_dims(rule: Rule) -> frozenset[int]:
    """Return the dims of the first result whose factors all operands have, where there
    are several."""
    if len(rule.operands) < 2 or not rule.results:
        return frozenset()
    shared = set.intersection(
        *({f for dim in operand for f in dim} for operand in rule.operands)
    )
    return frozenset(i for i, dim in enumerate(rule.results[0]) if shared & set(dim))


def moves(op: Op, found: Sequence[Strategy], sizes: tuple[int, ...]) -> np.ndarray:
    """Return [strategies], 0.0 where each device holds a single index of what an op
    reduces, so that only collectives have work; 1.0 elsewhere."""
    rule = op.rule
    summed = [f for f, x in enumerate(rule.factors) if x.reducer] if rule else []
    if rule is None or not summed or op.traits.kind is not OpKind.REDUCTION:
        return np.ones(len(found))
    whole = np.array([rule.factors[f].size for f in summed])
    return (shards(found, sizes)[:, summed] < whole).any(axis=1).astype(float)


@functools.cache
def all_specs(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    padded: frozenset[int] = frozenset(),
    centres: frozenset[Places] | None = None,
) -> tuple[Spec, ...]:
    """Return all specs of a value of this shape that are even, except for the dims in
    `padded`; the first is replicated.

    Args: as in `enumerate_strategies`; `centres` are dims.
    """
    cuttable = tuple(i for i, d in enumerate(shape) if d > 1)
    return tuple(_assignments(shape, cuttable, sizes, padded, centres))
