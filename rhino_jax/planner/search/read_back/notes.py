"""Notes of a plan on what is unusual or was left out."""

from __future__ import annotations

from collections.abc import Mapping

from rhino_jax.analysis.padding import padding_notes
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import USERS_CONSTRAINT, Program
from rhino_jax.ir.spec import axes_text
from rhino_jax.plan.decisions import Decisions
from rhino_jax.plan.records import CUT_BY_CLOCK
from rhino_jax.planner.search.records import SolvedMesh


def notes_of(
    target: Target, found: SolvedMesh, decisions: Decisions, unknown: Mapping[str, int]
) -> tuple[str, ...]:
    """Return the notes of the plan of a solved mesh.

    Args:
      target: the hardware.
      found: the solved mesh.
      decisions: the specs of the plan.
      unknown: primitive without a rule → number of ops.
    """
    model = found.mesh_problem.model
    program = model.graph.program
    mesh_axes = tuple((a.name, a.size) for a in model.mesh.axes)
    return (
        *_of_the_search(target, found),
        *padding_notes(program, decisions.values, model.mesh),
        *_without_a_rule(unknown),
        *_by_hand(program, mesh_axes),
        *_constrained(program),
    )


def _of_the_search(target: Target, found: SolvedMesh) -> list[str]:
    model, notes = found.mesh_problem.model, []
    if found.is_fallback:
        notes.append(
            f"{CUT_BY_CLOCK} was over before the search began: this is the best recipe."
        )
    elif found.is_cut or found.mesh_problem.is_cut:
        notes.append(
            f"{CUT_BY_CLOCK} ended the search: with more time, on another machine or"
            " beside other work, another plan may be found."
        )
    idle = (target.num_devices or 0) - model.mesh.num_devices
    if idle > 0:
        notes.append(
            f"the mesh has {model.mesh.num_devices} devices, {target.name}"
            f" {target.num_devices}: {idle} stay idle."
        )
    if model.is_narrowed:
        notes.append(
            "on a mesh of so many axes only what is near to plans with fewer axes was"
            " searched; the gap counts nothing else."
        )
    return notes


def _without_a_rule(unknown: Mapping[str, int]) -> list[str]:
    if not unknown:
        return []
    listed = ", ".join(f"{n} ({c})" for n, c in unknown.items())
    return [f"replicated for want of a rule: {listed}."]


def _constrained(program: Program) -> list[str]:
    """Note that the plan replaces constraints in the program."""
    own = sum(op.name == USERS_CONSTRAINT for op in program.ops)
    if not own:
        return []
    return [
        f"sharding constraints that the program says itself: {own}; the plan takes"
        " their place. Write rhino.pin(x, spec) in its stead where a layout must"
        " stay."
    ]


def _by_hand(program: Program, mesh_axes: tuple[tuple[str, int], ...]) -> list[str]:
    """Note what is not known of code that its user sharded with `shard_map`."""
    notes = []
    for op in program.ops:
        if op.manual is None:
            continue
        axes = axes_text(op.manual.mesh_axes)
        if op.manual.mesh_axes != mesh_axes:
            notes.append(
                f"shard_map at {op.source} is over another mesh ({axes}) than the plan:"
                " its operands are replicated on every device."
            )
        elif not op.manual.is_all_priced:
            notes.append(
                f"not all that shard_map at {op.source} sends itself has a known cost:"
                " its shapes, or its loops, do not tell it."
            )
    return list(dict.fromkeys(notes))
