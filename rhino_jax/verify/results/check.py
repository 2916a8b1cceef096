"""The result of `plan.check`: two runs of one program, compared leaf by leaf."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rhino_jax.explain.report.html import Displayed
from rhino_jax.explain.report.line import format_mesh
from rhino_jax.explain.report.section import Section, Table
from rhino_jax.ir.printer import format_array
from rhino_jax.units import format_count, format_seconds


TOLERANCES = {
    "float64": 1e-8,
    "complex128": 1e-8,
    "float32": 1e-4,
    "complex64": 1e-4,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}
"""Largest `ComparedLeaf.relative` that another order of summation may cause, by dtype.

Integers, bools and random keys must be equal.
"""

COARSE = 0.3
"""Tolerance of floats of eight bits and fewer."""

MIN_OF_LEAF = 0.1
"""Share of a leaf's largest magnitude that is added to the base of `relative`."""

NOISE = 1e-8
"""Absolute differences up to this are rounding errors of a zero."""

ROUNDINGS = 2.0
"""Multiple of one device's rounding noise by which a planned run may differ.

The noise is the largest difference of runs on one device that round otherwise by a last
bit. The planned run rounds the partial sums of devices, too.
"""


@dataclass(frozen=True, slots=True)
class ComparedLeaf:
    """One array of the result: the planned run compared with one device.

    Attributes:
      path: tree path of the leaf.
      shape, dtype: global shape and element type of the array.
      absolute: largest |planned - one device|; NaN where only one of the two is NaN, or
        the other infinite.
      relative: largest |planned - one device| ÷ (|one device| + a tenth of the leaf's
        largest magnitude).
      tolerance: largest `relative` that is accepted; 0: elements must be equal.
      worst: index of the element with the largest relative difference.
      differing: number of elements that differ beyond the tolerance.
      share: share of the elements that were compared: those in this process's shards.
      rounding: largest difference of the array between runs on one device, as of
        `ROUNDINGS`; 0 where only one was run.
      not_numbers: number of elements that are NaN in both runs.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    absolute: float
    relative: float
    tolerance: float
    worst: tuple[int, ...]
    differing: int
    share: float = 1.0
    rounding: float = 0.0
    not_numbers: int = 0

    @property
    def ok(self) -> bool:
        """Whether no element differs beyond the tolerance."""
        return self.differing == 0


def tolerance_of(dtype: Any) -> float:
    """Return the default tolerance of an element type; see `TOLERANCES`."""
    kind = np.dtype(dtype)
    if kind.kind in "biu":
        return 0.0
    return TOLERANCES.get(kind.name, COARSE)


def compare(
    path: str,
    planned: Any,
    single: Any,
    tolerance: float | None = None,
    rounded: Sequence[Any] = (),
) -> ComparedLeaf:
    """Compare one leaf of the planned run with the same leaf on one device.

    Args:
      path: tree path of the leaf.
      planned: a JAX array of the planned run, of which this process may have only some
        shards.
      single: the array of the run on one device.
      tolerance: tolerance of floats; None: by element type.
      rounded: the array of other runs on one device; their largest difference from
        `single` is the noise of the program's own types.
    """
    name = str(planned.dtype)
    if jnp.issubdtype(planned.dtype, jax.dtypes.prng_key):
        planned, single = jax.random.key_data(planned), jax.random.key_data(single)
    whole = np.asarray(single)
    allowed = tolerance_of(whole.dtype)
    if tolerance is not None and allowed:
        allowed = tolerance
    wide, runs = _wide(whole), rounded if allowed else ()
    scale = _largest(wide) if allowed else 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        changes = [_largest(wide - _wide(np.asarray(other))) for other in runs]
    rounding = max(changes, default=0.0)
    worst, differing, absolute, seen = (-1.0, (0,) * whole.ndim), 0, 0.0, 0
    not_numbers = 0
    for index, part in _parts(planned):
        if not part.size:
            continue
        one, other = np.asarray(part), whole[index]
        sizes, relative = _differences(one, other, scale, allowed)
        seen += part.size
        # NaN against a number is an infinite relative difference.
        is_within = sizes <= ROUNDINGS * rounding
        differing += int(((relative > allowed) & ~is_within).sum())
        if allowed:
            not_numbers += int((np.isnan(_wide(one)) & np.isnan(_wide(other))).sum())
        # NaN of any part stays.
        absolute = float(np.maximum(absolute, sizes.max()))
        at = int(relative.argmax())
        if relative.flat[at] > worst[0]:
            place = np.unravel_index(at, relative.shape)
            first = [s.start or 0 for s in index]
            where = tuple(int(p) + f for p, f in zip(place, first, strict=True))
            worst = (float(relative.flat[at]), where)
    return ComparedLeaf(
        path=path,
        shape=tuple(whole.shape),
        dtype=name,
        absolute=absolute,
        relative=max(0.0, worst[0]),
        tolerance=allowed,
        worst=worst[1],
        differing=differing,
        share=seen / whole.size if whole.size else 1.0,
        rounding=rounding,
        not_numbers=not_numbers,
    )


def _parts(planned: Any) -> Sequence[tuple[tuple[slice, ...], Any]]:
    """Return this process's shards of an array with indices, every element once."""
    if planned.is_fully_addressable:
        return [((slice(None),) * planned.ndim, planned)]
    seen: dict[str, tuple[tuple[slice, ...], Any]] = {}
    for shard in planned.addressable_shards:
        seen.setdefault(repr(shard.index), (shard.index, shard.data))
    return list(seen.values())


