"""What a function leaves in the objects among its arguments, for one signature."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from rhino_jax.frontend.objects.held import LeafPlace


@dataclass(frozen=True, slots=True)
class Cell:
    """One leaf of what the objects hold in the end.

    Attributes:
      path: tree path.
      place: where in its object it lies.
      reference: number of the reference of which it is the value, if it is one's.
      before: position, among the argument arrays, of the one that it replaces.
      written: position of the result, or of the array after the results, that it is
        given; None: it still is what it was, or no array.
      value: the leaf itself, where it is no array.
    """

    path: str
    place: LeafPlace
    reference: int | None = None
    before: int | None = None
    written: int | None = None
    value: Any = None

    def of(self, before: Sequence[Any], after: Sequence[Any]) -> Any:
        """Its value, given the argument arrays, and all that a run gave."""
        if self.written is not None:
            return after[self.written]
        return self.value if self.before is None else before[self.before]


@dataclass(frozen=True, slots=True)
class Written:
    """What a function leaves in the objects of its arguments, for one signature.

    Attributes:
      held: the objects of Flax NNX in the end, their leaves being `Cell`s.
      cells: the same in a row; then the values of references.
      is_simple: nothing but the arrays of variables has changed, and the result holds
        no objects.
      owned: positions of the argument arrays that objects hold.
      has_states: whether a bare `nnx.State` is an object as well.
    """

    held: Any
    cells: tuple[Cell, ...]
    is_simple: bool
    owned: frozenset[int]
    has_states: bool = False

    def beside(
        self, results: Sequence[Any], after: Sequence[Any]
    ) -> tuple[list[Any], Written]:
        """What is a result as well is given once.

        Args:
          results: the arrays of the result.
          after: those to be written back.
        Returns:
          The arrays that follow the results; and this, its positions counted from the
          first result.
        """
        places = {id(x): k for k, x in enumerate(results)}
        left: list[Any] = []
        moved: list[int] = []
        for x in after:
            place = places.get(id(x))
            moved.append(len(results) + len(left) if place is None else place)
            if place is None:
                left.append(x)
        cells = [
            c if c.written is None else replace(c, written=moved[c.written])
            for c in self.cells
        ]
        held = self.held
        if held is not None:
            of_objects = [c for c in cells if c.reference is None]
            held = jax.tree.unflatten(jax.tree.structure(held), of_objects)
        return left, replace(self, held=held, cells=tuple(cells))

    def paths(self, first: int) -> list[str]:
        """Tree paths of what is written back and is no result.

        Args:
          first: number of results.
        """
        written = {c.written: c.path for c in self.cells if c.written is not None}
        return [f"out: {written[o]}" for o in sorted(written) if o >= first]

    @property
    def replaced(self) -> dict[int, int]:
        """Position of what a run gives → of the argument array replaced."""
        return {
            c.written: c.before
            for c in self.cells
            if c.written is not None and c.before is not None
        }

    @property
    def kept(self) -> frozenset[int]:
        """Positions of the argument arrays that stay what they are."""
        return frozenset(
            c.before for c in self.cells if c.before is not None and c.written is None
        )

    def donated(self, asked: Sequence[bool], tied: Iterable[int]) -> tuple[bool, ...]:
        """Which argument arrays are donated: what is replaced is of no more use.

        Args:
          asked: whether the user donates each.
          tied: positions of those whose replacements may take their place.
        """
        kept, replaced = self.kept, frozenset(tied)
        return tuple(
            (gone or i in replaced) and i not in kept for i, gone in enumerate(asked)
        )
