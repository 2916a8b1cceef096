"""Tasks that run once a step: before, between and after the passes of micro-batches.

BETWEEN tasks compute what couples micro-batches, between all forward and all backward
passes. Every submesh whose backward passes read such values computes them for itself,
of outputs of the forward passes: that is little (embeddings of the batch, sums over
it), and submeshes would else wait for one another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rhino_jax.passes.staged.after import After
from rhino_jax.passes.staged.labels import Labels
from rhino_jax.passes.staged.names import ValueNames
from rhino_jax.passes.staged.step import StagedTask, TaskKind, ValueKey
from rhino_jax.rewrite.flat import FlatRegion


def starts(labels: Labels, names: ValueNames) -> list[StagedTask]:
    """Return the START task of every submesh: its entering values and zeroed sums.

    Args:
      labels: of micro-batches.
      names: keys of the values of the step.
    """
    before, place = names.before, labels.region.place
    read = _read_by_groups(labels, place.keys() - labels.sides.coupled)
    found = []
    for group in range(labels.groups):
        entering = sorted(place[v] - 1 for v in read[group])
        made = [p for p in entering if p >= 0 and before.outputs[p] not in before.place]
        gives = {names.entering(p): before.outputs[p] for p in made}
        ops, needed = before.needed(gives.values())
        sums = [k for k, at in enumerate(labels.left_at) if labels.group(at) == group]
        at = TaskKind.START, group, 0
        found.append(_task(names, at, before, ops, sorted(needed), gives, sums))
    return found


def between(labels: Labels, names: ValueNames) -> list[StagedTask]:
    """Return the BETWEEN tasks, one for every submesh that reads coupled values.

    Args:
      labels: of micro-batches.
      names: keys of the values of the step.
    """
    region, first = names.between, 1 + len(names.apart.entering)
    found = []
    for group, values in enumerate(_read_by_groups(labels, labels.sides.coupled)):
        made = [labels.region.place[v] - first for v in sorted(values)]
        if made:
            gives = {names.coupled(p): region.outputs[p] for p in made}
            ops, needed = region.needed(gives.values())
            at = TaskKind.BETWEEN, group, 0
            found.append(_task(names, at, region, ops, sorted(needed), gives))
    return found


def updates(names: ValueNames, after: After) -> list[StagedTask]:
    """Return the UPDATE tasks, in the order of their rounds.

    Args:
      names: keys of the values of the step.
      after: which ops run where.
    """
    region = names.after
    results = {*region.outputs}
    # An accumulated output may be a result itself, up to its type.
    left = {v for v in results if names.is_left(v)}
    turns = {*after.equations, *((after.home(v), 0) for v in left)}
    found = []
    for group, turn in sorted(turns, key=lambda at: (at[1], at[0])):
        finished = {v for v in left if turn == 0 and after.home(v) == group}
        ops = after.equations.get((group, turn), set())
        wanted = results | {s.value for s in after.sent if s.source == group}
        for (other, later), more in after.equations.items():
            if other == group and later > turn:
                wanted |= region.read_by(more)
        made = region.made_by(ops)
        reads = sorted((region.read_by(ops) | finished) - made)
        gives = {names.made_after(v): v for v in sorted((made & wanted) | finished)}
        at = TaskKind.UPDATE, group, turn
        found.append(_task(names, at, region, ops, reads, gives))
    return found


def _read_by_groups(labels: Labels, values: Collection[int]) -> list[set[int]]:
    """Return for every submesh which of some values its micro-batches read."""
    found: list[set[int]] = [set() for _ in range(labels.groups)]
    for label, reads in enumerate(labels.reads):
        found[labels.group(label)] |= reads & frozenset(values)
    return found


def _task(
    names: ValueNames,
    at: tuple[TaskKind, int, int],
    region: FlatRegion,
    ops: Collection[int],
    reads: Sequence[int],
    gives: Mapping[ValueKey, int],
    sums: Sequence[int] = (),
) -> StagedTask:
    """Return a task of ops outside of the loop over micro-batches.

    Args:
      names: keys of the values of the step.
      at: kind, submesh and round of the task.
      region: the program before, between or after the loop.
      ops: positions of those of its ops that run.
      reads: ids of the values that they read.
      gives: key → id of a result.
      sums: outputs of micro-batches whose initial values are results as well.
    """

    def run(*arrays: Any) -> list[Any]:
        pairs = zip(reads, arrays, strict=True)
        env = {v: names.as_read(region, v, x) for v, x in pairs}
        region.run(sorted(ops), env)
        made = [region.result(v, env) for v in gives.values()]
        return [*made, *map(names.apart.start, sums)]

    keys = tuple(names.given(region, v) for v in reads)
    return StagedTask(*at, keys, (*gives, *map(names.left, sums)), run)
