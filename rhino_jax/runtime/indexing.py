"""Rewrite index ops at the edges of sharded dims, where XLA's partitioner errs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rhino_jax.frontend.rules.rotate import ROTATE, halves
from rhino_jax.ir.factor import FactorKind
from rhino_jax.ir.program import Op
from rhino_jax.ir.spec import Spec, num_shards
from rhino_jax.ir.traits import OpKind


SLICE = "dynamic_slice"
UPDATE_SLICE = "dynamic_update_slice"
CONCATENATE = "concatenate"


def with_clamped_starts(
    op: Op, operands: Sequence[Any], specs: Sequence[Spec | None]
) -> list[Any]:
    """Clamp the starts of a dynamic slice or update along dims that the mesh shards.

    A start outside of the dim is clamped to it, by the semantics of the op. XLA's
    partitioner compares an update's start with the range of each shard before that: it
    falls into none, and the update is lost (openxla/xla#49118). Of a slice each shard
    clamps the start of its own part, so that shards overlap.

    Args:
      op: the op.
      operands: its operands: an array, the update if it is one, and the starts.
      specs: specs of operands, then results; None where the compiler decides.
    Returns:
      The operands; unchanged where the op is neither.
    """
    if op.rule is None or op.name not in (SLICE, UPDATE_SLICE):
        return list(operands)
    if op.name == SLICE:
        whole, *starts = operands
        rule, spec = op.rule, specs[-1]
        for d, (dim, made) in enumerate(
            zip(rule.operands[0], rule.results[0], strict=True)
        ):
            if dim != made and (spec is None or spec[d]):
                size = math.prod(rule.factors[f].size for f in made)
                starts[d] = _clamped(starts[d], whole.shape[d] - size)
        return [whole, *starts]
    whole, update, *starts = operands
    held = specs[0], specs[-1]
    for d, factors in enumerate(op.rule.operands[0]):
        is_index = any(op.rule.factors[f].kind is FactorKind.INDEX for f in factors)
        if is_index and any(spec is None or spec[d] for spec in held):
            starts[d] = _clamped(starts[d], whole.shape[d] - update.shape[d])
    return [whole, update, *starts]


def with_shards_made(
    op: Op, operands: Sequence[Any], specs: Sequence[Spec | None], sizes: Sequence[int]
) -> list[Any]:
    """Make the shards of an array before a scatter writes at one index of them.

    Shards in which the index does not fall write back the elements at a start that is
    clamped to the shard. Where the shard itself is a slice of a replicated array, XLA
    folds both slices into one without that clamp, and other elements are written
    (openxla/xla#49121). A barrier keeps the slices apart. Scatters at several indices
    are loops, which are not folded.

    Args:
      op: the op.
      operands: its operands: an array, the indices, the updates.
      specs: specs of operands, then results; None where the compiler decides.
      sizes: sizes of the mesh axes.
    Returns:
      The operands; unchanged where the op is no scatter at one index of a shard.
    """
    if op.traits.kind is OpKind.SCATTER and writes_one_index(
        op, operands[1].shape, specs, sizes
    ):
        array, *others = operands
        return [lax.optimization_barrier(array), *others]
    return list(operands)


def writes_one_index(
    op: Op,
    indices: Sequence[int],
    specs: Sequence[Spec | None],
    sizes: Sequence[int],
) -> bool:
    """Whether a scatter writes at one index of each shard, along a sharded dim.

    Args:
      op: the scatter.
      indices: shape of its indices.
      specs: specs of operands, then results; None where the compiler decides.
      sizes: sizes of the mesh axes.
    """
    if op.rule is None:
        return False
    factors, whole = op.rule.factors, specs[-1]
    is_sharded = any(
        (whole is None or whole[d])
        and any(factors[f].kind is FactorKind.INDEX for f in dim)
        for d, dim in enumerate(op.rule.operands[0])
    )
    if not is_sharded:  # Nor has a scatter of windows' maxima any indices.
        return False
    held = specs[1] or ((),) * len(indices)
    pieces = num_shards(itertools.chain(*held[:-1]), sizes)
    return math.prod(indices[:-1]) <= pieces


def concatenated(
    op: Op,
    operands: Sequence[Any],
    params: Mapping[str, Any],
    specs: Sequence[Spec | None],
    sizes: Sequence[int],
    place: Callable[[Any, Spec | None], Any],
) -> Any | None:
    """Return a concatenation or rotation along a sharded dim; None to leave it to XLA.

    XLA's partitioner reshards the dim by all-to-alls (CPU, v5e:2x4 and 8 H100, jax
    0.10.2), except for rotations with shards of equal size. Padded to the whole result,
    operands are shifted by collective-permutes of their borders, and every element is
    selected from the operand that has it.

    Args:
      op: the op.
      operands: its operands.
      params: parameters of its equation.
      specs: specs of operands, then of the result; None where the compiler decides.
      sizes: sizes of the mesh axes.
      place: constrains an array to a spec.
    """
    spec = specs[-1] if specs else None
    if op.name not in (CONCATENATE, ROTATE) or op.rule is None or spec is None:
        return None
    axis = params["dimension" if op.name == CONCATENATE else "axis"]
    factors = [op.rule.factors[f] for f in op.rule.results[0][axis]]
    is_shifted = any(f.shift is not None for f in factors)
    if not spec[axis] or not is_shifted:
        return None
    if op.name == ROTATE:
        if operands[0].shape[axis] % num_shards(spec[axis], sizes) == 0:
            return None
        operands = halves(operands[0], params["shift"], axis)
    lengths = [x.shape[axis] for x in operands]
    stops = list(itertools.accumulate(lengths))
    shape = (*operands[0].shape[:axis], stops[-1], *operands[0].shape[axis + 1 :])
    position = place(lax.broadcasted_iota(jnp.int32, shape, axis), spec)
    found = None
    for x, size, stop in zip(operands, lengths, stops, strict=True):
        config = [(0, 0, 0)] * x.ndim
        config[axis] = stop - size, stops[-1] - stop, 0
        part = place(lax.pad(x, jnp.zeros((), x.dtype), config), spec)
        found = (
            part if found is None else jnp.where(position < stop - size, found, part)
        )
    return found


def _clamped(start: Any, most: int) -> Any:
    """Return a start clamped to [0, `most`], in its own integer dtype."""
    start = jnp.asarray(start)
    limit = min(most, int(jnp.iinfo(start.dtype).max))
    low, high = (jnp.asarray(x, start.dtype) for x in (0, limit))
    return jax.lax.clamp(low, start, high)
