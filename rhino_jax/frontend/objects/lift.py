"""A call on mutable objects, as a pure call and a write-back.

`lift` splits the objects of one call, so that all other code sees arrays.
`call_on_objects` runs the user's function inside the trace, on objects built from these
arrays, and returns their final state as a `Written`. `Lifted.finish` writes the results
of a run back to the user's own objects.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from rhino_jax._compat import set_ref_value
from rhino_jax.frontend.leaves import Leaves, is_array, is_python_scalar
from rhino_jax.frontend.objects import nnx_graph
from rhino_jax.frontend.objects.held import (
    Cell,
    ChildKey,
    LeafPlace,
    Written,
    has_references,
    is_held,
    merge_references,
    split_references,
)


def call_on_objects(
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    arguments: Leaves,
    leaves_of: Callable[[Any, Any], Leaves],
    *,
    has_states: bool,
) -> tuple[Any, list[Any], Written]:
    """Run the function, inside a trace, on objects that hold these arrays.

    Args:
      fn: the user's function.
      args, kwargs: the arguments, their objects as `OpenedObject`.
      arguments: the leaves of the call.
      leaves_of: arguments of this form → their leaves, with paths.
      has_states: whether a bare `nnx.State` is an object as well.

    Returns:
      The result, its objects as `OpenedObject`; the arrays to write back; the record of
      where they are written.
    """
    taken = (args, kwargs)
    made: dict[int, Any] = {}
    args, kwargs = merge_references(taken, made)
    graphs = _graphs((args, kwargs))
    objects = nnx_graph.new_objects() if graphs else {}
    if graphs:
        args, kwargs = nnx_graph.merge((args, kwargs), objects)
    variables = nnx_graph.variables_of(objects) if graphs else {}
    known = _Known(taken, arguments, variables)
    result = fn(*args, **kwargs)
    after: list[Any] = []
    cells: list[Cell] = []
    held, is_simple = None, True
    if graphs:
        nodes, inner = nnx_graph.new_references(), nnx_graph.new_references(objects)
        ends = nnx_graph.only_objects((tuple(args), dict(kwargs)), has_states)
        ends = nnx_graph.split(ends, nodes, inner, named=True)
        result = nnx_graph.split(result, nodes, inner, named=True)
        for path, value, place, part in _final_leaves(ends, leaves_of(*ends)):
            cell = Cell(path, place, before=known.position(path, place, part))
            is_changed = cell.before is None or value is not known.arrays[cell.before]
            if is_changed and (is_array(value) or is_python_scalar(value)):
                cell = replace(cell, written=len(after))
                after.append(value)
            elif is_changed:
                cell = replace(cell, before=None, value=value)
            cells.append(cell)
        is_simple = (
            all(map(nnx_graph.is_same_graph, graphs, _graphs(ends)))
            and all(c.place.number in known.single for c in cells)
            and not _graphs(result)
        )
        held = jax.tree.unflatten(jax.tree.structure(ends), cells)
    for number, (before, reference) in made.items():
        position = known.places[id(before)]
        path, place = arguments.array_paths[position], LeafPlace((), "", None)
        cells.append(Cell(path, place, number, position, len(after)))
        after.append(reference[...])
    is_state = bool(graphs) and has_states
    written = Written(held, tuple(cells), is_simple, known.owned, is_state)
    return result, after, written


class _Known:
    """The positions of each variable's arrays among the argument arrays.

    Attributes:
      arrays: the argument arrays.
      places: id of an argument array → its position.
      owned: positions of the arrays that objects hold.
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
            if any(isinstance(key, ChildKey) for key in path)
        )
        self._of_path = {path: i for i, path in enumerate(arguments.array_paths)}
        self.places = {id(x): i for i, x in enumerate(self.arrays)}
        self._of_variable = {
            number: [self.places.get(id(x)) for x in jax.tree.leaves(value)]
            for number, value in variables.items()
        }
        self.single = {
            number
            for number, value in variables.items()
            if len(self._of_variable[number]) == 1 and id(value) in self.places
        }

    def position(self, path: str, place: LeafPlace, part: int) -> int | None:
        """Return the position of the array that a variable held before, else of the one
        at the same path, else None.

        Args:
          path: tree path of the leaf.
          place: its position in its object.
          part: number of the array within its variable.
        """
        held = self._of_variable.get(place.number, ())  # type: ignore[arg-type]
        return held[part] if part < len(held) else self._of_path.get(path)


