"""Flax NNX objects: modules, optimizers, random streams, metrics, variables.

These are the four steps of `nnx.jit`: the objects' state is split off outside the
trace, objects are built from it inside, their final state is split off, and the user's
objects are updated with it. An object that is reached by several paths, or from several
arguments, stays one object throughout.

Only called where the user has imported Flax NNX.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from rhino_jax.frontend.objects.held import LeafPlace, OpenedObject, is_held


def is_imported() -> bool:
    return "flax.nnx" in sys.modules


def is_object(x: Any) -> bool:
    """Whether `x` is a module, an optimizer, a variable, or another node of a graph."""
    from flax.nnx import Variable
    from flax.nnx.graph import GRAPH_REGISTRY

    return type(x) in GRAPH_REGISTRY or isinstance(x, Variable)


def has_objects(tree: Any, has_states: bool = True) -> bool:
    """Whether a tree contains objects; see `split` for `has_states`."""
    return any(map(is_object, jax.tree.leaves(tree, is_leaf=_stops(has_states))))


def _stops(has_states: bool) -> Callable[[Any], bool]:
    """Return the predicate of nodes at which the search for objects stops."""
    if has_states:
        return is_object
    from flax.nnx import State

    return lambda x: isinstance(x, State) or is_object(x)


def use_no_cache() -> None:
    """Clear and disable the cache of `nnx.cached_partial`, as a transformation must."""
    from flax.nnx.graph import GRAPH_CONTEXT

    GRAPH_CONTEXT.tmp_static_cache = None


def new_references(objects: Any = None) -> Any:
    """Return a map from objects (by identity) to numbers, in the order of discovery:
    empty, or the inverse of `objects`."""
    from flax.nnx.graph import RefMap

    return RefMap() if objects is None else RefMap.from_indexmap(objects)


def new_objects(references: Any = None) -> Any:
    """Return a map from numbers to objects: empty, or the inverse of `references`."""
    from flax.nnx.graph import IndexMap

    return IndexMap() if references is None else IndexMap.from_refmap(references)


def split(
    tree: Any,
    references: Any,
    outer: Any = None,
    *,
    has_states: bool = True,
    named: bool = False,
) -> Any:
    """Return the tree with every object replaced by an `OpenedObject`.

    Args:
      tree: any pytree.
      references: extended by the objects that are found; those already in it are not
        split again.
      outer: object → its number outside the trace; None: there are none.
      has_states: whether to search in `nnx.State`s, too.
      named: whether to record the position of each leaf, too.
    """
    from flax.nnx import graph

    seen = graph.RefMap(references.items())

    def one(x: Any) -> Any:
        if not is_object(x):
            return x
        places: Sequence[LeafPlace] = ()
        graphdef, leaves = graph.flatten(
            x,
            ref_index=references,
            ref_outer_index=outer,
            with_paths=False,
            graph=True,
        )
        if named:
            _, flat = graph.flatten(x, ref_index=seen, with_paths=True, graph=True)
            places = [
                LeafPlace(
                    path,
                    path_text(x, path),
                    None if outer is None else outer.get(leaf, None),
                )
                for path, leaf in flat
            ]
        return OpenedObject(graphdef, leaves, places)

    return jax.tree.map(one, tree, is_leaf=_stops(has_states))


def merge(tree: Any, objects: Any, outer: Any = None) -> Any:
    """Return the tree with objects built from every `OpenedObject`.

    Args:
      tree: a tree that `split` returned.
      objects: number → object that is built; filled.
      outer: number → existing object, which is changed in place.
    """
    from flax.nnx import graph

    def one(x: Any) -> Any:
        if not is_held(x):
            return x
        return graph.unflatten(
            x.graphdef, x.leaves, index_ref=objects, outer_index_outer_ref=outer
        )

    return jax.tree.map(one, tree, is_leaf=is_held)


def states_of(tree: Any) -> Any:
    """Return a tree that `split` returned with the `nnx.state` of every object in its
    place, with variables around its leaves; an object that is a variable stays one."""
    from flax import nnx

    def one(x: Any) -> Any:
        is_whole = isinstance(x, nnx.Variable) or not is_object(x)
        return x if is_whole else nnx.state(x)

    return jax.tree.map(one, merge(tree, new_objects()), is_leaf=is_object)


def variables_of(objects: Mapping[int, Any]) -> dict[int, Any]:
    """Return the value of each variable, by number."""
    from flax.nnx import Variable

    return {n: x.get_raw_value() for n, x in objects.items() if isinstance(x, Variable)}


def only_objects(tree: Any, has_states: bool) -> Any:
    """Return the tree with None in place of everything else; see `split` for
    `has_states`."""
    stops = _stops(has_states)
    return jax.tree.map(lambda x: x if is_object(x) else None, tree, is_leaf=stops)


def variable_paths(tree: Any) -> set[tuple[Any, ...]]:
    """Return the key paths of the variables in a pytree."""
    from flax.nnx import Variable

    is_variable = lambda x: isinstance(x, Variable)  # noqa: E731
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_variable)
    return {tuple(path) for path, x in flat if is_variable(x)}


def is_same_graph(before: Any, after: Any) -> bool:
    """Whether nothing but the arrays has changed.

    Args:
      before: the structure of an object, split off outside the trace.
      after: its structure inside, with numbers from outside.
    """
    return bool(after.with_no_outer_index() == before)


def path_text(root: Any, path: Sequence[Any]) -> str:
    """Format a path through an object as a user writes it:
    `.opt_state[0].mu.kernel`."""
    from flax import nnx
    from flax.nnx import graph

    text, node, is_state = "", root, False
    for key in path:
        is_state = is_state or isinstance(node, nnx.State)
        is_mapping = isinstance(node, Mapping | nnx.Dict) and not is_state
        is_name = isinstance(key, str) and key.isidentifier() and not is_mapping
        text += f".{key}" if is_name else f"[{key!r}]"
        kind = graph.get_node_impl(node)
        node = None if kind is None else kind.node_dict(node).get(key)
    return text


def as_state(held: OpenedObject, leaves: Sequence[Any]) -> Any:
    """Return leaves as a nested `nnx.State`, as `nnx.split` returns it."""
    from flax import nnx

    paths = [place.path for place in held.places]
    return nnx.from_flat_state(dict(zip(paths, leaves, strict=True)), cls=nnx.State)
