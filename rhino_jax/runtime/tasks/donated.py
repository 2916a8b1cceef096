"""Choose the arrays that a task donates, and the results that take their buffers."""

from __future__ import annotations

from rhino_jax.passes.staged.group import GroupProgram
from rhino_jax.passes.staged.step import StagedStep, StagedTask, ValueKey, ValueKind


def donated(
    step: StagedStep, of: GroupProgram, task: StagedTask
) -> dict[int, ValueKey]:
    """Return the donated inputs of a task: accumulated sums and replaced state.

    Args:
      step: all tasks of all submeshes.
      of: program of the submesh's tasks.
      task: one of these tasks.
    Returns:
      Position among the arrays that the task reads → the result that takes its buffer.
    """
    replaced = {
        of.arguments[end.state_of]: key
        for key, end in zip(of.results, of.program.outputs, strict=True)
        if end.state_of is not None
    }
    found: dict[int, ValueKey] = {}
    for i, key in enumerate(task.reads):
        made = key if key.kind is ValueKind.SUM else replaced.get(key)
        if made not in task.makes:
            continue
        if key.kind is ValueKind.SUM or _is_free(step, of, task, key):
            found[i] = made
    return found


def _is_free(
    step: StagedStep, of: GroupProgram, task: StagedTask, key: ValueKey
) -> bool:
    """Whether the user donates an input, and nothing reads it later."""
    if key.kind is not ValueKind.INPUT:
        return False
    later = of.tasks[of.tasks.index(task) + 1 :]
    given = any(isinstance(o, tuple) and o[1] == key for o in step.outputs)
    is_read = given or any(key in other.reads for other in later)
    return of.program.inputs[of.arguments.index(key)].is_donated and not is_read
