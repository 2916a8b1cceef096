"""An object as a pytree node, one child per variable, and its final state; JAX's
references (`jax.new_ref`), whose values go in and come out as arrays."""

from __future__ import annotations

import operator
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from rhino_jax._compat import ref_value


@dataclass(frozen=True, slots=True)
class ChildKey:
    """A child's position in its object, as a user writes it: `.layers[0].kernel`."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class LeafPlace:
    """The position of a leaf in an object.

    Attributes:
      path: the keys that lead to it.
      text: the path as a user writes it.
      number: number of its variable among the objects outside the trace; None where it
        is not among them.
    """

    path: tuple[Any, ...]
    text: str
    number: int | None


@dataclass(eq=False, slots=True)
class OpenedObject:
    """An object, split into its structure and its leaves.

    Attributes:
      graphdef: its structure without the arrays; a part of every signature.
      leaves: the values of its variables.
      places: the position of each leaf; empty where `named` was not requested.
    """

    graphdef: Any
    leaves: Sequence[Any]
    places: Sequence[LeafPlace] = ()


def is_held(x: Any) -> bool:
    return isinstance(x, OpenedObject)


def _flatten_with_keys(x: OpenedObject) -> tuple[Any, Any]:
    texts = [p.text for p in x.places] or [f"[{i}]" for i in range(len(x.leaves))]
    keys = [ChildKey(text) for text in texts]
    return list(zip(keys, x.leaves, strict=True)), x.graphdef


jax.tree_util.register_pytree_with_keys(
    OpenedObject,
    _flatten_with_keys,
    lambda graphdef, leaves: OpenedObject(graphdef, list(leaves)),
    operator.attrgetter("leaves", "graphdef"),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One leaf of the objects' final state.

    Attributes:
      path: tree path.
      place: its position in its object.
      reference: number of the reference whose value it is; None for other leaves.
      before: position, among the argument arrays, of the array that it replaces.
      written: position of its array among the results and the arrays after them; None:
        it is unchanged, or no array.
      value: the leaf itself, where it is no array.
    """

    path: str
    place: LeafPlace
    reference: int | None = None
    before: int | None = None
    written: int | None = None
    value: Any = None

    def of(self, before: Sequence[Any], after: Sequence[Any]) -> Any:
        """Return the leaf, given the argument arrays and all results of a run."""
        if self.written is not None:
            return after[self.written]
        return self.value if self.before is None else before[self.before]


@dataclass(frozen=True, slots=True)
class Written:
    """The final state of the objects among a function's arguments, for one signature.

    Attributes:
      held: the final Flax NNX objects, with `Cell`s as leaves.
      cells: these cells in order, then those of references.
      is_simple: whether nothing but the arrays of variables has changed, and the result
        holds no objects.
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
        """Drop arrays to be written back that are results as well.

        Args:
          results: the arrays of the result.
          after: the arrays to be written back.

        Returns:
          The arrays that follow the results; and this object, with positions counted
          from the first result.
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
        """Return the tree paths of the arrays that are written back and are no results.

        Args:
          first: number of results.
        """
        written = {c.written: c.path for c in self.cells if c.written is not None}
        return [f"out: {written[o]}" for o in sorted(written) if o >= first]

    @property
    def replaced(self) -> dict[int, int]:
        """Position of a result of a run → position of the argument array that it
        replaces."""
        return {
            c.written: c.before
            for c in self.cells
            if c.written is not None and c.before is not None
        }

    @property
    def kept(self) -> frozenset[int]:
        """The positions of the argument arrays of unchanged variables."""
        return frozenset(
            c.before for c in self.cells if c.before is not None and c.written is None
        )

    def donated(self, asked: Sequence[bool], tied: Iterable[int]) -> tuple[bool, ...]:
        """Return whether each argument array is donated: an array that is replaced is
        not used again.

        Args:
          asked: whether the user donates each.
          tied: positions of the arrays whose replacements may reuse their memory.
        """
        kept, replaced = self.kept, frozenset(tied)
        return tuple(
            (gone or i in replaced) and i not in kept for i, gone in enumerate(asked)
        )


@dataclass(frozen=True, slots=True)
class Reference:
    """The number of a reference, in place of the structure of an object."""

    number: int


def is_reference(x: Any) -> bool:
    return isinstance(x, jax.Ref)


def has_references(tree: Any) -> bool:
    return any(map(is_reference, jax.tree.leaves(tree)))


def split_references(tree: Any, found: list[Any]) -> Any:
    """Return the tree with every reference replaced by its value.

    Args:
      tree: any pytree, its other objects already split.
      found: extended by the references; one that occurs again has no leaves.
    """
    numbers: dict[int, int] = {}

    def one(x: Any) -> Any:
        if is_held(x):
            leaves = [jax.tree.map(one, leaf) for leaf in x.leaves]
            return OpenedObject(x.graphdef, leaves, x.places)
        if not is_reference(x):
            return x
        if id(x) in numbers:
            return OpenedObject(Reference(numbers[id(x)]), [])
        numbers[id(x)] = len(found)
        found.append(x)
        place = LeafPlace((), "", None)
        return OpenedObject(Reference(numbers[id(x)]), [ref_value(x)], [place])

    if not has_references(tree):
        return tree
    return jax.tree.map(one, tree, is_leaf=is_held)


def merge_references(tree: Any, made: MutableMapping[int, Any]) -> Any:
    """Return the tree with references built from their values.

    Args:
      tree: a tree that `split_references` returned.
      made: filled: number → (value, reference).
    """

    def one(x: Any) -> Any:
        if not is_held(x):
            return x
        if not isinstance(x.graphdef, Reference):
            leaves = [jax.tree.map(one, leaf, is_leaf=is_held) for leaf in x.leaves]
            return OpenedObject(x.graphdef, leaves, x.places)
        number = x.graphdef.number
        if number not in made:
            made[number] = (x.leaves[0], jax.new_ref(x.leaves[0]))
        return made[number][1]

    return jax.tree.map(one, tree, is_leaf=is_held)
