"""A call on objects that change in place, as a pure call and a write-back.

`lift` takes the objects of one call apart, so that all else sees arrays. `Lifted.call`
runs the user's function inside of the trace, on objects made of these arrays, and says
in a `Written` what they hold in the end. `Lifted.finish` gives the user's own objects
what a run gave.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from rhino_jax.frontend.leaves import Leaves, is_array, is_python_scalar
from rhino_jax.frontend.objects import nnx_graph
from rhino_jax.frontend.objects.held import Key, Place, is_held


@dataclass(frozen=True, slots=True)
class Cell:
    """One leaf of what the objects hold in the end.

    Attributes:
      path: tree path.
      place: where in its object it lies.
      before: position, among the argument arrays, of the one that it replaces.
      written: position among the arrays to be written back; None: it still is what
        it was, or no array.
      value: the leaf itself, where it is no array.
    """

    path: str
    place: Place
    before: int | None = None
    written: int | None = None
    value: Any = None

    def of(self, before: Sequence[Any], after: Sequence[Any]) -> Any:
        """Its value, given the argument arrays and those to be written back."""
        if self.written is not None:
            return after[self.written]
        return self.value if self.before is None else before[self.before]


@dataclass(frozen=True, slots=True)
class Written:
    """What a function leaves in the objects of its arguments, for one signature.

    Attributes:
      held: the objects in the end, their leaves being `Cell`s.
      cells: the same in a row.
      is_simple: nothing but the arrays of variables has changed, and the result holds
        no objects.
      owned: positions of the argument arrays that objects hold.
    """

    held: Any
    cells: tuple[Cell, ...]
    is_simple: bool
    owned: frozenset[int]

    @property
    def paths(self) -> tuple[str, ...]:
        """Tree paths of the arrays that are written back."""
        return tuple(f"out: {c.path}" for c in self.cells if c.written is not None)

    @property
    def replaced(self) -> dict[int, int]:
        """Position among the written arrays → of the argument array replaced."""
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


def lift(args: Any, kwargs: Any, named: bool = False) -> Lifted | None:
    """Take the objects of a call apart; None where there are none.

    Args:
      named: give their leaves paths, too.
    """
    if not nnx_graph.is_imported():
        return None
    leaves = jax.tree.leaves((args, kwargs), is_leaf=nnx_graph.is_object)
    if not any(map(nnx_graph.is_object, leaves)):
        return None
    return Lifted(args, kwargs, named)


class Lifted:
    """The objects of one call.

    Attributes:
      args, kwargs: the arguments, objects in them as `Held`.
    """

    def __init__(self, args: Any, kwargs: Any, named: bool) -> None:
        self._references = nnx_graph.new_references()
        self.args, self.kwargs = nnx_graph.split(
            (tuple(args), dict(kwargs)), self._references, named=named
        )

    def forget(self) -> None:
        """Let go of the arrays, so that the objects alone hold them."""
        self.args = self.kwargs = None

    def finish(
        self, written: Written, result: Any, before: Sequence[Any], after: Sequence[Any]
    ) -> Any:
        """Write back what a run gave, and return the user's result.

        Args:
          written: what is to be written where.
          result: the result, objects in it as `Held`.
          before: the argument arrays, where the plan wants them.
          after: the arrays to be written back.
        """
        outer = nnx_graph.new_objects(self._references)
        if not written.is_simple:
            return merge_result(written, result, before, after, outer)
        for cell in written.cells:
            variable, value = outer[cell.place.number], cell.of(before, after)
            if variable.get_raw_value() is not value:
                variable.set_raw_value(value)
        return result


def merge_result(
    written: Written,
    result: Any,
    before: Sequence[Any],
    after: Sequence[Any],
    outer: Any = None,
) -> Any:
    """The result, its objects made; those of the arguments are changed in place.

    Args:
      outer: from numbers to the objects of the arguments; None: others are made.
      The rest: as of `Lifted.finish`.
    """
    objects = nnx_graph.new_objects()
    held = jax.tree.map(lambda cell: cell.of(before, after), written.held)
    nnx_graph.merge(held, objects, outer)
    return nnx_graph.merge(result, objects, outer)


def call_on_objects(
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    arguments: Leaves,
    leaves_of: Callable[[Any, Any], Leaves],
) -> tuple[Any, list[Any], Written]:
    """Run the function, inside of a trace, on objects that hold these arrays.

    Args:
      fn: the user's function.
      args, kwargs: objects in them as `Held`.
      arguments: the leaves of the call.
      leaves_of: the leaves, with paths, of such arguments.
    Returns:
      The result, objects in it as `Held`; the arrays to be written back; what else is
      to be known of them.
    """
    taken, graphs = (args, kwargs), _graphs((args, kwargs))
    objects = nnx_graph.new_objects()
    args, kwargs = nnx_graph.merge(taken, objects)
    known = _Known(taken, arguments, nnx_graph.variables_of(objects))
    result = fn(*args, **kwargs)
    references, inner = nnx_graph.new_references(), nnx_graph.references_of(objects)
    ends = nnx_graph.only_objects((tuple(args), dict(kwargs)))
    ends = nnx_graph.split(ends, references, inner, named=True)
    result = nnx_graph.split(result, references, inner, named=True)
    leaves = leaves_of(*ends)
    after: list[Any] = []
    cells: list[Cell] = []
    for path, value, place, part in zip(
        leaves.paths, leaves.values, *_places(ends), strict=True
    ):
        cell = Cell(path, place, known.position(path, place, part))
        if cell.before is not None and value is known.arrays[cell.before]:
            pass
        elif is_array(value) or is_python_scalar(value):
            cell = replace(cell, written=len(after))
            after.append(value)
        else:
            cell = replace(cell, before=None, value=value)
        cells.append(cell)
    is_simple = (
        all(map(nnx_graph.is_same_graph, graphs, _graphs(ends)))
        and all(c.place.number in known.single for c in cells)
        and not any(map(is_held, jax.tree.leaves(result, is_leaf=is_held)))
    )
    held = jax.tree.unflatten(jax.tree.structure(ends), cells)
    return result, after, Written(held, tuple(cells), is_simple, known.owned)


class _Known:
    """Where among the argument arrays each variable's are.

    Attributes:
      arrays: the argument arrays.
      owned: positions of those that objects hold.
      single: numbers of the variables that hold one array.
    """

    def __init__(
        self, taken: Any, arguments: Leaves, variables: Mapping[int, Any]
    ) -> None:
        flat, _ = jax.tree_util.tree_flatten_with_path(taken)
        arrays = [flat[p] for p in arguments.positions]
        self.arrays = [array for _, array in arrays]
        self.owned = frozenset(
            i
            for i, (path, _) in enumerate(arrays)
            if any(isinstance(key, Key) for key in path)
        )
        self._of_path = {path: i for i, path in enumerate(arguments.array_paths)}
        places = {id(x): i for i, x in enumerate(self.arrays)}
        self._of_variable = {
            number: [places.get(id(x)) for x in jax.tree.leaves(value)]
            for number, value in variables.items()
        }
        self.single = {
            number
            for number, value in variables.items()
            if len(self._of_variable[number]) == 1 and id(value) in places
        }

    def position(self, path: str, place: Place, part: int) -> int | None:
        """Of the array that the variable held before, or what was at the same path.

        Args:
          part: number of the array within its variable.
        """
        held = self._of_variable.get(place.number, ())  # type: ignore[arg-type]
        return held[part] if part < len(held) else self._of_path.get(path)


def _graphs(tree: Any) -> list[Any]:
    leaves = jax.tree.leaves(tree, is_leaf=is_held)
    return [x.graphdef for x in leaves if is_held(x)]


def _places(tree: Any) -> tuple[list[Place], list[int]]:
    """For every leaf, where in its object it lies, and its number in its variable."""
    places: list[Place] = []
    parts: list[int] = []
    for held in jax.tree.leaves(tree, is_leaf=is_held):
        for place, leaf in zip(held.places, held.leaves, strict=True):
            count = len(jax.tree.leaves(leaf))
            places += [place] * count
            parts += range(count)
    return places, parts


def shown(tree: Any, positions: Sequence[int]) -> tuple[Any, tuple[int, ...]]:
    """The structure of a tree with its objects as nested `nnx.State`s.

    Args:
      tree: arguments or result, objects in it as `Held`.
      positions: where among its leaves the arrays are.
    Returns:
      The structure, and where among its leaves the arrays are.
    """
    count = itertools.count()

    def one(x: Any) -> Any:
        if not is_held(x):
            return next(count)
        leaves = [jax.tree.map(lambda _: next(count), leaf) for leaf in x.leaves]
        return nnx_graph.as_state(x, leaves)

    labels, structure = jax.tree.flatten(jax.tree.map(one, tree, is_leaf=is_held))
    place = {label: i for i, label in enumerate(labels)}
    return structure, tuple(place[p] for p in positions)
