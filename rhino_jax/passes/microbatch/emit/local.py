"""Parameters of an op that carry sizes, as they are for a piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


Shape = tuple[int, ...]
Local = Callable[[Mapping[str, Any], Sequence[Shape], Sequence[Shape]], dict[str, Any]]
"""Parameters, shapes of a piece of the operands and of the results → what changes."""


def _result(key: str) -> Local:
    def local(
        params: Mapping[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]
    ) -> dict[str, Any]:
        return {key: tuple(outs[0])}

    return local


def _slice(
    params: Mapping[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]
) -> dict[str, Any]:
    """Dims that hold the batch are taken in full; of a dim of size 0, nothing."""
    strides = params["strides"] or (1,) * len(ins[0])
    return {
        "limit_indices": tuple(
            start + max((size - 1) * stride + 1, 0)
            for start, size, stride in zip(
                params["start_indices"], outs[0], strides, strict=True
            )
        )
    }


def _split(
    params: Mapping[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]
) -> dict[str, Any]:
    return {"sizes": tuple(shape[params["axis"]] for shape in outs)}


def _tile(
    params: Mapping[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]
) -> dict[str, Any]:
    pairs = zip(outs[0], ins[0], strict=True)
    return {"reps": tuple(size // part for size, part in pairs)}


def _gather(
    params: Mapping[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]
) -> dict[str, Any]:
    """Windows over a full dim of the operand stay so."""
    dims = params["dimension_numbers"]
    gone = {*dims.collapsed_slice_dims, *dims.operand_batching_dims}
    kept = [d for d in range(len(ins[0])) if d not in gone]
    sizes = list(params["slice_sizes"])
    for d, offset in zip(kept, dims.offset_dims, strict=True):
        sizes[d] = outs[0][offset]
    return {"slice_sizes": tuple(sizes)}


def _bits(
    params: Mapping[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]
) -> dict[str, Any]:
    return {"shape": tuple(outs[0][len(ins[0]) :])}


_LOCAL: Mapping[str, Local] = {
    "broadcast_in_dim": _result("shape"),
    "dynamic_slice": _result("slice_sizes"),
    "empty": _result("shape"),
    "gather": _gather,
    "random_bits": _bits,
    "random_split": _bits,
    "reshape": _result("new_sizes"),
    "slice": _slice,
    "split": _split,
    "tile": _tile,
}


def local_params(
    name: str,
    params: Mapping[str, Any],
    in_shapes: Sequence[Shape],
    out_shapes: Sequence[Shape],
) -> dict[str, Any]:
    """The parameters for a piece.

    Args:
      name: of the primitive.
      params: for the whole.
      in_shapes, out_shapes: of a piece of the operands and of the results.
    """
    changed = dict(params)
    if name in _LOCAL:
        changed |= _LOCAL[name](params, in_shapes, out_shapes)
    return changed
