"""UPDATE tasks, after the micro-batches: what each submesh runs in each round."""

from __future__ import annotations

from typing import Any

from rhino_jax._compat import hide_frames
from rhino_jax.passes.staged.after import After
from rhino_jax.passes.staged.apart import Apart
from rhino_jax.passes.staged.names import ValueNames
from rhino_jax.passes.staged.step import StagedTask, TaskKind


hide_frames(__file__)


def updates(apart: Apart, names: ValueNames, after: After) -> list[StagedTask]:
    """Return the UPDATE tasks, in the order of their rounds.

    Args:
      apart: the step.
      names: keys of its values.
      after: which equations run where.
    """
    results = {*names.after.outputs}
    # An accumulated output may be a result itself, up to its type.
    left = {v for v in results if names.is_left(v)}
    turns = {*after.equations, *((after.home(v), 0) for v in left)}
    found = []
    for group, turn in sorted(turns, key=lambda at: (at[1], at[0])):
        finished = {v for v in left if turn == 0 and after.home(v) == group}
        found.append(_update(apart, names, after, group, turn, results, finished))
    return found


def _update(
    apart: Apart,
    names: ValueNames,
    after: After,
    group: int,
    turn: int,
    results: set[int],
    finished: set[int],
) -> StagedTask:
    lines = names.after
    equations = after.equations.get((group, turn), set())
    made = {v for i in equations for v in lines.makes[i]}
    read = {v for i in equations for v in lines.reads[i]}
    reads = sorted((read | finished) - made - lines.consts.keys())
    wanted = results | {s.value for s in after.sent if s.source == group}
    for (other, later), more in after.equations.items():
        if other == group and later > turn:
            wanted = wanted.union(*(lines.reads[i] for i in more))
    gives = sorted((made & wanted) | finished)

    def run(*arrays: Any) -> list[Any]:
        env = {}
        for v, x in zip(reads, arrays, strict=True):
            if names.is_left(v):
                position = names.of_after[v] - names.inputs
                x = apart.finished(position, x, lines.avals[v].dtype)
            env[v] = x
        lines.run(sorted(equations), env)
        return [env[v] for v in gives]

    return StagedTask(
        TaskKind.UPDATE,
        group,
        turn,
        tuple(map(names.read_after, reads)),
        tuple(map(names.made_after, gives)),
        run,
    )