def _largest(x: np.ndarray) -> float:
    """Return an array's largest finite magnitude."""
    size = np.abs(x)
    return float(np.where(np.isfinite(size), size, 0.0).max(initial=0.0))


def _differences(
    planned: np.ndarray, single: np.ndarray, scale: float, allowed: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the absolute and the relative differences of two arrays."""
    if not allowed:
        differs = planned != single
        size = np.zeros(planned.shape)
        if differs.any():
            size = np.abs(planned.astype(np.float64) - single.astype(np.float64))
        return size, np.where(differs, np.maximum(size, 1.0), 0.0)
    a, b = _wide(planned), _wide(single)
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.abs(a - b)
        base = np.abs(b) + MIN_OF_LEAF * scale
        relative = np.where(size <= NOISE, 0.0, size / np.where(base > 0, base, 1.0))
    # NaN equals NaN, and an infinity equals itself.
    same = (np.isnan(a) & np.isnan(b)) | (a == b)
    size = np.where(same, 0.0, np.where(np.isfinite(size), size, np.nan))
    relative = np.where(same, 0.0, np.where(np.isnan(size), np.inf, relative))
    return size, relative


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


TOP_LEAVES = 10


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Check(Displayed):
    """The results of a sharded program compared with those of one device.

    Attributes:
      program_name: name of the planned function.
      mesh_axes: (name, size) of every mesh axis, major first.
      devices: devices that the plan ran on, as "8 emulated cpu devices".
      leaves: comparison of every array of the result, the largest differences first.
      not_compared: (tree path, reason) of leaves that could not be compared.
      seconds: wall time of compiling and running both programs.
    """

    program_name: str
    mesh_axes: tuple[tuple[str, int], ...]
    devices: str
    leaves: tuple[ComparedLeaf, ...]
    not_compared: tuple[tuple[str, str], ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether no compared leaf differs beyond its tolerance."""
        return all(leaf.ok for leaf in self.leaves)

    @property
    def with_nan(self) -> tuple[ComparedLeaf, ...]:
        """The arrays with elements that are NaN in both runs, which compare nothing."""
        return tuple(leaf for leaf in self.leaves if leaf.not_numbers)

    def _line(self) -> str:
        """Return one line with program, mesh, and whether the results agree."""
        bad = sum(not leaf.ok for leaf in self.leaves)
        said = "ok" if self.ok else f"{format_count(bad)} differ"
        if self.with_nan:
            said = f"{len(self.with_nan)} with NaN in both runs, {said}"
        arrays = f"{format_count(len(self.leaves))} arrays"
        return (
            f"Check({self.program_name} on {format_mesh(self.mesh_axes)}, run on"
            f" {self.devices} compared with one: {arrays}, {said})"
        )

    def _sections(self, *, full: bool) -> tuple[Section, ...]:
        bad = [leaf for leaf in self.leaves if not leaf.ok]
        result = f"{format_count(len(self.leaves))} arrays agree"
        if bad:
            result = f"{len(bad)} of {len(self.leaves)} arrays differ"
        nan = ", ".join(
            f"{leaf.path} ({format_count(leaf.not_numbers)} of"
            f" {format_count(math.prod(leaf.shape))} elements)"
            for leaf in self.with_nan
        )
        warning = f"in both runs, so that these compare nothing: {nan}"
        head = Section(
            f"check of {self.program_name}",
            facts=(
                *([("NaN", warning)] if nan else []),
                ("mesh", format_mesh(self.mesh_axes)),
                ("run on", f"{self.devices}, and on one of them"),
                ("result", result),
                ("took", format_seconds(self.seconds)),
            ),
        )
        count = len(self.leaves) if full else max(TOP_LEAVES, len(bad))
        shown = self.leaves[:count]
        rest = len(self.leaves) - len(shown)
        lines = (f"and {format_count(rest)} more, with less",) * bool(rest)
        table = Table(
            ("array", "type", "absolute", "relative", "allowed", "worst at", ""),
            tuple(_row(leaf) for leaf in shown),
            "<<>>><<",
            marked=frozenset(i for i, leaf in enumerate(shown) if not leaf.ok),
        )
        left = Section(
            "not compared",
            table=Table(("what", "why"), self.not_compared, "<<", (0, 1)),
        )
        return (
            head,
            Section("largest differences", table=table, lines=lines),
            *([left] if self.not_compared else []),
        )


def _row(leaf: ComparedLeaf) -> tuple[str, ...]:
    exact = not leaf.tolerance
    rounding = f" or ±{ROUNDINGS * leaf.rounding:.2g}" if leaf.rounding else ""
    return (
        leaf.path,
        format_array(leaf.dtype, leaf.shape),
        f"{leaf.absolute:.2g}",
        "" if exact else f"{leaf.relative:.2g}",
        "equal" if exact else f"{leaf.tolerance:.2g}{rounding}",
        f"[{', '.join(map(str, leaf.worst))}]" if leaf.relative else "",
        "" if leaf.ok else f"{format_count(leaf.differing)} differ",
    )
