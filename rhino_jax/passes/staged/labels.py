"""At which label every op of a micro-batch runs: chunks forward, then back again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rhino_jax.passes.staged.lines import Lines
from rhino_jax.passes.staged.sides import Sides


def made_at(lines: Lines, of: Sequence[int | None]) -> dict[int, int]:
    """Value → the label of the equation that makes it; none of free ones."""
    return {
        v: label
        for made, label in zip(lines.makes, of, strict=True)
        if label is not None
        for v in made
    }


@dataclass(frozen=True, eq=False)
class Labels:
    """Labels 0 to C - 1 are the chunks' forward passes, C to 2C - 1 the backward passes
    of the same chunks the other way round, and 2C to 3C - 1, where these are split,
    what of them no other chunk waits for, once more the other way round. An op reads
    what has its own label or a lower one.

    The backward pass of a chunk that is recomputed makes again what it reads of the
    forward pass, of what that read: for all in-flight micro-batches only this is kept
    (full activation recomputation: Korthikanti et al. 2022, arXiv:2205.05198). Or it
    does so with some of the values alone (`remade`), of what it reads besides.
    Where what couples micro-batches is made ahead (`twice`), the labels of that come
    before all of these: 0 to C - 1, and the others C higher.

    Attributes:
      sides: of a micro-batch.
      group_of: of every chunk its group.
      of: of every equation its label; None of free ones.
      is_split: whether backward passes are.
      recomputed: chunks whose forward passes run again in their backward passes.
      remade: values of other chunks that are made again there.
      kept: values that are there for that, though nothing else of it reads them.
      is_twice: whether a forward pass is run once more, ahead, up to what couples
        micro-batches.
    """

    sides: Sides
    group_of: tuple[int, ...]
    of: tuple[int | None, ...]
    is_split: bool = False
    recomputed: frozenset[int] = frozenset()
    remade: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()
    is_twice: bool = False

    @classmethod
    def at(
        cls,
        sides: Sides,
        stages: Sequence[int],
        group_of: Sequence[int] = (),
        *,
        is_split: bool = False,
        recomputed: Collection[int] = (),
        remade: Collection[tuple[int, int]] = (),
        kept: Collection[tuple[int, int]] = (),
        at: Sequence[int | None] = (),
    ) -> Labels:
        """Args:
        sides: of a micro-batch.
        stages: of every forward equation its chunk, from 0 on.
        group_of: of every chunk; its own unless said.
        is_split: whether to split backward passes.
        recomputed: chunks whose forward passes run again in their backward passes,
          where these are whole: of a split pass both parts would run them, or the
          second one would wait with all of it in memory.
        remade: (forward equation, by its place among them, which of its results) of
          other chunks, likewise; in each part of a split pass that reads them.
        kept: of what is kept to make these of.
        at: as `Apart.at`. Then what is made of weights alone is made in every chunk
          that reads it: of sequences in slices there would else be a copy of weights.
        """
        assert not (is_split and recomputed), "split passes are not recomputed"
        # The last chunks may have no forward op.
        chunks = max(1 + max(stages, default=0), len(group_of))
        placed = (
            _placed(sides, at)
            if at
            else sides.placed(dict(zip(sides.forward, stages, strict=True)))
        )
        of = [
            s if s is None or not back else 2 * chunks - 1 - s
            for s, back in zip(placed, sides.is_backward, strict=True)
        ]
        is_split = is_split and bool(sides.backward)
        if is_split:
            of = _split(sides.lines, of, chunks)
        groups = tuple(group_of) or tuple(range(chunks))
        values, there = (
            frozenset(sides.lines.makes[sides.forward[k]][j] for k, j in places)
            for places in (remade, kept)
        )
        chosen = frozenset(recomputed)
        return cls(sides, groups, tuple(of), is_split, chosen, values, there)

    def twice(self, early: int) -> Labels:
        """With what couples micro-batches made ahead of all, and again.

        Args:
          early: how many results of a piece are that, the first of them.
        """
        ahead = [self.of[i] for i in sorted(self.sides.ahead)]
        rest = [None if at is None else at + self.chunks for at in self.of]
        sides = self.sides.twice(early)
        return replace(self, sides=sides, of=(*ahead, *rest), is_twice=True)

    @property
    def lines(self) -> Lines:
        return self.sides.lines

    @property
    def count(self) -> int:
        turns = 2 + self.is_split if self.sides.backward else 1
        return (turns + self.is_twice) * self.chunks

    @property
    def chunks(self) -> int:
        return len(self.group_of)

    @property
    def groups(self) -> int:
        return 1 + max(self.group_of)

    def turn(self, label: int) -> int:
        """0 of forward passes, 1 of backward passes, 2 of what is split off these; -1
        of what is ahead."""
        return label // self.chunks - self.is_twice

    def chunk(self, label: int) -> int:
        place = label % self.chunks
        return self.chunks - 1 - place if self.turn(label) > 0 else place

    def group(self, label: int) -> int:
        return self.group_of[self.chunk(label)]

    @cached_property
    def made_at(self) -> dict[int, int]:
        """Value → the label at which it is made; none of free ones."""
        return made_at(self.lines, self.of)

    @cached_property
    def waited_for(self) -> tuple[frozenset[int], frozenset[int]]:
        """Of whole backward passes the equations, and the values, that others need."""
        return _waited_for(self.lines, self.of, self.chunks)

    @cached_property
    def left_at(self) -> tuple[int, ...]:
        """Of everything that a piece leaves, the label at which it does."""
        last = self.chunks - 1
        return tuple(
            last if v is None else self.made_at.get(v, last) for v in self.lines.outputs
        )

    def leaves(self, label: int) -> list[int]:
        """Positions of what a piece leaves at a label."""
        return [k for k, at in enumerate(self.left_at) if at == label]

    @cached_property
    def equations(self) -> tuple[frozenset[int], ...]:
        """Of every label its equations, and among them free ones that it needs, and
        those of its chunk's forward pass that it runs again."""
        found = []
        for label in range(self.count):
            mine = [i for i, at in enumerate(self.of) if at == label]
            wanted = [v for i in mine for v in self.lines.reads[i]]
            wanted += [v for v in self._left(label) if v not in self.made_at]
            more, _ = self.lines.needed(wanted, self._known(label))
            found.append(frozenset({*mine, *more}))
        return tuple(found)

    def ordered(self, label: int) -> list[int]:
        """The equations of a label as they run: what is made again, late."""
        mine = self.equations[label]
        others = {i for i in mine if self.of[i] != label}
        is_again = any(self.of[i] is not None for i in others)
        return self.lines.late(mine, others if is_again else ())

    def _known(self, label: int) -> set[int]:
        """Values that a label makes, or finds made by others."""
        # Callbacks are not in a micro-batch: they run where all of the batch is there.
        known = set(self.made_at)
        if self.turn(label) <= 0:
            return known
        ahead = self.chunk(label) + self.chunks * self.is_twice
        own = {v for v, at in self.made_at.items() if at == ahead}
        if self.chunk(label) in self.recomputed:
            return known - own
        if own.isdisjoint(self.remade):
            return known
        mine = (i for i, at in enumerate(self.of) if at == label)
        read = {v for i in mine for v in self.lines.reads[i]} | {*self._left(label)}
        return known - (own - ((read | self.kept) - self.remade))

    @cached_property
    def reads(self) -> tuple[frozenset[int], ...]:
        """Of every label the values that it reads of inputs and of other labels."""
        found = []
        for label, equations in enumerate(self.equations):
            made = {v for i in equations for v in self.lines.makes[i]}
            read = {v for i in equations for v in self.lines.reads[i]}
            read.update(self._left(label))
            found.append(frozenset(read - made - self.lines.consts.keys()))
        return tuple(found)

    def gives(self, label: int) -> list[int]:
        """What a label makes that others read."""
        others = [reads for at, reads in enumerate(self.reads) if at != label]
        wanted = frozenset[int]().union(*others)
        return sorted(v for v in wanted if self.made_at.get(v) == label)

    def _left(self, label: int) -> list[int]:
        outputs = [self.lines.outputs[k] for k in self.leaves(label)]
        return [v for v in outputs if v is not None]


