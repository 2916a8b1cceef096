"""Run convolutions on shards: their windows, halos and groups.

A convolution is `out[o] = Σ_t image[o · s - pad + t · d] · kernel[t]`, where the image
is dilated by `m`: its element `q` is at `q · m`. Where outputs are sharded, or taps (as
in the gradient of the kernel, whose taps are the output of the forward pass), all
shards start `m` times their elements apart, which is what a rule's HALO factor means;
so each device convolves its shard of the image, with halos from its neighbours.

Elements that negative padding leaves out are sliced off: where the padding of every dim
sums to zero, as (-1, 1) does, XLA:CPU convolves as without any (JAX 0.10.2, on one
device too).

A halo has the elements beyond its own shard that a stencil, window, pad or roll reads.
Inside `shard_map`. A dim of `n · width` elements has `n` shards along one or several
mesh axes. A shard receives as many elements of the shards before and after it as it
reads, with one `ppermute` per neighbour, and no more than that is sent.

`find_cuts` returns the mesh axes that shard the factors of an op, from its operands'
specs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rhino_jax.ir.factor import Dim, FactorKind, Layout, Rule
from rhino_jax.ir.spec import Spec, num_shards


def with_halo(
    x: jax.Array,
    dim: int,
    lower: int,
    upper: int,
    axes: Sequence[str],
) -> jax.Array:
    """Return a shard with its halo: elements of its neighbours before and after; zeros
    beyond the ends of the whole dim.

    Args:
      x: this device's shard, of `width` elements along `dim`.
      dim: the sharded dim.
      lower, upper: halo sizes before the first and after the last element; more than
        `width` come from several neighbours.
      axes: names of the mesh axes that shard the dim, major first.
    Returns:
      `x`, with `lower + width + upper` elements along `dim`.
    """
    shards = Shards(axes)
    below = _received(x, dim, lower, 1, shards)
    above = _received(x, dim, upper, -1, shards)
    parts = [*reversed(below), x, *above]
    return lax.concatenate(parts, dim) if len(parts) > 1 else x


class Shards:
    """The devices along which a dim is sharded, by the position of their shards.

    Args:
      axes: names of the mesh axes, major first.
    """

    def __init__(self, axes: Sequence[str]) -> None:
        self.axes = tuple(axes)
        self.sizes = [lax.axis_size(name) for name in self.axes]
        self.count = math.prod(self.sizes)
        # JAX 0.10.2's `ppermute` numbers devices in the order of the mesh, whatever the
        # order of its axis names.
        names = jax.sharding.get_abstract_mesh().axis_names
        self._in_mesh = sorted(
            range(len(self.axes)), key=lambda i: names.index(axes[i])
        )

    def position(self) -> jax.Array:
        """Return the position of this device's shard."""
        found: Any = 0
        for name, size in zip(self.axes, self.sizes, strict=True):
            found = found * size + lax.axis_index(name)
        return found

    def shifted(self, x: jax.Array, by: int) -> jax.Array:
        """Return the array of the device whose shard is `by` positions before this one.

        Zeros where there is none.
        """
        pairs = [
            (self._device(i), self._device(i + by))
            for i in range(self.count)
            if 0 <= i + by < self.count
        ]
        names = tuple(self.axes[i] for i in self._in_mesh)
        return lax.ppermute(x, names, pairs) if pairs else jnp.zeros_like(x)

    def _device(self, position: int) -> int:
        """Return the position of a shard's device in the order of the mesh."""
        at, order = np.unravel_index(position, self.sizes), self._in_mesh
        sizes = [self.sizes[i] for i in order]
        return int(np.ravel_multi_index([at[i] for i in order], sizes))


def _received(
    x: jax.Array, dim: int, count: int, direction: int, shards: Shards
) -> list[jax.Array]:
    """Return the halo parts of the neighbours on one side, nearest first.

    Args:
      x, dim: as for `with_halo`.
      count: number of halo elements.
      direction: 1 from shards before this one, -1 from those after it.
      shards: the devices of the sharded dim.
    """
    parts, width, distance = [], x.shape[dim], 0
    while count > 0:
        distance += 1
        taken = min(count, width)
        count -= taken
        start = width - taken if direction > 0 else 0
        border = lax.slice_in_dim(x, start, start + taken, axis=dim)
        parts.append(shards.shifted(border, direction * distance))
    return parts


Cuts = dict[int, tuple[int, ...]]
"""Factor → the mesh axes that shard it, major first; without unsharded factors."""


