"""From a divided step, and stages of its forward pass, to tasks of submeshes, and keys
of the values that these read and compute.

Tasks run once a step before, between and after the passes of micro-batches. BETWEEN
tasks compute what couples micro-batches, between all forward and all backward passes.
Every submesh whose backward passes read such values computes them for itself, of
outputs of the forward passes: that is little (embeddings of the batch, sums over it),
and submeshes would else wait for one another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any

from rhino_jax.passes.staged.after import After
from rhino_jax.passes.staged.apart import Apart
from rhino_jax.passes.staged.holding import is_plain, may_wait
from rhino_jax.passes.staged.labels import Labels
from rhino_jax.passes.staged.remat import StagedRemat, applied, offloaded
from rhino_jax.passes.staged.sides import sides_of
from rhino_jax.passes.staged.split_by_label import apart_loops, apart_sums
from rhino_jax.passes.staged.step import (
    StagedStep,
    StagedTask,
    TaskKind,
    TaskSend,
    ValueKey,
    ValueKind,
    received,
)
from rhino_jax.rewrite.flat import FlatRegion
from rhino_jax.rewrite.flatten import flat_region


@dataclass(frozen=True, eq=False)
class ValueNames:
    """Keys of the values of a step, and their types.

    Attributes:
      apart: the step.
      piece: equations of a micro-batch.
      types: abstract values of the keys that were handed out.
    """

    apart: Apart
    piece: FlatRegion
    types: dict[ValueKey, Any] = field(default_factory=dict)

    @cached_property
    def once(self) -> FlatRegion:
        """The program outside of the loop over micro-batches."""
        return _ops_of(self.apart.once)

    @cached_property
    def after(self) -> FlatRegion:
        """The ops of `once` that results of the step depend on."""
        once, apart = self.once, self.apart
        results = once.outputs[len(apart.entering) + len(apart.coupled) :]
        ops = sorted(once.needed(results)[0])
        return replace(once, outputs=results, ops=tuple(once.ops[i] for i in ops))

    @property
    def inputs(self) -> int:
        """Number of inputs of the step."""
        return len(self.once.inputs) - len(self.apart.leaving)

    def _key(self, kind: ValueKind, number: int, aval: Any) -> ValueKey:
        key = ValueKey(kind, number)
        self.types.setdefault(key, aval)
        return key

    def given(self, value: int) -> ValueKey:
        """Return the key of a value, by its id, that is read outside of the loop."""
        at = self.once.place.get(value)
        if at is None:
            return self.made_after(value)
        if at < self.inputs:
            return self._key(ValueKind.INPUT, at, self.once.avals[value])
        return self.left(at - self.inputs)

    def as_read(self, value: int, x: Any) -> Any:
        """Return the array of a value as it is read outside of the loop: accumulated
        outputs converted."""
        at = self.once.place.get(value, -1) - self.inputs
        dtype = self.once.avals[value].dtype
        return x if at < 0 else self.apart.finished(at, x, dtype)

    def entering(self, position: int) -> ValueKey:
        """Return the key of an input of micro-batches, by its position among these."""
        value, count = self.once.outputs[position], len(self.apart.entering)
        if position < count and value in self.once.place:
            return self.given(value)
        aval = self.once.avals[value]
        if position >= count:
            return self._key(ValueKind.COUPLED, position - count, aval)
        return self._key(ValueKind.ENTERING, position, aval)

    def inside(self, value: int) -> ValueKey:
        """Return the key of a value that a micro-batch reads or computes, by its id."""
        at, aval = self.piece.place.get(value), self.piece.avals[value]
        if at is None:
            return self._key(ValueKind.INSIDE, value, aval)
        if at == 0:
            return self._key(ValueKind.PIECE, 0, aval)
        return self.entering(at - 1)

    def left(self, position: int) -> ValueKey:
        """Return the key of an accumulated output of all micro-batches."""
        return self._key(ValueKind.SUM, position, self.apart.sum_type(position))

    def is_left(self, value: int) -> bool:
        """Whether a value outside of the loop is an accumulated output."""
        return self.once.place.get(value, -1) >= self.inputs

    def made_after(self, value: int) -> ValueKey:
        """Return the key of a value computed, or output converted, after the loop."""
        return self._key(ValueKind.AFTER, value, self.once.avals[value])

    def result(self, value: int) -> ValueKey:
        """Return the key of a result of the step."""
        return self.made_after(value) if self.is_left(value) else self.given(value)


@lru_cache(maxsize=8)
def _ops_of(closed: Any) -> FlatRegion:
    """Return `flat_region`; cached, as a step is cut into stages in many ways."""
    return flat_region(closed)


def ahead(
    labels: Labels, names: ValueNames, kind: TaskKind, values: Set[int]
) -> list[StagedTask]:
    """Return the START or BETWEEN task of every submesh.

    Args:
      labels: of micro-batches.
      names: keys of the values of the step.
      kind: of the tasks; START tasks make zeroed sums, too.
      values: inputs of micro-batches that they compute where these are read.
    """
    once, place, found = names.once, labels.region.place, list[StagedTask]()
    for group in range(labels.groups):
        read = {
            v
            for label, reads in enumerate(labels.reads)
            if labels.group(label) == group
            for v in reads & values
        }
        at = sorted(place[v] - 1 for v in read)
        keys = {names.entering(p): once.outputs[p] for p in at if p >= 0}
        gives = {k: v for k, v in keys.items() if k.kind is not ValueKind.INPUT}
        ops, needed = once.needed(gives.values())
        sums = [k for k, at in enumerate(labels.left_at) if labels.group(at) == group]
        sums = sums if kind is TaskKind.START else []
        of = kind, group, 0
        found.append(_task(names, of, once, ops, sorted(needed), gives, sums))
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
      region: the program outside of the loop, or ops of it.
      ops: positions of those of its ops that run.
      reads: ids of the values that they read.
      gives: key → id of a result.
      sums: outputs of micro-batches whose initial values are results as well.
    """

    def run(*arrays: Any) -> list[Any]:
        pairs = zip(reads, arrays, strict=True)
        env = {v: names.as_read(v, x) for v, x in pairs}
        region.run(sorted(ops), env)
        made = [region.result(v, env) for v in gives.values()]
        return [*made, *map(names.apart.start, sums)]

    keys = tuple(map(names.given, reads))
    return StagedTask(*at, keys, (*gives, *map(names.left, sums)), run)


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
    if is_split:
        apart = with_split_loops(apart, stages, group_of)
    labels_of = partial(
        Labels.at,
        stages=stages,
        group_of=group_of,
        is_split=is_split,
        recomputed=remat.chunks,
    )
    while True:
        sides = sides_of(apart)  # with the same forward ops, in the same order
        labels = labels_of(sides, at=apart.at)
        parted = apart_sums(apart, labels)
        if parted is None:
            break
        apart = parted
    sent = offloaded(sides, remat, asked)
    if remat.values:
        sides, again, saved = applied(sides, apart, remat.choice, asked)
        labels = labels_of(sides, remat=again, saved=saved)
    return _step(apart, labels, sent, together)


