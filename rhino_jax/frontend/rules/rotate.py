"""Rotations: a dim whose last elements come first, as in `jnp.roll`.

This is a primitive of our own, for two slices of one array that are concatenated in
reverse order (`tracing.open_moves`): a rotation exchanges one border of each shard,
where separate slices also need all-reduces of the elements that wrap around.
"""

from __future__ import annotations

import jax
from jax import lax
from jax.interpreters import ad, batching, mlir

from rhino_jax._compat import new_primitive
from rhino_jax.frontend.registry import OpContext, OpRule, register
from rhino_jax.frontend.rules.factors import dimwise
from rhino_jax.ir.traits import OpKind, Traits


ROTATE = "rhino_rotate"


def rotate(x: jax.Array, shift: int, axis: int) -> jax.Array:
    """Return `jnp.roll(x, shift, axis)`.

    Args:
      x: the array.
      shift: number of positions, from 1 to the size of the dim less 1.
      axis: the dim.
    """
    return _rotate_p.bind(x, shift=shift, axis=axis)


def halves(x: jax.Array, shift: int, axis: int) -> list[jax.Array]:
    """Return the two slices of `x` that a rotation concatenates."""
    size = x.shape[axis]
    return [
        lax.slice_in_dim(x, size - shift, size, axis=axis),
        lax.slice_in_dim(x, 0, size - shift, axis=axis),
    ]


def _as_slices(x: jax.Array, *, shift: int, axis: int) -> jax.Array:
    return lax.concatenate(halves(x, shift, axis), axis)


_rotate_p = new_primitive(ROTATE)
_rotate_p.def_impl(_as_slices)
_rotate_p.def_abstract_eval(lambda x, *, shift, axis: x)
mlir.register_lowering(_rotate_p, mlir.lower_fun(_as_slices, multiple_results=False))
ad.deflinear2(
    _rotate_p,
    lambda ct, x, *, shift, axis: [
        ct if isinstance(ct, ad.Zero) else rotate(ct, x.aval.shape[axis] - shift, axis)
    ],
)
batching.primitive_batchers[_rotate_p] = lambda args, at, *, shift, axis: (
    rotate(args[0], shift, axis + (at[0] <= axis)),
    at[0],
)


@register(
    ROTATE,
    traits=Traits(
        OpKind.MOVEMENT,
        fuses_operands=True,
        is_rotation=True,
        masks_padding=True,
        moves=((0,),),
        dims_param="axis",
    ),
)
def rotation(ctx: OpContext) -> OpRule:
    """Return the rule: the rotated dim is a shift in the shorter direction; elements
    that wrap around are sent with the border."""
    (shape,), shift, axis = ctx.in_shapes, ctx.params["shift"], ctx.params["axis"]
    start = -shift if 2 * shift <= shape[axis] else shape[axis] - shift
    rule = dimwise(
        ctx,
        lambda factors, d, size, length: factors.moved(
            length, size, start if d == axis else 0
        ),
    )
    return OpRule(rule)