def find_cuts(
    rule: Rule,
    specs: Sequence[Spec | None],
    sizes: Sequence[int],
    kinds: Collection[FactorKind],
) -> Cuts:
    """Return the mesh axes that shard each factor.

    Args:
      rule: rule of the op.
      specs: specs of its operands; None is replicated.
      sizes: sizes of the mesh axes.
      kinds: kinds of factors that may be sharded.
    Returns:
      Cuts with equal shards; empty where operands disagree, where an axis shards two
      factors, or where shards would differ in size.
    """
    cuts: Cuts = {}
    for layout, spec in zip(rule.operands, specs, strict=True):
        if spec is None:
            continue
        for dim, axes in zip(layout, spec, strict=True):
            if any(rule.factors[f].kind not in kinds for f in dim):
                continue
            for factor, own in zip(dim, _of_dim(rule, dim, axes, sizes), strict=True):
                if cuts.setdefault(factor, own) != own:
                    return {}
    found = {f: axes for f, axes in cuts.items() if axes}
    used = [axis for axes in found.values() for axis in axes]
    is_even = all(
        size % num_shards(axes, sizes) == 0
        for f, axes in found.items()
        for size in (rule.factors[f].size, rule.factors[f].slides_over or 0)
    )
    return found if is_even and len(used) == len(set(used)) else {}


def _of_dim(
    rule: Rule, dim: Dim, axes: tuple[int, ...], sizes: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return the axes of each factor of a dim, major first.

    A minor factor is sharded only where those before it have shards of one index.
    """
    found: list[tuple[int, ...]] = []
    for factor in dim[:-1]:
        count, size = 0, rule.factors[factor].size
        while count < len(axes) and size % sizes[axes[count]] == 0:
            size //= sizes[axes[count]]
            count += 1
        found.append(axes[:count])
        axes = axes[count:]
    return [*found, axes] if dim else []


def spec_under(layout: Layout, cuts: Cuts) -> Spec:
    """Return the spec of an operand, or of a result before partial sums are reduced."""
    return tuple(tuple(a for f in dim for a in cuts.get(f, ())) for dim in layout)


_GROUP_COUNTS = "batch_group_count", "feature_group_count"
"""Parameters that count groups: of the image's batch, then of its channels."""


def on_shard(
    rule: Rule,
    params: Mapping[str, Any],
    shapes: Sequence[Sequence[int]],
    cuts: Cuts,
    mesh: Any,
) -> tuple[Callable[..., list[Any]], dict[str, Any]]:
    """Return a function that adds halos, and a convolution's parameters on a shard.

    Args:
      rule: rule of the convolution.
      params: parameters of its equation.
      shapes: global shapes of both operands and the result.
      cuts: mesh axes that shard its factors.
      mesh: the mesh.
    Returns:
      A function that adds halos to the operands' shards, and the parameters with which
        the primitive is then run.
    """
    numbers, (image, kernel, result) = params["dimension_numbers"], shapes
    padding, borders = [tuple(p) for p in params["padding"]], []
    places = zip(
        numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True
    )
    for i, (a, b, c) in enumerate(places):
        (f,) = rule.operands[0][a]
        if rule.factors[f].kind is not FactorKind.HALO or not cuts.get(f):
            continue
        pieces = num_shards(cuts[f], mesh.axis_sizes)
        stride = params["window_strides"][i]
        own, step = result[c], stride
        others, other_step = kernel[b], params["rhs_dilation"][i]
        if rule.operands[1][b] == (f,):
            own, step, others, other_step = others, other_step, own, step
        dilation = params["lhs_dilation"][i]
        lower, upper = rule.factors[f].halo
        names = tuple(mesh.axis_names[axis] for axis in cuts[f])
        borders.append((a, lower, upper, names))  # arguments of `with_halo`
        low = padding[i][0] - lower * dilation
        held = low + (lower + image[a] // pieces + upper - 1) * dilation + 1
        read = (own // pieces - 1) * step + (others - 1) * other_step + 1
        # Elements beyond the last window, too few for another one, may stay.
        padding[i] = low, 0 if 0 < held - read < stride else read - held

    left_out = []
    for i, (low, high) in enumerate(padding):
        if params["lhs_dilation"][i] == 1 and min(low, high) < 0:
            left_out.append((numbers.lhs_spec[2 + i], max(0, -low), max(0, -high)))
            padding[i] = max(0, low), max(0, high)

    def with_borders(x: Any, kernel: Any) -> list[Any]:
        for border in borders:
            x = with_halo(x, *border)
        for dim, low, high in left_out:
            x = lax.slice_in_dim(x, low, x.shape[dim] - high, axis=dim)
        return [x, kernel]

    groups = {}  # of a shard
    for name, dim in zip(_GROUP_COUNTS, numbers.lhs_spec, strict=False):
        if params[name] > 1:
            axes = cuts.get(rule.operands[0][dim][0], ())
            groups[name] = params[name] // num_shards(axes, mesh.axis_sizes)
    return with_borders, {**params, **groups, "padding": tuple(padding)}
