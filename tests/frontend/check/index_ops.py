"""Gathers, scatters and dynamic slices with drawn dimension numbers and indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from jax import lax


Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function, and its arguments."""


def normals(*dims: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(dims).astype(np.float32)


@st.composite
def indexing(draw: st.DrawFn, frees: Sequence[int] = (2, 4, 3)) -> dict[str, Any]:
    """Draw dimension numbers and shapes of a gather or scatter.

    Each operand dim is batched, indexed and dropped, indexed with a window of one,
    indexed with a longer window, or taken in full, with or without an index.
    """
    roles = draw(
        st.lists(
            st.sampled_from("batch drop one part full all".split()),
            min_size=1,
            max_size=4,
        )
    )
    operand = tuple(draw(st.sampled_from([2, 4, 4, 8])) for _ in roles)
    indexed = draw(
        st.permutations(
            [d for d, r in enumerate(roles) if r in ("drop", "one", "part", "all")]
        )
    )
    batch = [d for d, role in enumerate(roles) if role == "batch"]
    free = draw(st.lists(st.sampled_from(frees), max_size=2))
    slots = draw(st.permutations([*range(len(batch) + len(free))]))
    lead = [0] * len(slots)
    for slot, size in zip(slots, [*(operand[d] for d in batch), *free], strict=True):
        lead[slot] = size
    windows = [
        d for d, role in enumerate(roles) if role in ("one", "part", "full", "all")
    ]
    rank = len(lead) + len(windows)
    offsets = sorted(draw(st.permutations(range(rank)))[: len(windows)])
    sizes = {"batch": 1, "drop": 1, "one": 1}
    slice_sizes = tuple(
        sizes.get(role, max(n // 2, 1) if role == "part" else n)
        for role, n in zip(roles, operand, strict=True)
    )
    mode = draw(st.sampled_from(["clip", "fill", "promise_in_bounds"]))
    low, high = (0, 1) if mode == "promise_in_bounds" else (-2, 9)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    indices = rng.integers(low, high + 1, (*lead, len(indexed))).astype(np.int32)
    if mode == "promise_in_bounds":
        room = np.array([operand[d] - slice_sizes[d] for d in indexed], np.int32)
        indices = np.minimum(indices, room).astype(np.int32)
    window_sizes = iter(slice_sizes[d] for d in windows)
    lead_sizes = iter(lead)
    updates = [next(window_sizes if d in offsets else lead_sizes) for d in range(rank)]
    return {
        "operand": operand,
        "indices": indices,
        "updates": tuple(updates),
        "offset_dims": tuple(offsets),
        "dropped": tuple(d for d, role in enumerate(roles) if role == "drop"),
        "indexed": tuple(indexed),
        "batch": tuple(batch),
        "indices_batch": tuple(slots[: len(batch)]),
        "slice_sizes": slice_sizes,
        "mode": mode,
    }


def gather_of(case: dict[str, Any]) -> Call:
    numbers = lax.GatherDimensionNumbers(
        offset_dims=case["offset_dims"],
        collapsed_slice_dims=case["dropped"],
        start_index_map=case["indexed"],
        operand_batching_dims=case["batch"],
        start_indices_batching_dims=case["indices_batch"],
    )

    def fn(x: Any, i: Any) -> Any:
        return lax.gather(x, i, numbers, case["slice_sizes"], mode=case["mode"])

    return fn, (normals(*case["operand"]), case["indices"])


def scatter_of(kind: str, case: dict[str, Any]) -> Call:
    """Return a call of `jax.lax.scatter_add` and its like."""
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=case["offset_dims"],
        inserted_window_dims=case["dropped"],
        scatter_dims_to_operand_dims=case["indexed"],
        operand_batching_dims=case["batch"],
        scatter_indices_batching_dims=case["indices_batch"],
    )

    def fn(x: Any, i: Any, u: Any) -> Any:
        return getattr(lax, kind)(x, i, u, numbers, mode=case["mode"])

    args = normals(*case["operand"]), case["indices"], normals(*case["updates"])
    return fn, args


@st.composite
def slicing(draw: st.DrawFn) -> dict[str, Any]:
    """Draw shapes and starts of a dynamic slice or update; starts lie anywhere."""
    shape = tuple(
        draw(st.lists(st.sampled_from([1, 4, 8, 8, 6, 0]), min_size=1, max_size=3))
    )
    lengths = tuple(
        draw(st.sampled_from([n, min(n, 1), min(n, 1), n // 2, 0])) for n in shape
    )
    kind = np.dtype(
        draw(st.sampled_from(["int32", "int32", "uint8", "int8", "uint32"]))
    )
    lowest, highest = (-(2**31), 2**31 - 1) if kind.itemsize == 4 else (-128, 255)
    if kind.kind == "u":
        lowest = 0
    highest = min(highest, int(np.iinfo(kind).max))
    place = st.one_of(
        st.integers(max(lowest, -9), 9), st.sampled_from([lowest, highest])
    )
    return {
        "shape": shape,
        "lengths": lengths,
        "starts": [kind.type(draw(place)) for _ in shape],
        "is_wrapped": draw(st.booleans()),
    }


def slice_of(case: dict[str, Any]) -> Call:
    def fn(x: Any, *starts: Any) -> Any:
        return lax.dynamic_slice(
            x, starts, case["lengths"], allow_negative_indices=case["is_wrapped"]
        )

    return fn, (normals(*case["shape"]), *case["starts"])


def update_of(case: dict[str, Any]) -> Call:
    def fn(x: Any, u: Any, *starts: Any) -> Any:
        return lax.dynamic_update_slice(
            x, u, starts, allow_negative_indices=case["is_wrapped"]
        )

    return fn, (normals(*case["shape"]), normals(*case["lengths"]), *case["starts"])
