"""A call on objects that change in place, as a pure call and a write-back.

`lift` takes the objects of one call apart, so that all else sees arrays.
`call_on_objects` runs the user's function inside of the trace, on objects made of these
arrays, and says in a `Written` what they hold in the end. `Lifted.finish` gives the
user's own objects what a run gave.
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
    """Take the objects of a call apart; None where there are none.

    Args:
      has_states: a bare `nnx.State` is an object, as to `nnx.jit`, and no mere pytree,
        as to `jax.jit`.
      named: give their leaves paths, too.
    """
    tree = (tuple(args), dict(kwargs))
    has_graph = nnx_graph.is_imported() and nnx_graph.has_objects(tree, has_states)
    if not has_graph and not references.are_in(tree):
        return None
    return Lifted(tree, has_graph, has_states, named)


class Lifted:
    """The objects of one call.

    Attributes:
      args, kwargs: the arguments, objects in them as `Held`.
      references: those of JAX among the arguments.
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
          after: all that the run gave.
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
    """The result, its objects made; those of the arguments are changed in place.

    Args:
      outer: from numbers to the objects of the arguments; None: those in the result
        are others.
      The rest: as of `Lifted.finish`.
    """
    if written.is_simple:
        return result
    objects = nnx_graph.new_objects()
    held = jax.tree.map(lambda cell: cell.of(before, after), written.held)
    nnx_graph.merge(held, objects, outer)
    return nnx_graph.merge(result, objects, outer)


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
        leaves = [jax.tree.map(one, leaf, is_leaf=is_held) for leaf in x.leaves]
        if [place.path for place in x.places] == [()]:
            return leaves[0]
        return nnx_graph.as_state(x, leaves) if leaves else {}

    labels, structure = jax.tree.flatten(jax.tree.map(one, tree, is_leaf=is_held))
    place = {label: i for i, label in enumerate(labels)}
    return structure, tuple(place[p] for p in positions)
