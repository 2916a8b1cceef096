"""`rhino.pin`: a layout that the user fixes inside a function.

It is a primitive of its own, so that it survives `jit`, `scan`, `remat`, `grad` and
`vmap`, and appears in the program with its source line. Where rhino does not plan, it
does nothing.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from rhino_jax._compat import hide_frames, new_primitive
from rhino_jax.errors import PinError
from rhino_jax.frontend.registry import register
from rhino_jax.frontend.rules.elementwise import passing
from rhino_jax.ir.program import PIN, AxisNames, NamedMesh
from rhino_jax.ir.spec import entry_axes
from rhino_jax.ir.traits import FROM_ALL, OpKind, Traits
from rhino_jax.utils.keywords import brief


def pin(x: Any, spec: Any) -> Any:
    """Return `x`, with its layout fixed in every plan.

    The identity: it differentiates, batches and compiles anywhere, and does nothing
    where rhino does not plan. The cotangent of `x` has the same layout. Under `vmap`,
    the new dim is left to the planner. The pin is checked against the mesh, and applied
    or refused, when the function is planned.

    Args:
      x: an array, or a pytree of arrays.
      spec: a PartitionSpec, of dims in order; dims that it does not name are not
        sharded, and `PartitionSpec.UNCONSTRAINED` leaves a dim to the planner. A
        NamedSharding is its spec, on that mesh only. Or a pytree of these, shaped as
        `x` or a prefix of it, in which None pins nothing.

    Raises:
      PinError: this is no spec, or it has more dims than the array; when planning: it
        names an unknown axis, or does not divide.

    Example:
      >>> h = rhino.pin(jnp.tanh(x @ w), jax.sharding.PartitionSpec("data", None))
    """
    if _is_one(spec):
        return jax.tree.map(lambda leaf: _pin(leaf, spec), x)
    try:
        return jax.tree.map(
            lambda one, below: jax.tree.map(lambda leaf: _pin(leaf, one), below),
            spec,
            x,
            is_leaf=_is_one,
        )
    except PinError:
        raise
    except (ValueError, TypeError) as error:
        raise PinError(
            "`rhino.pin`: the specs do not have the shape of what is pinned.",
            where="spec",
            numbers=brief(str(error).splitlines()[0]),
            fix="give one PartitionSpec, or a pytree of them shaped as x.",
        ) from None


def _is_one(spec: Any) -> bool:
    return spec is None or isinstance(spec, PartitionSpec | NamedSharding)


def _pin(x: Any, spec: Any) -> Any:
    if spec is None:
        return x
    mesh: NamedMesh | None = None
    if isinstance(spec, NamedSharding):
        mesh = tuple((str(n), int(s)) for n, s in spec.mesh.shape.items())
        spec = spec.spec
    if not isinstance(spec, PartitionSpec):
        raise PinError(
            "`rhino.pin`: this is not a PartitionSpec.",
            where="spec",
            numbers=f"got {brief(spec)} ({type(spec).__name__})",
            fix="write rhino.pin(x, jax.sharding.PartitionSpec('axis', None)).",
        )
    x = jnp.asarray(x)
    if len(spec) > x.ndim:
        raise PinError(
            "`rhino.pin`: the spec has more dims than the array.",
            where=str(spec),
            numbers=f"{len(spec)} dims, the shape is {x.shape}",
            fix=f"give at most {x.ndim} dims.",
        )
    dims = [_axes(entry, spec) for entry in spec]
    dims += [()] * (x.ndim - len(dims))
    return _pin_p.bind(x, layout=tuple(dims), mesh_axes=mesh)


def _axes(entry: Any, spec: PartitionSpec) -> AxisNames | None:
    """Return the mesh axes of one dim; None where it is left open."""
    if entry is PartitionSpec.UNCONSTRAINED:
        return None
    names = entry_axes(entry)
    if not all(isinstance(name, str) for name in names):
        raise PinError(
            "`rhino.pin`: mesh axes are named by strings.",
            where=str(spec),
            numbers=f"got {brief(entry)}",
            fix="write PartitionSpec('data', None).",
        )
    return names


hide_frames(__file__)
_pin_p = new_primitive(PIN)
_pin_p.def_impl(lambda x, **params: x)
_pin_p.def_abstract_eval(lambda x, **params: x)
mlir.register_lowering(_pin_p, lambda ctx, x, **params: [x])
ad.deflinear2(
    _pin_p,
    lambda ct, x, **params: [
        ct if isinstance(ct, ad.Zero) else _pin_p.bind(ct, **params)
    ],
)
batching.primitive_batchers[_pin_p] = lambda args, at, *, layout, mesh_axes: (
    _pin_p.bind(
        *args,
        layout=(*layout[: at[0]], None, *layout[at[0] :]),
        mesh_axes=mesh_axes,
    ),
    at[0],
)

# The rule of the identity; the pin itself fixes the sharding.
register(PIN, traits=Traits(OpKind.IDENTITY, moves=FROM_ALL, states_placement=True))(
    passing
)
