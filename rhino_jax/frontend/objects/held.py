"""An object as a pytree node: one child per variable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax


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


class OpenedObject:
    """An object, split into its structure and its leaves.

    Attributes:
      graphdef: its structure without the arrays; a part of every signature.
      leaves: the values of its variables.
      places: the position of each leaf; empty where `named` was not requested.
    """

    __slots__ = ("graphdef", "leaves", "places")

    def __init__(
        self, graphdef: Any, leaves: Iterable[Any], places: Sequence[LeafPlace] = ()
    ) -> None:
        self.graphdef = graphdef
        self.leaves = list(leaves)
        self.places = tuple(places)


def is_held(x: Any) -> bool:
    return isinstance(x, OpenedObject)


def _flatten(x: OpenedObject) -> tuple[Any, Any]:
    return x.leaves, x.graphdef


def _flatten_with_keys(x: OpenedObject) -> tuple[Any, Any]:
    texts = [p.text for p in x.places] or [f"[{i}]" for i in range(len(x.leaves))]
    keys = [ChildKey(text) for text in texts]
    return list(zip(keys, x.leaves, strict=True)), x.graphdef


jax.tree_util.register_pytree_with_keys(
    OpenedObject,
    _flatten_with_keys,
    lambda graphdef, leaves: OpenedObject(graphdef, leaves),
    _flatten,
)
