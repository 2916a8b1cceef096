"""Run convolutions on shards: their windows, halos and groups.

A convolution is `out[o] = Σ_t image[o · s - pad + t · d] · kernel[t]`, where the image
is dilated by `m`: its element `q` is at `q · m`. Where outputs are sharded, or taps (as
in the gradient of the kernel, whose taps are the output of the forward pass), all
shards start `m` times their elements apart, which is what a rule's HALO factor means;
so each device convolves its shard of the image, with halos from its neighbours.

Elements that negative padding leaves out are sliced off: where the padding of every dim
sums to zero, as (-1, 1) does, XLA:CPU convolves as without any (JAX 0.10.2, on one
device too).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from rhino_jax.ir.factor import FactorKind, Rule
from rhino_jax.runtime.on_shards.cuts import Cuts
from rhino_jax.runtime.on_shards.halo import with_halo


@dataclass(frozen=True, slots=True)
class _Border:
    """The halo that a shard of the image receives along one dim.

    Attributes:
      dim: dim of the image.
      axes: names of the mesh axes that shard it, major first.
      lower, upper: number of elements before and after the shard.
    """

    dim: int
    axes: tuple[str, ...]
    lower: int
    upper: int


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
        pieces = math.prod(mesh.axis_sizes[axis] for axis in cuts[f])
        stride = params["window_strides"][i]
        own, step = result[c], stride
        others, other_step = kernel[b], params["rhs_dilation"][i]
        if rule.operands[1][b] == (f,):
            own, step, others, other_step = others, other_step, own, step
        dilation = params["lhs_dilation"][i]
        lower, upper = rule.factors[f].halo
        names = tuple(mesh.axis_names[axis] for axis in cuts[f])
        borders.append(_Border(a, names, lower, upper))
        low = padding[i][0] - lower * dilation
        held = low + (lower + image[a] // pieces + upper - 1) * dilation + 1
        read = (own // pieces - 1) * step + (others - 1) * other_step + 1
        # Elements beyond the last window, too few for another one, may stay.
        padding[i] = low, 0 if 0 < held - read < stride else read - held

    left_out = [
        (dim, max(0, -low), max(0, -high))
        for dim, (low, high), dilation in zip(
            numbers.lhs_spec[2:], padding, params["lhs_dilation"], strict=True
        )
        if dilation == 1 and min(low, high) < 0
    ]
    sliced = {dim for dim, _, _ in left_out}
    padding = [
        (max(0, low), max(0, high)) if dim in sliced else (low, high)
        for dim, (low, high) in zip(numbers.lhs_spec[2:], padding, strict=True)
    ]

    def with_borders(x: Any, kernel: Any) -> list[Any]:
        for border in borders:
            x = with_halo(x, border.dim, border.lower, border.upper, border.axes)
        for dim, low, high in left_out:
            x = lax.slice_in_dim(x, low, x.shape[dim] - high, axis=dim)
        return [x, kernel]

    groups = _groups(rule, params, cuts, mesh)
    return with_borders, {**params, **groups, "padding": tuple(padding)}


def _groups(
    rule: Rule, params: Mapping[str, Any], cuts: Cuts, mesh: Any
) -> dict[str, int]:
    """Return the group counts of a shard."""
    numbers = params["dimension_numbers"]
    found = {}
    for name, dim in (
        ("feature_group_count", numbers.lhs_spec[1]),
        ("batch_group_count", numbers.lhs_spec[0]),
    ):
        if params[name] > 1:
            axes = cuts.get(rule.operands[0][dim][0], ())
            pieces = math.prod(mesh.axis_sizes[axis] for axis in axes)
            found[name] = params[name] // pieces
    return found
