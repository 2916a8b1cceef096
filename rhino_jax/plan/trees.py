"""PartitionSpecs in pytrees shaped like the arguments and the result.

A plan stores its leaves flat; this module restores the trees. Leaves that are no arrays
(strings, functions, Python objects in a module) have no sharding and are None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from rhino_jax.errors import MeshError
from rhino_jax.ir.spec import OpenSpec, axes_text
from rhino_jax.plan.plan import AnyPlan, Leaf, PlanData
from rhino_jax.plan.stages import STAGE_AXIS, StagePlan
from rhino_jax.utils.keywords import brief


def partition_spec(spec: OpenSpec, names: Sequence[str]) -> PartitionSpec:
    """Convert a spec to a PartitionSpec, trailing Nones dropped; open dims are
    UNCONSTRAINED."""
    parts: list[Any] = []
    for dim in spec:
        if dim is None:
            parts.append(PartitionSpec.UNCONSTRAINED)
            continue
        axes = tuple(names[a] for a in dim)
        parts.append(None if not axes else axes[0] if len(axes) == 1 else axes)
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


def in_tree_of(plan: PlanData, of_leaf: Callable[[Leaf], Any]) -> Any:
    """Map `of_leaf` over the argument leaves, in a tree shaped like the arguments.

    Returns:
      The tuple of positional arguments where the call has no keyword arguments,
      else the pair (args, kwargs).
    """
    arguments = plan.inputs[: len(plan.in_leaf_positions)]
    args, kwargs = _unflatten(
        plan.in_tree, plan.in_leaf_positions, [of_leaf(x) for x in arguments]
    )
    return (args, kwargs) if kwargs else args


def out_tree_of(plan: PlanData, of_leaf: Callable[[Leaf], Any]) -> Any:
    """Map `of_leaf` over the result leaves, in a tree shaped like the result.

    Outputs that are written back to arguments come after the result, and are left out.
    """
    result = plan.outputs[: len(plan.out_leaf_positions)]
    return _unflatten(
        plan.out_tree, plan.out_leaf_positions, [of_leaf(x) for x in result]
    )


def donated_arguments(plan: PlanData) -> tuple[int | str, ...]:
    """Return positions and names of the arguments whose arrays are all donated."""
    if plan.in_tree is None:
        return ()
    args, kwargs = _unflatten(
        plan.in_tree,
        plan.in_leaf_positions,
        [leaf.is_donated for leaf in plan.inputs[: len(plan.in_leaf_positions)]],
    )
    arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    donated = []
    for key, argument in arguments:
        flags = jax.tree.leaves(argument)
        if flags and all(flags):
            donated.append(key)
    return tuple(donated)


def sharding_of(plan: PlanData) -> Callable[[Leaf], NamedSharding]:
    """Return the function from a leaf to its `NamedSharding` on the plan's mesh.

    Raises:
      MeshError: the plan has no mesh.
    """
    if plan.mesh is None:
        sizes = tuple(size for _, size in plan.mesh_axes)
        names = tuple(name for name, _ in plan.mesh_axes)
        raise MeshError(
            f"the plan of `{plan.program_name}` has no mesh, so no shardings.",
            where="`Plan.mesh` is None: planned from axis sizes, or loaded",
            numbers=f"the plan's axes: {axes_text(plan.mesh_axes)}",
            fix=f"plan.with_mesh(jax.make_mesh({sizes}, {names})).",
        )
    names = tuple(name for name, _ in plan.mesh_axes)
    return lambda leaf: NamedSharding(
        mesh_of_leaf(plan, leaf),
        partition_spec(leaf.spec, names),
        memory_kind=leaf.memory_kind,
    )


def mesh_of_leaf(plan: PlanData, leaf: Leaf) -> Any:
    """Return the mesh of the devices that own a leaf."""
    if leaf.num_stages == 1:
        return plan.mesh if len(plan.stages) == 1 else plan.stages[leaf.stage].mesh
    return mesh_of_stages(plan.stages, leaf, plan.mesh)


def with_mesh(plan: AnyPlan, mesh: Any) -> AnyPlan:
    """Return the plan on a concrete (or abstract) mesh with the same axes.

    Raises:
      MeshError: the mesh's axes are not the plan's.
    """
    check_mesh("`plan.with_mesh`", mesh, plan.mesh_axes)
    return on_mesh(plan, mesh)


def on_mesh(plan: AnyPlan, mesh: Any | None) -> AnyPlan:
    """Return the plan and its stages on a mesh, unchecked, or on none."""
    if len(plan.stages) == 1:
        (stage,) = plan.stages
        return replace(plan, mesh=mesh, stages=(replace(stage, mesh=mesh),))
    stages = tuple(replace(s, mesh=stage_mesh(s, mesh)) for s in plan.stages)
    return replace(plan, mesh=mesh, stages=stages)


def mesh_of_stages(stages: Sequence[StagePlan], leaf: Leaf, mesh: Any) -> Any:
    """Return the part of a plan's mesh that owns a stack of layers; None for no
    mesh."""
    if leaf.num_stages == len(stages) or not isinstance(mesh, AbstractMesh | Mesh):
        return mesh
    mine = stages[leaf.stage : leaf.stage + leaf.num_stages]
    names = tuple(name for name, _ in mine[0].mesh_axes)
    at = names.index(STAGE_AXIS)
    if isinstance(mesh, AbstractMesh):
        sizes = [size for _, size in mine[0].mesh_axes]
        sizes[at] = sum(stage.places for stage in mine)
        return AbstractMesh(tuple(sizes), names)
    meshes: list[Any] = [stage_mesh(stage, mesh) for stage in mine]
    return Mesh(np.concatenate([m.devices for m in meshes], at), names)


def stage_mesh(stage: StagePlan, mesh: Any | None) -> Any | None:
    """Return the part of a plan's mesh on which a stage runs; None without a mesh."""
    names = tuple(name for name, _ in stage.mesh_axes)
    sizes = tuple(size for _, size in stage.mesh_axes)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(sizes, names)
    if not isinstance(mesh, Mesh):
        return None
    devices = mesh.devices.reshape(-1)[list(stage.devices)]
    return Mesh(devices.reshape(sizes), names)


