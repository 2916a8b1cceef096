"""Explain to the user why a function is planned again."""

from __future__ import annotations

from rhino_jax.frontend.call import Call, array_type, type_text
from rhino_jax.frontend.trace import Traced
from rhino_jax.plan.plan import PlanData


def kept_text(before: PlanData, plan: PlanData) -> str:
    """Return a sentence that says whether mesh and state stay where they were."""
    if plan.mesh_axes != before.mesh_axes:
        return "Nothing fits on the mesh as it was: state moves to another."
    old = {(leaf.path, leaf.shape): leaf.spec for leaf in before.inputs}
    same = [leaf for leaf in plan.inputs if (leaf.path, leaf.shape) in old]
    moved = sum(old[leaf.path, leaf.shape] != leaf.spec for leaf in same)
    if not same:
        return "The mesh stays."
    if moved:
        return f"{moved} of {len(same)} shared arrays move, or nothing would fit."
    return f"The mesh, and the layout of the {len(same)} arrays that both have, stay."


def difference(before: Traced, call: Call) -> str | None:
    """Return the first difference between a call and an earlier traced one.

    None where only static values or the mesh differ, which the user knows.
    """
    now = call.signature()
    if (now.statics, now.static_leaves) != (
        before.signature.statics,
        before.signature.static_leaves,
    ):
        return None
    if now.tree != before.signature.tree:
        is_mode = call.lifted is not None and now.arrays == before.signature.arrays
        if is_mode and call.leaves.paths == before.arguments.paths:
            return None  # an object changed mode, as from training to evaluation
        return "the structure of the arguments is another"
    for path, x, was in zip(
        call.leaves.array_paths,
        call.leaves.arrays,
        before.arguments.arrays,
        strict=True,
    ):
        if array_type(x) != array_type(was):
            return f"`{path}` is {type_text(x)}, was {type_text(was)}"
    return None