def with_split_loops(
    apart: Apart, stages: Sequence[int], group_of: Sequence[int] = ()
) -> Apart:
    """Return the step with backward scans split in two, where `is_split` needs it."""
    return apart_loops(apart, Labels.at(sides_of(apart), stages, group_of))


def _step(
    apart: Apart,
    labels: Labels,
    sent: Mapping[int, frozenset[int]],
    together: Sequence[Collection[int]],
) -> StagedStep:
    """Return the tasks of a step whose micro-batches are labelled.

    Args:
      apart: the step.
      labels: of its micro-batches.
      sent: submesh → values of forward passes that it offloads.
      together: as of `staged`.
    """
    names, groups = ValueNames(apart, labels.region), labels.groups
    after = _after(apart, labels, names, together)

    def send(key: ValueKey, at: int, target: int) -> TaskSend:
        """Return how a value that the task of a label computes is sent to a submesh."""
        kind, chunk = _KINDS[labels.turn(at)], labels.chunk(at)
        return TaskSend(key, labels.group(at), target, kind, chunk)

    def sends(middle: Iterable[StagedTask]) -> Iterator[TaskSend]:
        for label, reads in enumerate(labels.reads):
            for v in sorted(reads & labels.made_at.keys()):
                yield send(names.inside(v), labels.made_at[v], labels.group(label))
        # What BETWEEN tasks read of forward passes on other submeshes.
        for task in middle:
            for key in task.reads:
                if key.kind is ValueKind.SUM:
                    yield send(key, labels.left_at[key.number], task.group)
        for s in sorted(after.sent, key=lambda s: (s.round, s.value, s.target)):
            key = names.given(s.value)
            if key.kind is ValueKind.SUM:
                yield send(key, labels.left_at[key.number], s.target)
            else:
                yield TaskSend(key, s.source, s.target, TaskKind.UPDATE, s.round)

    def offloaded_of(group: int, of: Sequence[StagedTask]) -> frozenset[ValueKey]:
        asked = map(names.inside, sent.get(group, ()))
        plain = {key for key in asked if is_plain(names.types[key])}
        return may_wait(of, received(wanted, group)) & plain

    pieces = [_piece(apart, labels, names, label) for label in range(labels.count)]
    forward, back = pieces[: labels.chunks], pieces[labels.chunks :]
    coupled = labels.sides.coupled
    first = ahead(labels, names, TaskKind.START, labels.region.place.keys() - coupled)
    middle = ahead(labels, names, TaskKind.BETWEEN, coupled)
    last = updates(names, after)
    tasks: list[list[StagedTask]] = [[] for _ in range(groups)]
    for task in (*first, *forward, *middle, *back, *last):
        if task.makes:
            tasks[task.group].append(task)
    home, copies = _homes(tasks, names, after)
    # Tasks without results are left out, and so is what is sent to them.
    read = {(key, task.group) for of in tasks for task in of for key in task.reads}
    found: dict[tuple[ValueKey, int], TaskSend] = {}
    for s in sends(middle):
        if s.source != s.target and (s.key, s.target) in read:
            found[s.key, s.target] = s
    wanted = tuple(found.values())
    return StagedStep(
        groups=groups,
        chunks=labels.group_of,
        micro_batches=apart.cut.count,
        tasks=tuple(map(tuple, tasks)),
        sends=wanted,
        home=home,
        copies=copies,
        outputs=tuple(
            names.after.consts[value]
            if value in names.after.consts
            else (after.home(value), names.result(value))
            for value in names.after.outputs
        ),
        types=names.types,
        offloaded=tuple(offloaded_of(*each) for each in enumerate(tasks))
        if sent
        else (),
    )


