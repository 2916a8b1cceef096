"""Size parameters of ops on a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


Shape = tuple[int, ...]
Local = Callable[[Mapping[str, Any], Sequence[Shape], Sequence[Shape]], dict[str, Any]]
"""(parameters, shapes of the operands on a micro-batch, shapes of the results) →
changed parameters."""


def _result(key: str) -> Local:
    """Return a rule that sets parameter `key` to the shape of the result."""

    def local(
        params: Mapping[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]
    ) -> dict[str, Any]:
        return {key: tuple(outs[0])}

    return local


def _slice(
    params: Mapping[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]
) -> dict[str, Any]:
    """Set limits so that dims with the batch are taken in full; of size 0, nothing."""
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
    """Set slice sizes so that slices spanning a dim of the operand still span it."""
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
    """Return an op's parameters on a micro-batch.

    Args:
      name: name of the primitive.
      params: its parameters on the whole batch.
      in_shapes: shapes of the operands on a micro-batch.
      out_shapes: shapes of the results on a micro-batch.
    """
    changed = dict(params)
    if name in _LOCAL:
        changed |= _LOCAL[name](params, in_shapes, out_shapes)
    return changed
