"""Attention in one kernel, as cuDNN's: its scores never reach memory.

Source: Dao, "FlashAttention-2" (2023), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rhino_jax.frontend.registry import OpContext, OpRule, register
from rhino_jax.frontend.rules.opaque import unsharded
from rhino_jax.ir.factor import parse_rule
from rhino_jax.ir.traits import OpKind, Traits


_BIAS, _LENGTHS, _PAGES = 3, 4, 8
"""Positions of the operands after queries, keys and values: a bias, which may be empty;
lengths and offsets of rows; tables of pages."""


@register(
    "dot_product_attention_fwd_wrapper",
    "dot_product_attention_bwd_wrapper",
    traits=Traits(OpKind.ATTENTION, is_gathered=True),
)
def fused_attention(ctx: OpContext) -> OpRule:
    """Return the rule: batch `b` and key heads `k` are parallel; all else is whole.

    Scores that the mask leaves out are not computed. The backward kernel computes the
    others again: five products for the two of the forward one.
    """
    q, k, v, bias, *others = ctx.in_shapes[: _PAGES + 2]
    if any(math.prod(pages) for pages in others[_PAGES - _LENGTHS :]):
        return unsharded(ctx)
    is_heads_first = ctx.params["layout"] == 1
    at, rows = (1, 2) if is_heads_first else (2, 1)
    heads = "k" if q[at] == k[at] else "(k g!)"

    def text(heads: str, rows: str, width: str) -> str:
        middle = f"{heads} {rows}" if is_heads_first else f"{rows} {heads}"
        return f"b {middle} {width}"

    def of_rows(shape: tuple[int, ...], name: str) -> str:
        rest = [f"{name}{i}!" for i in range(len(shape))]
        return " ".join(["b", *rest[1:]] if shape[0] == q[0] else rest)

    given = [text(heads, "t!", "h!"), text("k", "s!", "h!"), text("k", "s!", "v!")]
    if len(bias) == 4:
        first = "b" if bias[0] == q[0] else "i!"
        given.append(f"{first} {heads if bias[1] == q[at] else 'j!'} t! s!")
        if ctx.params["variadic_args"][1] and bias[:2] != (q[0], q[at]):
            # The gradient of such a bias, alone of the results, is a sum over shards.
            given = [part.replace("b ", "b! ").replace("k", "k!") for part in given]
    else:
        given.append(of_rows(bias, "p"))
    given += [of_rows(shape, f"n{i}") for i, shape in enumerate(others)]
    out = text(heads, "t!", "v!")
    is_forward = len(ctx.in_shapes) == _PAGES + 2
    sums = ctx.out_shapes[1:] if is_forward else ctx.in_shapes[_PAGES + 2 : _PAGES + 3]
    of_sums = [f"{'b' if s[0] == q[0] else '(b m!)'} {heads} t!" for s in sums]
    if is_forward:
        made = [out, *of_sums]
    else:
        made, given = given[: len(ctx.out_shapes)], [*given, *of_sums, out, out]
    rule = parse_rule(
        f"{', '.join(given)} -> {', '.join(made)}", ctx.in_shapes, ctx.out_shapes
    )
    flops = attention_flops(
        (q[0], q[at], q[rows], k[rows]),
        (q[3], v[3]),
        mask=ctx.params["mask_type"].name,
        window=ctx.params["sliding_window_length"] or 0,
        is_forward=is_forward,
    )
    return OpRule(rule, flops)


def attention_flops(
    scores: Sequence[int],
    widths: tuple[int, int],
    *,
    mask: str,
    window: int,
    is_forward: bool,
) -> float:
    """Return the FLOPs of a fused attention kernel.

    Args:
      scores: shape of its scores: batch, heads, queries, keys.
      widths: features of a key, and of a value.
      mask: name of its mask; one that is causal leaves out half of a square.
      window: number of keys that a query sees; 0: all.
      is_forward: whether it is the forward kernel.
    """
    *heads, queries, keys = scores
    seen = keys - min(queries, keys) / 2 if "CAUSAL" in mask else keys
    of_key, of_value = widths
    products = of_key + of_value if is_forward else 3 * of_key + 2 * of_value
    return 2.0 * math.prod(heads) * queries * min(seen, window or seen) * products
