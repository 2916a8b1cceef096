"""How a group holds what passes from task to task."""

from __future__ import annotations

from rhino_jax.ir.spec import Spec, replicated
from rhino_jax.plan.decisions import Decisions
from rhino_jax.transform.staged.group import GroupProgram
from rhino_jax.transform.staged.step import Key


def held_specs(of: GroupProgram, decisions: Decisions) -> dict[Key, Spec]:
    """The specs of a group's arguments, and of all that its tasks make.

    Args:
      of: the group's tasks as one program.
      decisions: of a plan of that program.
    """
    program = of.program
    values = dict(
        zip(of.arguments, (entry.value for entry in program.inputs), strict=True)
    )
    for task, op_id in zip(of.tasks, program.body.ops, strict=True):
        values.update(zip(task.makes, program.ops[op_id].results, strict=True))
    found = {}
    for key, value in values.items():
        rank, spec = program.values[value].rank, decisions.values.get(value)
        is_said = spec is not None and len(spec) == rank
        found[key] = spec if is_said and spec is not None else replicated(rank)
    # What leaves the group leaves it as the plan's results are.
    found.update(zip(of.results, decisions.outputs, strict=True))
    return found
