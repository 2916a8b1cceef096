"""A call on mutable objects, as a pure call and a write-back.

`lift` splits the objects of one call, so that all other code sees arrays.
`call_on_objects` runs the user's function inside the trace, on objects built from these
arrays, and returns their final state as a `Written`. `Lifted.finish` writes the results
of a run back to the user's own objects.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax

from rhino_jax.frontend.objects import nnx_graph, references
from rhino_jax.frontend.objects.held import is_held
from rhino_jax.frontend.objects.written import Written


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
    if not has_graph and not references.are_in(tree):
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
        self.args, self.kwargs = references.split(tree, self.references)

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
                references.set_value(self.references[cell.reference], value)
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