def check_mesh(what: str, mesh: Any, expected: Sequence[tuple[str, int]]) -> None:
    """Refuse an object that is no mesh, or a mesh with other axes than the plan's.

    Raises:
      MeshError: `mesh` is one of these.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise MeshError(
            f"{what}: this is no mesh.",
            where="the first argument",
            numbers=f"got {brief(mesh)} ({type(mesh).__name__})",
            fix=f"give a jax.sharding.Mesh with axes {axes_text(expected)}.",
        )
    check_mesh_axes(what, tuple(mesh.shape.items()), expected)


def check_mesh_axes(
    what: str, got: Sequence[tuple[str, int]], expected: Sequence[tuple[str, int]]
) -> None:
    """Refuse a mesh whose axes are not the plan's.

    Raises:
      MeshError: names, sizes or order differ.
    """
    if tuple(got) == tuple(expected):
        return
    raise MeshError(
        f"{what}: the mesh is not the one that was planned for.",
        numbers=f"got {axes_text(got)}, planned for {axes_text(expected)}",
        fix=f"use a mesh with axes {axes_text(expected)}, or plan again for this one.",
    )


def _unflatten(tree: Any, positions: Sequence[int], leaves: Sequence[Any]) -> Any:
    if tree is None:
        raise ValueError("this plan carries no tree structure")
    everything: list[Any] = [None] * tree.num_leaves
    for position, leaf in zip(positions, leaves, strict=True):
        everything[position] = leaf
    return jax.tree.unflatten(tree, everything)
