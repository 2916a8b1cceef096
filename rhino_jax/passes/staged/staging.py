"""From a divided step, and stages of its forward pass, to tasks of submeshes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rhino_jax.ir.congruence import pair_regions
from rhino_jax.passes.staged.after import After
from rhino_jax.passes.staged.apart import Apart
from rhino_jax.passes.staged.holding import is_plain, may_wait
from rhino_jax.passes.staged.labels import Labels
from rhino_jax.passes.staged.loops import apart_loops
from rhino_jax.passes.staged.names import ValueNames
from rhino_jax.passes.staged.once import between, starts, updates
from rhino_jax.passes.staged.remat import StagedRemat, applied, offloaded
from rhino_jax.passes.staged.shared_sums import apart_sums
from rhino_jax.passes.staged.sides import Sides, sides_of
from rhino_jax.passes.staged.step import (
    StagedStep,
    StagedTask,
    TaskKind,
    TaskSend,
    ValueKey,
    ValueKind,
    received,
)


_KINDS = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.WEIGHT_GRADIENT
"""Task kinds by the turn of a label."""

NOTHING = StagedRemat()
"""Nothing is recomputed: all residuals are saved."""


def staged(
    apart: Apart,
    stages: Sequence[int],
    group_of: Sequence[int] = (),
    *,
    is_split: bool = False,
    remat: StagedRemat = NOTHING,
    together: Sequence[Collection[int]] = (),
) -> StagedStep:
    """Return the tasks of a step.

    Args:
      apart: the step.
      stages: for every forward equation (`Sides.forward`) its chunk, from 0 on; each
        reads only values of its own chunk or an earlier one.
      group_of: for every chunk its submesh; empty: each chunk has its own.
      is_split: whether what no other task waits for of backward passes is in WEIGHTS
        tasks.
      remat: what backward passes recompute, and which residuals are offloaded to host
        memory; where backward passes are split, no whole passes, and nothing that scans
        stack.
      together: positions of the step's inputs that lie on one submesh: a weight, and
        its optimizer state (`Unstacked.together`).
    """
    asked = sides_of(apart)
    sides = asked
    if is_split:
        apart = with_split_loops(apart, stages, group_of)
        sides = sides_of(apart)
        stages = _stages_of(sides, asked, stages)
    while True:
        labels = Labels.at(
            sides,
            stages,
            group_of,
            is_split=is_split,
            recomputed=remat.chunks,
            at=apart.at,
        )
        parted = apart_sums(apart, labels)
        if parted is None:
            break
        apart, before = parted, sides
        sides = sides_of(apart)
        # `apart.at`, where there is one, has the chunk of every equation.
        stages = stages if apart.at else _stages_of(sides, before, stages)
    sent = offloaded(sides, remat, asked)
    if remat.values:
        sides, again, saved = applied(sides, apart, remat.choice, asked)
        labels = Labels.at(
            sides,
            stages,
            group_of,
            is_split=is_split,
            recomputed=remat.chunks,
            remat=again,
            saved=saved,
        )
    names = ValueNames(apart, labels.region)
    return _Staging(apart, labels, names, sent, tuple(together)).step()


def _stages_of(sides: Sides, before: Sides, stages: Sequence[int]) -> list[int]:
    """Return the chunk of every forward equation of a retraced micro-batch.

    Args:
      sides: of the micro-batch as it is now.
      before, stages: of the micro-batch before, and for its forward equations their
        chunks.
    """
    ids: dict[int, int] = {}
    now, then = sides.program, before.program
    pair_regions(now, now.body, then, then.body, ids)
    known: dict[int, int] = {}
    for i, chunk in zip(before.forward, stages, strict=True):
        known.update(dict.fromkeys(before.region.makes[i], chunk))
    of_value: dict[int, int] = {}
    found = []
    for i in sides.forward:
        makes = sides.region.makes[i]
        read = max((of_value.get(v, 0) for v in sides.region.reads[i]), default=0)
        chunk = max((known.get(ids.get(v, -1), read) for v in makes), default=read)
        found.append(chunk)
        of_value.update(dict.fromkeys(makes, chunk))
    return found


def with_split_loops(
    apart: Apart, stages: Sequence[int], group_of: Sequence[int] = ()
) -> Apart:
    """Return the step with backward scans split in two, where `is_split` needs it."""
    return apart_loops(apart, Labels.at(sides_of(apart), stages, group_of))


@dataclass(frozen=True, eq=False)
class _Staging:
    apart: Apart
    labels: Labels
    names: ValueNames
    sent: Mapping[int, frozenset[int]]
    together: tuple[Collection[int], ...]

    def step(self) -> StagedStep:
        names, groups = self.names, self.labels.groups
        pieces = [self._piece(label) for label in range(self.labels.count)]
        forward, back = pieces[: self.labels.chunks], pieces[self.labels.chunks :]
        first, last = starts(self.labels, names), updates(names, self.after)
        middle = between(self.labels, names)
        tasks: list[list[StagedTask]] = [[] for _ in range(groups)]
        for task in (*first, *forward, *middle, *back, *last):
            if task.makes:
                tasks[task.group].append(task)
        home, copies = self._homes(tasks)
        sends = (*self._sends(), *self._sends_between(middle), *self._sends_after())
        # Tasks without results are left out, and so is what is sent to them.
        read = {(key, task.group) for of in tasks for task in of for key in task.reads}
        sent = {(s.key, s.target): s for s in sends if (s.key, s.target) in read}
        return StagedStep(
            groups=groups,
            chunks=self.labels.group_of,
            micro_batches=self.apart.cut.count,
            tasks=tuple(map(tuple, tasks)),
            sends=tuple(sent.values()),
            home=home,
            copies=copies,
            outputs=tuple(
                names.after.consts[value]
                if value in names.after.consts
                else (self.after.home(value), names.result(value))
                for value in names.after.outputs
            ),
            types=names.types,
            offloaded=self._offloaded(tasks, tuple(sent.values())),
        )

    def _offloaded(
        self, tasks: Iterable[Sequence[StagedTask]], sends: Sequence[TaskSend]
    ) -> tuple[frozenset[ValueKey], ...]:
        if not self.sent:
            return ()
        names = self.names
        asked = [
            {
                key
                for key in map(names.inside, self.sent.get(group, ()))
                if is_plain(names.types[key])
            }
            for group in range(self.labels.groups)
        ]
        return tuple(
            may_wait(of, received(sends, group)) & asked[group]
            for group, of in enumerate(tasks)
        )

    def _piece(self, label: int) -> StagedTask:
        names, labels, region = self.names, self.labels, self.labels.region
        equations, gives = labels.ordered(label), labels.gives(label)
        reads, sums = sorted(labels.reads[label]), labels.leaves(label)
        index = region.inputs[0]
        stacks = any(self.apart.leaving[k].how == "stacked" for k in sums)
        if stacks and index not in reads:
            reads = [index, *reads]

        forward = labels.sides.forward if labels.turn(label) == 0 else ()
        tags = {i: str(k) for k, i in enumerate(forward)}

        def run(*arrays: Any) -> list[Any]:
            env = dict(zip(reads, arrays, strict=False))
            region.run(equations, env, tags)
            so_far = zip(sums, arrays[len(reads) :], strict=True)
            return [
                *(env[v] for v in gives),
                *(
                    self.apart.combined(
                        k, x, region.result(region.outputs[k], env), env.get(index)
                    )
                    for k, x in so_far
                ),
            ]

        return StagedTask(
            _KINDS[labels.turn(label)],
            labels.group(label),
            labels.chunk(label),
            (*map(names.inside, reads), *map(names.left, sums)),
            (*map(names.inside, gives), *map(names.left, sums)),
            run,
        )

    def _send(self, key: ValueKey, at: int, target: int) -> TaskSend:
        """Return how a value that the task of a label computes is sent to a submesh."""
        labels = self.labels
        kind, chunk = _KINDS[labels.turn(at)], labels.chunk(at)
        return TaskSend(key, labels.group(at), target, kind, chunk)

    def _sends(self) -> list[TaskSend]:
        labels = self.labels
        found: dict[tuple[ValueKey, int], TaskSend] = {}
        for label, reads in enumerate(labels.reads):
            target = labels.group(label)
            for v in sorted(reads & labels.made_at.keys()):
                at, key = labels.made_at[v], self.names.inside(v)
                if labels.group(at) != target:
                    found.setdefault((key, target), self._send(key, at, target))
        return list(found.values())

    def _sends_between(self, tasks: Iterable[StagedTask]) -> Iterator[TaskSend]:
        """Yield what BETWEEN tasks read of forward passes on other submeshes."""
        for task in tasks:
            for key in task.reads:
                if key.kind is ValueKind.SUM:
                    at = self.labels.left_at[key.number]
                    if self.labels.group(at) != task.group:
                        yield self._send(key, at, task.group)

    @cached_property
    def after(self) -> After:
        names, labels, apart = self.names, self.labels, self.apart
        region, place = names.after, labels.region.place
        left = {
            region.inputs[names.inputs + k]: labels.group(at)
            for k, at in enumerate(labels.left_at)
        }
        users: dict[int, set[int]] = {}
        for label, reads in enumerate(labels.reads):
            for v in reads & labels.sides.parameters:
                for i in apart.sources[place[v] - 1] - apart.data:
                    users.setdefault(i, set()).add(labels.group(label))
        at = {i: min(of) for i, of in users.items()}
        for slots in self.together:
            if read := [at[i] for i in slots if i in at]:
                at = {**dict.fromkeys(slots, min(read)), **at}
        known = {region.inputs[i]: group for i, group in at.items()}
        ties = [
            (v, region.inputs[end.state_of])
            for v, end in zip(region.outputs, apart.cut.program.outputs, strict=True)
            if v not in region.consts and end.state_of is not None
        ]
        return After.of(region, known, left, ties)

    def _sends_after(self) -> Iterator[TaskSend]:
        for sent in sorted(self.after.sent, key=lambda s: (s.round, s.value, s.target)):
            key = self.names.given(self.names.after, sent.value)
            if key.kind is ValueKind.SUM:
                yield self._send(key, self.labels.left_at[key.number], sent.target)
            else:
                of = sent.source, sent.target
                yield TaskSend(key, *of, TaskKind.UPDATE, sent.round)

    def _homes(
        self, tasks: Iterable[Iterable[StagedTask]]
    ) -> tuple[tuple[int, ...], frozenset[tuple[int, int]]]:
        """Return the submesh of every input, and (input, submesh) of other readers."""
        users: dict[int, set[int]] = {}
        for group, mine in enumerate(tasks):
            for key in (k for task in mine for k in task.reads):
                if key.kind is ValueKind.INPUT:
                    users.setdefault(key.number, set()).add(group)
        home = []
        for i, value in enumerate(self.names.after.inputs[: self.names.inputs]):
            wanted = self.after.homes.get(value)
            home.append(min(users.get(i, {0})) if wanted is None else wanted)
        return tuple(home), frozenset(
            (i, g) for i, groups in users.items() for g in groups if g != home[i]
        )