def _placed(sides: Sides, at: Sequence[int | None]) -> list[int | None]:
    """Of every equation its chunk; where that is not known, and of a backward op never
    after, the earliest of what it reads of its own pass. None of free ones, and of
    those that read weights alone."""
    found: list[int | None] = []
    maker, back, of_weights = sides.lines.maker, sides.is_backward, sides.of_weights
    for i, reads in enumerate(sides.lines.reads):
        if sides.is_free[i] or of_weights.issuperset(sides.lines.makes[i]):
            found.append(None)
            continue
        made = [maker[v] for v in reads if v in maker]
        before = [c for j in made if back[j] == back[i] and (c := found[j]) is not None]
        known = at[i]
        if known is None or back[i]:
            known = min([*before, *(() if known is None else (known,))], default=0)
        found.append(known)
    return found


def _waited_for(
    lines: Lines, of: Sequence[int | None], chunks: int
) -> tuple[frozenset[int], frozenset[int]]:
    """Of backward passes the equations, and the values, that another label needs."""
    made = made_at(lines, of)
    wanted: dict[int, set[int]] = {}
    for reads, label in zip(lines.reads, of, strict=True):
        for v in reads:
            if label is not None and made.get(v, label) != label:
                wanted.setdefault(made[v], set()).add(v)
    equations: set[int] = set()
    values: set[int] = set()
    for label in range(chunks, 2 * chunks):
        known = {v for v, at in made.items() if at != label}
        mine, _ = lines.needed(wanted.get(label, ()), known)
        equations |= {i for i in mine if of[i] == label}
        values |= wanted.get(label, set()).union(*(lines.reads[i] for i in mine))
    return frozenset(equations), frozenset(values)


def _split(lines: Lines, of: Sequence[int | None], chunks: int) -> list[int | None]:
    """Labels with what of backward passes no other label waits for at one of its own:
    gradients of weights, mostly, and what only these read."""
    waited_for, _ = _waited_for(lines, of, chunks)
    return [
        at if at is None or at < chunks or i in waited_for else at + chunks
        for i, at in enumerate(of)
    ]
