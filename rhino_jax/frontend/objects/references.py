"""References of JAX (`jax.new_ref`): their values go in and come out as arrays."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import jax

from rhino_jax._compat import ref_value, set_ref_value
from rhino_jax.frontend.objects.held import LeafPlace, OpenedObject, is_held


@dataclass(frozen=True, slots=True)
class Reference:
    """The number of a reference, in place of the structure of an object."""

    number: int


def is_reference(x: Any) -> bool:
    return isinstance(x, jax.Ref)


def are_in(tree: Any) -> bool:
    return any(map(is_reference, jax.tree.leaves(tree)))


def split(tree: Any, found: list[Any]) -> Any:
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

    if not are_in(tree):
        return tree
    return jax.tree.map(one, tree, is_leaf=is_held)


def merge(tree: Any, made: MutableMapping[int, Any]) -> Any:
    """Return the tree with references built from their values.

    Args:
      tree: a tree that `split` returned.
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


def set_value(reference: Any, value: Any) -> None:
    """Set a reference to another array, of the same shape and type."""
    set_ref_value(reference, value)