def _piece(apart: Apart, labels: Labels, names: ValueNames, label: int) -> StagedTask:
    """Return the task of a label."""
    region = labels.region
    equations, gives = labels.ordered(label), labels.gives(label)
    reads, sums = sorted(labels.reads[label]), labels.leaves(label)
    index = region.inputs[0]
    stacks = any(apart.leaving[k].how == "stacked" for k in sums)
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
                apart.combined(
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


def _after(
    apart: Apart,
    labels: Labels,
    names: ValueNames,
    together: Sequence[Collection[int]],
) -> After:
    """Assign what runs after the micro-batches to submeshes: updates to those that read
    the weights."""
    region, place = names.after, labels.region.place
    left = {
        region.inputs[names.inputs + k]: labels.group(at)
        for k, at in enumerate(labels.left_at)
    }
    users = {
        (i, labels.group(label))
        for label, reads in enumerate(labels.reads)
        for v in reads & labels.sides.parameters
        for i in apart.sources[place[v] - 1] - apart.data
    }
    at = dict(sorted(users, reverse=True))  # the first submesh of each input
    for slots in together:
        if read := [at[i] for i in slots if i in at]:
            at = {**dict.fromkeys(slots, min(read)), **at}
    known = {region.inputs[i]: group for i, group in at.items()}
    ties = [
        (v, region.inputs[end.state_of])
        for v, end in zip(region.outputs, apart.cut.program.outputs, strict=True)
        if v not in region.consts and end.state_of is not None
    ]
    return After.of(region, known, left, ties)


def _homes(
    tasks: Iterable[Iterable[StagedTask]], names: ValueNames, after: After
) -> tuple[tuple[int, ...], frozenset[tuple[int, int]]]:
    """Return the submesh of every input, and (input, submesh) of other readers."""
    users = {
        (key.number, group)
        for group, mine in enumerate(tasks)
        for task in mine
        for key in task.reads
        if key.kind is ValueKind.INPUT
    }
    first = dict(sorted(users, reverse=True))
    home = tuple(
        first.get(i, 0) if (wanted := after.homes.get(value)) is None else wanted
        for i, value in enumerate(names.after.inputs[: names.inputs])
    )
    return home, frozenset((i, group) for i, group in users if group != home[i])
