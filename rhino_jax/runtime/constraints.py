"""Apply specs as sharding constraints on a mesh whose axes are all Auto."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from rhino_jax._compat import is_on_host
from rhino_jax.cost.reshard import reshard_route
from rhino_jax.errors import PlanFileError
from rhino_jax.hardware.lowering import AS_WRITTEN, LoweringPolicy
from rhino_jax.ir.spec import (
    Spec,
    axes_text,
    entry_axes,
    format_spec,
    is_even,
    shards_per_dim,
)
from rhino_jax.plan.trees import partition_spec


def auto_mesh(mesh: Any) -> Any:
    """Return a mesh of the same devices and names with Explicit axes made Auto.

    Inside of `shard_map`, its Manual axes stay Manual.
    """
    if not mesh.explicit_axes:
        return mesh
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=kinds)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


@dataclass(frozen=True, slots=True)
class Constraints:
    """Turns specs into shardings and constrains values to them.

    Attributes:
      mesh: the mesh.
      lowering: the lowering policy of `Decisions`.
    """

    mesh: Any
    lowering: LoweringPolicy = AS_WRITTEN
    _known: dict[tuple[Spec, tuple[int, ...]], NamedSharding] = field(
        default_factory=dict, repr=False, compare=False
    )

    def sharding(self, spec: Spec, shape: Sequence[int]) -> NamedSharding:
        """Return the sharding of a spec.

        Dims with fewer elements than shards are left unconstrained.
        """
        key = (spec, tuple(shape))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = NamedSharding(
                self.mesh, spec_on_mesh(spec, shape, self.mesh)
            )
        return found

    def place(self, x: Any, spec: Spec | None) -> Any:
        """Constrain `x` to `spec`; `x` itself where there is nothing to constrain."""
        if spec is None or not can_constrain(x) or len(spec) != x.ndim:
            return x
        return jax.lax.with_sharding_constraint(x, self.sharding(spec, x.shape))

    def broadcast(self, x: Any, shape: Sequence[int], spec: Spec | None) -> Any:
        """Broadcast an operand of an elementwise op to its result where this repeats it
        along dims that the result's spec leaves whole.

        XLA:TPU shares the broadcasts that it inserts itself: one that another op reads
        sharded along these dims is sharded, and gathered here (11 gathers of 4 MiB in
        two layers with batch norms whose first is replicated, v5e:2x4, libtpu 0.0.52).
        """
        if not spec or not can_constrain(x) or x.ndim != len(spec):
            return x
        dims = zip(x.shape, shape, spec, strict=True)
        repeated, sizes = [axes for n, m, axes in dims if n < m], self.mesh.axis_sizes
        is_full = math.prod(shards_per_dim(spec, sizes)) == math.prod(sizes)
        if not repeated or is_full or any(repeated):
            return x
        return self.place(jax.numpy.broadcast_to(x, shape), spec)

    def travel(self, x: Any, held: Spec | None, wanted: Spec | None) -> Any:
        """Reshard `x` from one spec to another, one collective at a time."""
        if wanted is None or held is None or len(held) != len(wanted):
            return self.place(x, wanted)
        if not can_constrain(x) or len(wanted) != x.ndim:
            return x
        sizes = tuple(self.mesh.axis_sizes)
        for stop in stops(held, wanted, sizes, self.lowering):
            x = self.place(x, stop)
        return x


def stops(
    held: Spec, wanted: Spec, sizes: tuple[int, ...], lowering: LoweringPolicy
) -> tuple[Spec, ...]:
    """Return the specs that a value is annotated with along a reshard.

    The last one is `wanted`; without waypoints, or where nothing changes, it is the
    only one.
    """
    if not lowering.annotates_waypoints:
        return (wanted,)
    return reshard_route(held, wanted, sizes, lowering)


def spec_on_mesh(spec: Spec, shape: Sequence[int], mesh: Any) -> PartitionSpec:
    """Return the `PartitionSpec` of a spec, UNCONSTRAINED in dims with more shards than
    elements."""
    shards = shards_per_dim(spec, mesh.axis_sizes)
    dims = zip(spec, shape, shards, strict=True)
    named = tuple(None if 0 < size < n else dim for dim, size, n in dims)
    return partition_spec(named, mesh.axis_names)


def can_constrain(x: Any) -> bool:
    """Whether a value is an array with dims (not a scalar, reference or token) on the
    devices."""
    aval = jax.typeof(x)
    if not isinstance(aval, jax.core.ShapedArray) or not aval.shape:
        return False
    if is_on_host(aval):
        return False
    return aval.dtype != jax.dtypes.float0


def explicit_part(sharding: NamedSharding) -> NamedSharding:
    """Return the sharding restricted to Explicit axes, as in array types."""
    mesh = sharding.mesh
    return NamedSharding(mesh, spec_over(sharding.spec, mesh.explicit_axes))


def spec_over(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """Return a PartitionSpec restricted to some mesh axes."""
    kept = ([x for x in entry_axes(dim) if x in axes] for dim in spec)
    return PartitionSpec(*(tuple(names) or None for names in kept))


def check_divides(path: str, spec: Spec, shape: Sequence[int], mesh: Any) -> None:
    """Refuse a spec that shards an argument or result unevenly.

    Raises:
      PlanFileError: a dim is not divisible by its mesh axes.
    """
    if len(spec) == len(shape) and is_even(spec, shape, mesh.axis_sizes):
        return
    axes = axes_text(tuple(mesh.shape.items()))
    raise PlanFileError(
        "the plan cuts an array unevenly.",
        where=path,
        numbers=f"shape {tuple(shape)}, spec {format_spec(spec, mesh.axis_names)},"
        f" mesh {axes}",
        fix="plan again: rhino.plan(fn, *args, mesh=mesh).",
    )
