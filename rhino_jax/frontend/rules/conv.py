"""Convolutions: batch, features, groups and windows.

A spatial dim of the input is sharded by the factor of the output position or, where the
kernel is as large as the input (the gradient of the weights), by the factor of the
kernel position; a shard then needs borders from its neighbours.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rhino_jax.frontend.registry import OpContext, OpRule, numbers, register
from rhino_jax.frontend.rules.dot import is_rounded
from rhino_jax.ir.factor import Rule, parse_rule
from rhino_jax.ir.traits import EITHER, OpKind, Traits


@dataclass(frozen=True, slots=True)
class _Window:
    """One spatial dim: its sizes, and the steps of outputs (`stride`) and kernel taps
    (`dilation`)."""

    input: int
    kernel: int
    output: int
    stride: int
    dilation: int
    input_dilation: int
    pad_low: int
    pad_high: int

    def halo_of_output(self) -> tuple[int, int] | None:
        """Return the elements that a shard needs from its neighbours when the output is
        sharded.

        Output `o` reads position `o * s - pad + t * d` for every tap `t`; element `q`
        of the input is at position `q * m`. With `m * input == s * output`, shards of
        the input and of the output are aligned; None elsewhere.
        """
        if self.input_dilation * self.input != self.stride * self.output:
            return None
        return self._halo(self.kernel, self.dilation, self.stride)

    def halo_of_kernel(self) -> tuple[int, int] | None:
        """Return the elements that a shard needs from its neighbours when the taps are
        sharded.

        Shards are aligned with `m * input == d * kernel`; results are then partial.
        None elsewhere.
        """
        if self.input_dilation * self.input != self.dilation * self.kernel:
            return None
        return self._halo(self.output, self.stride, self.dilation)

    @functools.cache  # noqa: B019
    def taps(self) -> int:
        """Return the number of pairs of output and kernel positions that read an
        element of the input: neither padding nor the zeros of a dilated input."""
        starts = np.arange(self.output, dtype=np.int64) * self.stride - self.pad_low
        taps = np.arange(self.kernel, dtype=np.int64) * self.dilation
        at, met = np.add.outer(taps, starts), self.input_dilation
        last = (self.input - 1) * met
        return int(np.count_nonzero((at >= 0) & (at <= last) & (at % met == 0)))

    @property
    def is_canonical(self) -> bool:
        """Whether cuDNN convolves it as it is: both ends padded alike, the input not
        dilated. XLA:GPU writes all other inputs and kernels with their zeros."""
        return self.input_dilation == 1 and self.pad_low == self.pad_high >= 0

    def dense_taps(self) -> int:
        """Return the number of pairs of output and kernel positions with the zeros of
        the padding and of a dilated kernel."""
        return self.output * ((self.kernel - 1) * self.dilation + 1)

    def exchanged(self) -> _Window:
        """Return the window where kernel and input exchange their roles."""
        more = (self.input - 1) * self.input_dilation - (
            self.kernel - 1
        ) * self.dilation
        return replace(
            self,
            input=self.kernel,
            kernel=self.input,
            dilation=self.input_dilation,
            input_dilation=self.dilation,
            pad_low=more + self.pad_low,
            pad_high=more + self.pad_high,
        )

    def _halo(self, others: int, other_step: int, step: int) -> tuple[int, int]:
        reach, places = (others - 1) * other_step + 1, self.input_dilation
        lower = max(self.pad_low, 0) // places
        return lower, max((reach - 1 - step - self.pad_low) // places + 1, 0)


def _traits_of_call(
    rule: Rule, windows: list[_Window], feature_groups: int, batch_groups: int
) -> dict[str, Any]:
    """Return the traits by which XLA:GPU calls cuDNN: with the larger window as the
    input, in two dims and without groups; for the gradient by the kernel, where the
    kernel is larger than the result (a dilated one then has strides); else forward,
    with zeros between the elements of the kernel where the window is not canonical. A
    patch embedding's gradient has the patches' number as window, dilated by their size:
    forward, without zeros, if patches are larger than their number.

    Sources: openxla/xla, `SwapConvOperands` of hlo/transforms/simplifiers/
    algebraic_simplifier.cc; service/gpu/transforms/conv_rewriter.cc,
    `MatchBackwardFilter`, and conv_padding_legalization.cc. Seen in HLO of jax 0.10.2.
    """
    inputs, kernels = (
        math.prod(getattr(w, side) for w in windows) for side in ("input", "kernel")
    )
    is_grouped = feature_groups * batch_groups > 1
    is_exchanged = len(windows) == 2 and not is_grouped and 1 < inputs < kernels
    if is_exchanged:
        windows = [w.exchanged() for w in windows]
    is_gradient = all(
        w.stride == w.input_dilation == 1 and w.pad_low >= 0 for w in windows
    ) and (batch_groups > 1 or all(w.kernel > w.output for w in windows))
    zeros, taps = 1.0, max(math.prod(w.taps() for w in windows), 1)
    if not is_gradient and not all(w.is_canonical for w in windows):
        zeros = math.prod(w.dense_taps() for w in windows) / taps
    # Of the gradient by the kernel JAX takes the features for the batch (`lax.conv`'s
    # transposition), and cuDNN sums over what JAX takes for features.
    batch, outputs = ("o", "n") if is_exchanged else ("n", "o")
    positions = {f.name: i for i, f in enumerate(rule.factors)}
    channels = batch if is_gradient else "i", outputs, "g"
    all_taps = math.prod(w.output * w.kernel for w in windows) / taps
    return {
        "input_dilation": math.prod(w.input_dilation for w in windows),
        "zero_taps": zeros,
        "exchanged_taps": all_taps if is_exchanged else 0.0,
        "channels": tuple(map(positions.get, channels)),
        "is_kernel_gradient": is_gradient,
    }


def _label(params: Mapping[str, Any]) -> str:
    parts = [f"stride {numbers(params['window_strides'], 'x')}"]
    for key, word in (("lhs_dilation", "in dilation"), ("rhs_dilation", "dilation")):
        if any(d != 1 for d in params[key]):
            parts.append(f"{word} {numbers(params[key], 'x')}")
    for key, word in (("feature_group_count", "groups"), ("batch_group_count",) * 2):
        if params[key] != 1:
            parts.append(f"{word} {params[key]}")
    return ", ".join(parts)


@register(
    "conv_general_dilated",
    traits=Traits(OpKind.CONVOLUTION, hosts_fusion=True, linear=EITHER),
    label=_label,
)
def conv_general_dilated(ctx: OpContext) -> OpRule:
    """Return the rule of a convolution, with two FLOPs per multiply-add.

    Products with padding or with the zeros of a dilated input do not count, as in XLA's
    `HloCostAnalysis`.

    Factors: `n` batch, `i` input features (summed), `o` output features, `g` feature or
    batch groups, `y0 y1 …` output and `t0 t1 …` kernel positions.
    """
    dims = ctx.params["dimension_numbers"]
    lhs_spec, rhs_spec, out_spec = dims.lhs_spec, dims.rhs_spec, dims.out_spec
    (lhs_shape, rhs_shape), (out_shape,) = ctx.in_shapes, ctx.out_shapes
    feature_groups = ctx.params["feature_group_count"]
    batch_groups = ctx.params["batch_group_count"]
    is_grouped = feature_groups > 1 or batch_groups > 1
    lhs, rhs, out = ([""] * len(out_shape) for _ in range(3))
    lhs[lhs_spec[0]] = "(g n)" if batch_groups > 1 else "n"
    lhs[lhs_spec[1]] = "(g i)" if feature_groups > 1 else "i"
    rhs[rhs_spec[0]] = "(g o)" if is_grouped else "o"
    rhs[rhs_spec[1]] = "i"
    out[out_spec[0]] = "n"
    out[out_spec[1]] = "(g o)" if is_grouped else "o"
    halos: dict[str, tuple[int, int]] = {}
    reducers: dict[str, str] = {}
    windows = []
    places = zip(lhs_spec[2:], rhs_spec[2:], out_spec[2:], strict=True)
    for i, (a, b, c) in enumerate(places):
        window = _Window(
            lhs_shape[a], rhs_shape[b], out_shape[c],
            ctx.params["window_strides"][i], ctx.params["rhs_dilation"][i],
            ctx.params["lhs_dilation"][i], *ctx.params["padding"][i],
        )  # fmt: skip
        windows.append(window)
        lhs[a], rhs[b], out[c] = f"x{i}!", f"t{i}!", f"y{i}!"
        if (halo := window.halo_of_output()) is not None:
            lhs[a] = out[c] = f"y{i}~"
            halos[f"y{i}"] = halo
        elif (halo := window.halo_of_kernel()) is not None:
            lhs[a] = rhs[b] = f"t{i}~"
            halos[f"t{i}"], reducers[f"t{i}"] = halo, "sum"
    # The dims of a dilated input do not determine those of kernel positions.
    kernel_sizes = {f"t{i}": rhs_shape[d] for i, d in enumerate(rhs_spec[2:])}
    rule = parse_rule(
        f"{' '.join(lhs)}, {' '.join(rhs)} -> {' '.join(out)}",
        ctx.in_shapes,
        ctx.out_shapes,
        sizes={"g": max(feature_groups, batch_groups), **kernel_sizes},
        halos=halos,
        reducers=reducers,
    )
    taps = math.prod(w.taps() for w in windows)
    products = taps * out_shape[out_spec[0]] * out_shape[out_spec[1]]
    traits = Traits(
        OpKind.CONVOLUTION,
        linear=EITHER,
        is_gathered=is_grouped,
        is_rounded=is_rounded(ctx),
        pads_unevenly=any(max(a, 0) != max(b, 0) for a, b in ctx.params["padding"]),
        **_traits_of_call(rule, windows, feature_groups, batch_groups),
    )
    return OpRule(rule, 2.0 * products * rhs_shape[rhs_spec[1]], traits=traits)