def _graphs(tree: Any) -> list[Any]:
    leaves = jax.tree.leaves(tree, is_leaf=is_held)
    return [x.graphdef for x in leaves if is_held(x)]


def _final_leaves(
    ends: Any, leaves: Leaves
) -> Iterator[tuple[str, Any, LeafPlace, int]]:
    """Yield the path and value of every leaf of the final objects, its position in its
    object, and its number in its variable."""
    left = zip(leaves.paths, leaves.values, strict=True)
    for held in jax.tree.leaves(ends, is_leaf=is_held):
        for place, leaf in zip(held.places, held.leaves, strict=True):
            for part in range(len(jax.tree.leaves(leaf))):
                yield *next(left), place, part


def lift(
    args: Any, kwargs: Any, has_states: bool, named: bool = False
) -> Lifted | None:
    """Split the objects of a call; None where there are none.

    Args:
      args, kwargs: the arguments.
      has_states: whether a bare `nnx.State` is an object, as to `nnx.jit`, or a mere
        pytree, as to `jax.jit`.
      named: whether their leaves get paths, too.
    """
    tree = (tuple(args), dict(kwargs))
    has_graph = nnx_graph.is_imported() and nnx_graph.has_objects(tree, has_states)
    if not has_graph and not has_references(tree):
        return None
    return Lifted(tree, has_graph, has_states, named)


class Lifted:
    """The objects of one call.

    Attributes:
      args, kwargs: the arguments, their objects as `OpenedObject`.
      references: JAX's references among the arguments.
    """

    def __init__(
        self, tree: Any, has_graph: bool, has_states: bool, named: bool
    ) -> None:
        if has_graph:
            nnx_graph.use_no_cache()
            self._nodes = nnx_graph.new_references()
            tree = nnx_graph.split(
                tree, self._nodes, has_states=has_states, named=named
            )
        self.references: list[Any] = []
        self.args, self.kwargs = split_references(tree, self.references)

    def forget(self) -> None:
        """Drop the arrays, so that the objects alone hold them."""
        self.args = self.kwargs = None

    def finish(
        self, written: Written, result: Any, before: Sequence[Any], after: Sequence[Any]
    ) -> Any:
        """Write back the results of a run, and return the user's result.

        Args:
          written: which results are written to which variables.
          result: the result, its objects as `OpenedObject`.
          before: the argument arrays, in the plan's shardings.
          after: all results of the run.
        """
        for cell in written.cells:
            if cell.reference is not None:
                value = cell.of(before, after)
                set_ref_value(self.references[cell.reference], value)
        if written.held is None:
            return result
        outer = nnx_graph.new_objects(self._nodes)
        if not written.is_simple:
            return merge_result(written, result, before, after, outer)
        for cell in written.cells:
            if cell.place.number is None:
                continue
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
    """Return the result with its objects built; those of the arguments are changed in
    place.

    Args:
      written, result, before, after: as in `Lifted.finish`.
      outer: number → object of the arguments; None: objects in the result are new ones.
    """
    if written.is_simple:
        return result
    objects = nnx_graph.new_objects()
    held = jax.tree.map(lambda cell: cell.of(before, after), written.held)
    nnx_graph.merge(held, objects, outer)
    return nnx_graph.merge(result, objects, outer)


def shown(tree: Any, positions: Sequence[int]) -> tuple[Any, tuple[int, ...]]:
    """Return the structure of a tree with its objects as nested `nnx.State`s.

    Args:
      tree: arguments or result, their objects as `OpenedObject`.
      positions: positions of the arrays among its leaves.

    Returns:
      The structure, and the positions of the arrays among its leaves.
    """
    count = itertools.count()

    def one(x: Any) -> Any:
        if not is_held(x):
            return next(count)
        leaves = [jax.tree.map(one, leaf, is_leaf=is_held) for leaf in x.leaves]
        if [place.path for place in x.places] == [()]:
            return leaves[0]
        return nnx_graph.as_state(x, leaves) if leaves else {}

    labels, structure = jax.tree.flatten(jax.tree.map(one, tree, is_leaf=is_held))
    place = {label: i for i, label in enumerate(labels)}
    return structure, tuple(place[p] for p in positions)
