"""Slices of products as products of slices.

`(x @ w)[:, :-1]` reads all of `x @ w` but its last row: as `x[:, :-1] @ w` that row is
not computed, and the slice copies less. The gradient is a product of an array that is
padded with zeros: over the padded dim, it is a product of a slice; along it, a padded
product. Elements are the same but for the order of a sum. Only smaller arrays are
sliced or padded instead: a vocabulary that is padded, to be sharded evenly, stays so.

XLA:TPU copies the logits of a loss that slices them to another layout, and pads their
gradient again (a GPT of two layers on v5e:4x4: 24.7 ms, and 22.2 so).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax

from rhino_jax._compat import bind_eqn, is_literal
from rhino_jax.frontend.known_values import known_value
from rhino_jax.frontend.tracing.windows import Move


def sliced_product(
    eqn: Any, made: Mapping[Any, Any], readers: Mapping[Any, int]
) -> Move | None:
    """Return the product of slices that an equation is; None for other equations.

    Args:
      eqn: the equation.
      made: variable → the equation that computes it.
      readers: variable → number of its readers.
    """
    if eqn.primitive.name == "slice":
        return _of_slice(eqn, made, readers)
    if eqn.primitive.name == "dot_general":
        found = (_of_padded(eqn, side, made) for side in (0, 1))
        return next(filter(None, found), None)
    return None


def _of_slice(
    eqn: Any, made: Mapping[Any, Any], readers: Mapping[Any, int]
) -> Move | None:
    """Return a product of slices in place of a slice of a product that nothing else
    reads."""
    casts, dot = _behind_casts(eqn.invars[0], made, readers)
    params, shape = eqn.params, eqn.invars[0].aval.shape
    is_step = {*(params["strides"] or ()), 1} == {1}
    if dot is None or dot.primitive.name != "dot_general" or not is_step:
        return None
    bounds = [*zip(params["start_indices"], params["limit_indices"], strict=True)]
    cut = {d: bounds[d] for d, n in enumerate(shape) if bounds[d] != (0, n)}
    places = _free_dims(dot)
    if not cut or any(d not in places for d in cut):
        return None
    if any(dot.invars[places[d][0]].aval.size > eqn.invars[0].aval.size for d in cut):
        return None

    def run(*operands: Any) -> Any:
        sliced = [*operands]
        for dim, (start, stop) in cut.items():
            side, axis = places[dim]
            sliced[side] = lax.slice_in_dim(sliced[side], start, stop, axis=axis)
        return _cast(bind_eqn(dot, sliced, dot.params)[0], casts)

    return run, dot.invars


def _of_padded(eqn: Any, side: int, made: Mapping[Any, Any]) -> Move | None:
    """Return a product of a slice, or a padded product, in place of a product of an
    operand that is padded with zeros along dims that are not batch."""
    casts, pad = _behind_casts(eqn.invars[side], made)
    if pad is None or pad.primitive.name != "pad" or is_literal(pad.invars[0]):
        return None
    if known_value(pad.invars[1], {}) != 0:
        return None
    config = [(int(a), int(b), int(c)) for a, b, c in pad.params["padding_config"]]
    padded = [d for d, c in enumerate(config) if c != (0, 0, 0)]
    summed, batch = eqn.params["dimension_numbers"]
    is_edge = all(
        low >= 0 and high >= 0 and not between for low, high, between in config
    )
    if not padded or not is_edge or any(d in batch[side] for d in padded):
        return None
    is_summed = any(d in summed[side] for d in padded)
    other = eqn.invars[1 - side] if is_summed else eqn.outvars[0]
    if other.aval.size > eqn.invars[side].aval.size:
        return None
    places = {place: dim for dim, place in _free_dims(eqn).items()}
    sizes = pad.invars[0].aval.shape

    def run(x: Any, other: Any) -> Any:
        operands = [_cast(x, casts), other]
        for dim in padded:
            if dim in summed[side]:
                axis, low = summed[1 - side][summed[side].index(dim)], config[dim][0]
                operands[1] = lax.slice_in_dim(
                    operands[1], low, low + sizes[dim], axis=axis
                )
        (made,) = bind_eqn(eqn, operands[::-1] if side else operands, eqn.params)
        edges = [(0, 0, 0)] * made.ndim
        for dim in padded:
            if dim not in summed[side]:
                edges[places[side, dim]] = config[dim]
        return lax.pad(made, lax.full((), 0, made.dtype), edges)

    return run, [pad.invars[0], eqn.invars[1 - side]]


def _free_dims(dot: Any) -> dict[int, tuple[int, int]]:
    """Return, for each dim of a product that is one operand's alone, the position of
    the operand and of its dim."""
    summed, batch = dot.params["dimension_numbers"]
    found, at = dict[int, tuple[int, int]](), len(batch[0])
    for side, operand in enumerate(dot.invars):
        taken = (*summed[side], *batch[side])
        for dim in (d for d in range(operand.aval.ndim) if d not in taken):
            found[at] = side, dim
            at += 1
    return found


def _behind_casts(
    var: Any, made: Mapping[Any, Any], readers: Mapping[Any, int] | None = None
) -> tuple[list[Any], Any]:
    """Return the conversions that compute a variable, the first one first, and the
    equation before them; None where one has several readers."""
    casts: list[Any] = []
    while not is_literal(var) and (eqn := made.get(var)) is not None:
        if readers is not None and readers[var] != 1:
            break
        if eqn.primitive.name != "convert_element_type":
            return casts, eqn
        casts.insert(0, eqn)
        var = eqn.invars[0]
    return [], None


def _cast(x: Any, casts: Sequence[Any]) -> Any:
    for eqn in casts:
        (x,) = bind_eqn(eqn, [x], eqn.params)
    return x
