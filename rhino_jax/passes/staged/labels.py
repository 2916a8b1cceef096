"""The label (chunk and direction) at which every op of a micro-batch runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rhino_jax.passes.staged.sides import Sides
from rhino_jax.rewrite.flat import FlatRegion


@dataclass(frozen=True, eq=False)
class Labels:
    """Labels of a micro-batch's equations, in the order in which they may run.

    Labels 0 to C - 1 are the chunks' forward passes, C to 2C - 1 the backward passes of
    the same chunks in reverse order, and 2C to 3C - 1, where backward passes are split,
    the part of them that no other chunk waits for, again in reverse order. An op reads
    values of its own label or a lower one.

    The backward pass of a chunk that is recomputed recomputes what it reads of its
    forward pass from that pass's inputs: for in-flight micro-batches only these are
    saved (full activation recomputation: Korthikanti et al. 2022, arXiv:2205.05198). Or
    it recomputes some of the values alone (`remat`), from what it reads anyway.

    Attributes:
      sides: of a micro-batch.
      group_of: for every chunk its submesh.
      of: for every equation its label; None of free ones.
      is_split: whether backward passes are split.
      recomputed: chunks whose forward passes run again in their backward passes.
      remat: values of other chunks that are recomputed there.
      saved: values that are saved to recompute these, though nothing else of the
        backward pass reads them.
    """

    sides: Sides
    group_of: tuple[int, ...]
    of: tuple[int | None, ...]
    is_split: bool = False
    recomputed: frozenset[int] = frozenset()
    remat: frozenset[int] = frozenset()
    saved: frozenset[int] = frozenset()

    @classmethod
    def at(
        cls,
        sides: Sides,
        stages: Sequence[int],
        group_of: Sequence[int] = (),
        *,
        is_split: bool = False,
        recomputed: Collection[int] = (),
        remat: Collection[int] = (),
        saved: Collection[int] = (),
        at: Sequence[int | None] = (),
    ) -> Labels:
        """Label the equations, given the chunks of the forward ones.

        Args:
          sides: of a micro-batch.
          stages: for every forward equation its chunk, from 0 on.
          group_of: for every chunk its submesh; empty: each chunk has its own.
          is_split: whether to split backward passes.
          recomputed: chunks whose forward passes run again in their backward passes,
            where these are whole: of a split pass both parts would run them, or the
            second one would wait with all of it in memory.
          remat: values of other chunks to recompute, in each part of a split pass that
            reads them.
          saved: values saved to recompute these.
          at: as `Apart.at`. Then equations on weights alone run in every chunk that
            reads them: of sequences in slices there would else be a copy of weights.
        """
        assert not (is_split and recomputed), "split passes are not recomputed"
        # The last chunks may have no forward op of their own.
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
        groups = tuple(group_of) or tuple(range(chunks))
        chosen, values, there = map(frozenset, (recomputed, remat, saved))
        labels = cls(sides, groups, tuple(of), False, chosen, values, there)
        return labels.split() if is_split and sides.backward else labels

    def split(self) -> Labels:
        """Move what no other label waits for of backward passes to labels of its own.

        That is gradients of weights, mostly, and what only these read.
        """
        chunks, waited_for = self.chunks, self.waited_for[0]
        of = tuple(
            at if at is None or at < chunks or i in waited_for else at + chunks
            for i, at in enumerate(self.of)
        )
        return replace(self, of=of, is_split=True)

    @property
    def region(self) -> FlatRegion:
        return self.sides.region

    @property
    def count(self) -> int:
        return (2 + self.is_split if self.sides.backward else 1) * self.chunks

    @property
    def chunks(self) -> int:
        return len(self.group_of)

    @property
    def groups(self) -> int:
        return 1 + max(self.group_of)

    def turn(self, label: int) -> int:
        """Return a label's pass: 0 forward, 1 backward, 2 split off that."""
        return label // self.chunks

    def chunk(self, label: int) -> int:
        place = label % self.chunks
        return self.chunks - 1 - place if self.turn(label) > 0 else place

    def group(self, label: int) -> int:
        return self.group_of[self.chunk(label)]

    @cached_property
    def made_at(self) -> dict[int, int]:
        """Value → the label at which it is computed; none for free ops."""
        pairs = zip(self.region.makes, self.of, strict=True)
        return {v: at for made, at in pairs if at is not None for v in made}

    def _made(self, label: int) -> set[int]:
        """Return the values that a label computes."""
        return {v for v, at in self.made_at.items() if at == label}

    @cached_property
    def waited_for(self) -> tuple[frozenset[int], frozenset[int]]:
        """Ops, and values, of whole backward passes that other labels need."""
        region, made = self.region, self.made_at
        wanted = {
            v
            for reads, label in zip(region.reads, self.of, strict=True)
            for v in reads
            if label is not None and made.get(v, label) != label
        }
        ops, values = set[int](), set[int]()
        for label in range(self.chunks, 2 * self.chunks):
            own = self._made(label)
            mine, _ = region.needed(wanted & own, made.keys() - own)
            ops |= {i for i in mine if self.of[i] == label}
            values |= (wanted & own) | region.read_by(mine)
        return frozenset(ops), frozenset(values)

    @cached_property
    def left_at(self) -> tuple[int, ...]:
        """Labels at which each output of a micro-batch is produced."""
        return tuple(self.made_at.get(v, self.chunks - 1) for v in self.region.outputs)

    def leaves(self, label: int) -> list[int]:
        """Return positions of the outputs that a micro-batch produces at a label."""
        return [k for k, at in enumerate(self.left_at) if at == label]

    @cached_property
    def equations(self) -> tuple[frozenset[int], ...]:
        """Equations of every label.

        Among them are free ones that it needs, and those of its chunk's forward pass
        that it runs again.
        """
        found = []
        for label in range(self.count):
            mine = {i for i, at in enumerate(self.of) if at == label}
            wanted = self.region.read_by(mine)
            wanted |= {v for v in self._left(label) if v not in self.made_at}
            more, _ = self.region.needed(wanted, self._known(label))
            found.append(frozenset(mine | more))
        return tuple(found)

    def ordered(self, label: int) -> list[int]:
        """Return a label's equations in order of execution: recomputed ones late."""
        mine = self.equations[label]
        others = {i for i in mine if self.of[i] != label}
        is_again = any(self.of[i] is not None for i in others)
        return self.region.late(mine, others if is_again else ())

    def _known(self, label: int) -> set[int]:
        """Return the values that a label does not recompute.

        Its own equations compute them, or they are saved or received.
        """
        # Micro-batches have no callbacks: these run where the whole batch is available.
        known = set(self.made_at)
        if self.turn(label) == 0:
            return known
        own = self._made(self.chunk(label))
        if self.chunk(label) in self.recomputed:
            return known - own
        if own.isdisjoint(self.remat):
            return known
        mine = (i for i, at in enumerate(self.of) if at == label)
        read = self.region.read_by(mine) | {*self._left(label)}
        return known - (own - ((read | self.saved) - self.remat))

    @cached_property
    def reads(self) -> tuple[frozenset[int], ...]:
        """Values that every label reads of inputs and of other labels."""
        found = []
        for label, equations in enumerate(self.equations):
            read = self.region.read_by(equations) | {*self._left(label)}
            made = self.region.made_by(equations)
            found.append(frozenset(read - made - self.region.consts.keys()))
        return tuple(found)

    def gives(self, label: int) -> list[int]:
        """Return the values of a label that others read."""
        others = [reads for at, reads in enumerate(self.reads) if at != label]
        wanted = frozenset[int]().union(*others)
        return sorted(v for v in wanted if self.made_at.get(v) == label)

    def _left(self, label: int) -> list[int]:
        return [self.region.outputs[k] for k in self.leaves(label)]


def _placed(sides: Sides, at: Sequence[int | None]) -> list[int | None]:
    """Return the chunk of every equation; None if free or of weights alone.

    Where a chunk is not known, it is the earliest one of what the equation reads of its
    own pass; a backward op runs at no later chunk than that.
    """
    found: list[int | None] = []
    maker, back, of_weights = sides.region.maker, sides.is_backward, sides.of_weights
    for i, reads in enumerate(sides.region.reads):
        if sides.is_free[i] or of_weights.issuperset(sides.region.makes[i]):
            found.append(None)
            continue
        made = [maker[v] for v in reads if v in maker]
        before = [c for j in made if back[j] == back[i] and (c := found[j]) is not None]
        known = at[i]
        if known is None or back[i]:
            known = min([*before, *(() if known is None else (known,))], default=0)
        found.append(known)
    return found
