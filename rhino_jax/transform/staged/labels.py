"""At which label every op of a micro-batch runs: stages forward, then back again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rhino_jax.transform.staged.lines import Lines
from rhino_jax.transform.staged.sides import Sides


@dataclass(frozen=True, eq=False)
class Labels:
    """Labels 0 to S - 1 are the stages' forward passes, S to 2S - 1 the backward passes
    of the same stages the other way round; an op reads what has its own label or a
    lower one.

    Attributes:
      sides: of a micro-batch.
      groups: S.
      of: of every equation its label; None of free ones.
    """

    sides: Sides
    groups: int
    of: tuple[int | None, ...]

    @classmethod
    def at(cls, sides: Sides, stages: Sequence[int]) -> Labels:
        """Args:
        sides: of a micro-batch.
        stages: of every forward equation, from 0 on.
        """
        groups = 1 + max(stages)
        placed = sides.placed(dict(zip(sides.forward, stages, strict=True)))
        return cls(
            sides,
            groups,
            tuple(
                s if s is None or not back else 2 * groups - 1 - s
                for s, back in zip(placed, sides.is_backward, strict=True)
            ),
        )

    @property
    def lines(self) -> Lines:
        return self.sides.lines

    @property
    def count(self) -> int:
        return 2 * self.groups if self.sides.backward else self.groups

    def is_forward(self, label: int) -> bool:
        return label < self.groups

    def group(self, label: int) -> int:
        return min(label, 2 * self.groups - 1 - label)

    @cached_property
    def made_at(self) -> dict[int, int]:
        """Value → the label at which it is made; none of free ones."""
        return {
            v: label
            for made, label in zip(self.lines.makes, self.of, strict=True)
            if label is not None
            for v in made
        }

    @cached_property
    def left_at(self) -> tuple[int, ...]:
        """Of everything that a piece leaves, the label at which it does."""
        last = self.groups - 1
        return tuple(
            last if v is None else self.made_at.get(v, last) for v in self.lines.outputs
        )

    def leaves(self, label: int) -> list[int]:
        """Positions of what a piece leaves at a label."""
        return [k for k, at in enumerate(self.left_at) if at == label]

    @cached_property
    def equations(self) -> tuple[frozenset[int], ...]:
        """Of every label its equations, free ones that it needs among them."""
        found = []
        for label in range(self.count):
            mine = [i for i, at in enumerate(self.of) if at == label]
            wanted = [v for i in mine for v in self.lines.reads[i]]
            wanted += [v for v in self._left(label) if v not in self.made_at]
            free, _ = self.lines.needed(wanted, self.made_at)
            found.append(frozenset({*mine, *free}))
        return tuple(found)

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
