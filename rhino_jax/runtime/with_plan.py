"""Run a function by an existing plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rhino_jax.frontend.parameters import Parameters, read_parameters
from rhino_jax.frontend.trace import Traced
from rhino_jax.passes.apply import apply_passes
from rhino_jax.plan.fingerprint import fingerprint
from rhino_jax.plan.fits import check_fits
from rhino_jax.plan.lines import with_lines
from rhino_jax.plan.plan import AnyPlan
from rhino_jax.plan.trees import on_mesh
from rhino_jax.runtime.meshes import axes_of_mesh, make_mesh
from rhino_jax.runtime.processes.agree import agreed, processes_of_mesh
from rhino_jax.runtime.sharded import ShardedFunction


def jit_with_plan(
    fn: Callable[..., Any], plan: AnyPlan, **options: Any
) -> ShardedFunction[AnyPlan]:
    """Return `fn` as a function that runs by an existing plan.

    Args:
      fn: the function that was planned, or one that `auto_shard` made.
      plan: its plan; without a mesh, one is made of the present devices.
      options: `donate_argnums`, `donate_argnames`, `static_argnums`,
        `static_argnames`, as in `jax.jit`.
    Raises:
      PlanFileError: on the first call, if the plan is of another program.
    """
    what = "`plan.jit`"
    if isinstance(fn, ShardedFunction) and not options:
        parameters = fn.parameters
    else:
        raw = fn.parameters.fn if isinstance(fn, ShardedFunction) else fn
        parameters = read_parameters(raw, **options, what=what)
    return sharded_by(parameters, plan, what)


def sharded_by(
    parameters: Parameters, plan: AnyPlan, what: str
) -> ShardedFunction[AnyPlan]:
    """Return the function of `parameters` under a plan; see `jit_with_plan`."""
    mesh = plan.mesh if plan.mesh is not None else make_mesh(plan.mesh_axes, what)
    planner = functools.partial(_fitted, plan, what)
    return ShardedFunction(parameters, planner, mesh, what, plans=False)


def _fitted(
    plan: AnyPlan, what: str, traced: Traced, mesh: Any, before: AnyPlan | None
) -> AnyPlan:
    """Return an existing plan, once checked, as a `Planner` does."""
    axes = axes_of_mesh(mesh)
    found = fingerprint(traced.program, axes)
    check_fits(plan, found, axes, program=traced.program, what=what)
    agreed(traced, processes_of_mesh(mesh), plan, what)
    return with_trees(plan, traced, mesh)


def with_trees(plan: AnyPlan, traced: Traced, mesh: Any) -> AnyPlan:
    """Return the plan on a mesh, with the function's trees and source lines."""
    in_tree, in_leaf_positions = traced.in_tree
    out_tree, out_leaf_positions = traced.out_tree
    return replace(
        on_mesh(with_lines(plan, apply_passes(traced, plan.transforms).program), mesh),
        in_tree=in_tree,
        out_tree=out_tree,
        in_leaf_positions=in_leaf_positions,
        out_leaf_positions=out_leaf_positions,
        traced=None if traced.has_captured_tracers else traced,
    )
