"""The leaves of a call: which are arrays, which are static, and their tree paths.

Arguments of the kinds that `jax.jit` accepts are treated as under `jit`: every leaf is
an array, Python scalars too. An argument with leaves that `jit` refuses (functions,
strings, objects, as in Equinox modules) is treated as under Equinox's `filter_jit`: its
Python scalars are static as well. A `bool` in an attribute is a switch
(`dropout.inference`) and always static. The leaves of a mutable object are arrays,
Python scalars too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.tree_util import GetAttrKey, keystr, tree_flatten_with_path

from rhino_jax.errors import TraceError
from rhino_jax.frontend.objects import nnx_graph
from rhino_jax.frontend.objects.held import ChildKey


_SCALARS = (bool, int, float, complex)


@dataclass(frozen=True, slots=True)
class Static:
    """The value of a leaf or argument that is no array; compared by type and value."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static):
            return NotImplemented
        if self.value is other.value:
            return True
        return type(self.value) is type(other.value) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(self.value)


@dataclass(frozen=True, slots=True)
class Leaves:
    """All leaves of a call or of a result.

    Attributes:
      tree: tree structure over all leaves.
      values: all leaves, in the tree's order.
      paths: their tree paths.
      positions: positions of the arrays among them.
      statics: (position, value) of the other leaves.
      groups: for every leaf, the number of the top-level element that contains it.
    """

    tree: Any
    values: tuple[Any, ...]
    paths: tuple[str, ...]
    positions: tuple[int, ...]
    statics: tuple[tuple[int, Static], ...]
    groups: tuple[int, ...]

    @property
    def arrays(self) -> tuple[Any, ...]:
        return tuple(self.values[p] for p in self.positions)

    @property
    def array_paths(self) -> tuple[str, ...]:
        return tuple(self.paths[p] for p in self.positions)

    def with_arrays(self, arrays: Sequence[Any]) -> Leaves:
        """Return the same leaves with other arrays."""
        values = list(self.values)
        for position, array in zip(self.positions, arrays, strict=True):
            values[position] = array
        return replace(self, values=tuple(values))

    def without_scalars(self) -> Leaves:
        """Return the same leaves, with Python scalars static instead of arrays."""
        gone = [p for p in self.positions if is_python_scalar(self.values[p])]
        return replace(
            self,
            positions=tuple(p for p in self.positions if p not in gone),
            statics=(*self.statics, *((p, Static(self.values[p])) for p in gone)),
        )

    def unflatten(self, arrays: Sequence[Any]) -> Any:
        """Return the tree with other arrays."""
        everything: list[Any] = [None] * len(self.values)
        for position, static in self.statics:
            everything[position] = static.value
        for position, array in zip(self.positions, arrays, strict=True):
            everything[position] = array
        return jax.tree.unflatten(self.tree, everything)


def is_array(x: Any) -> bool:
    """Whether JAX takes a leaf as an array (Python scalars excepted)."""
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return True
    if isinstance(x, _SCALARS) and not isinstance(x, np.generic):
        return False
    try:
        jax.typeof(x)
    except TypeError:
        return False
    return True


def is_python_scalar(x: Any) -> bool:
    return type(x) in _SCALARS


def split_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]
) -> Leaves:
    """Return the leaves of a call.

    Args:
      args, kwargs: the arguments, with static ones replaced by None.
      names: for every positional argument, its parameter's name.
    """
    call = (tuple(args), dict(kwargs))
    flat, tree = tree_flatten_with_path(call)
    paths, groups, groups_of_kwargs = [], [], {k: i for i, k in enumerate(kwargs)}
    texts = _texts(call, flat, 2)
    for (path, _), text in zip(flat, texts, strict=True):
        is_kwarg, key = path[0].idx == 1, path[1]
        if is_kwarg:
            groups.append(len(args) + groups_of_kwargs[key.key])
            paths.append(key.key + text)
        else:
            groups.append(key.idx)
            paths.append(names[key.idx] + text)
    return _classify(tree, flat, paths, groups)


def split_result(result: Any) -> Leaves:
    """Return the leaves of a result; their paths are `out`, `out[1]['loss']`, …"""
    flat, tree = tree_flatten_with_path(result)
    paths = ["out" + text for text in _texts(result, flat, 0)]
    groups: list[int] = []
    if isinstance(result, tuple | list | dict):
        seen: dict[Any, int] = {}
        groups = [seen.setdefault(path[0], len(seen)) for path, _ in flat]
    else:
        groups = [0] * len(flat)
    return _classify(tree, flat, paths, groups)


def _texts(tree: Any, flat: Sequence[Any], first: int) -> list[str]:
    """Return the paths of all leaves, from their key number `first` on; a variable of
    Flax NNX has the path of its value."""
    paths = [tuple(path) for path, _ in flat]
    if nnx_graph.is_imported():
        variables = nnx_graph.variable_paths(tree)
        paths = [
            tuple(key for i, key in enumerate(path) if path[:i] not in variables)
            for path in paths
        ]
    return [keystr(path[first:]) for path in paths]


def _classify(
    tree: Any, flat: Sequence[Any], paths: Sequence[str], groups: Sequence[int]
) -> Leaves:
    values = tuple(leaf for _, leaf in flat)
    held = [any(isinstance(key, ChildKey) for key in path) for path, _ in flat]
    kinds = [*zip(map(is_python_scalar, values), map(is_array, values), strict=True)]
    leaves = [*zip(groups, kinds, held, strict=True)]
    mixed = {group for group, kind, is_held in leaves if not any(kind) and not is_held}
    positions, statics = [], []
    for i, ((path, value), (is_scalar, is_one)) in enumerate(
        zip(flat, kinds, strict=True)
    ):
        is_switch = type(value) is bool and path and isinstance(path[-1], GetAttrKey)
        is_traced = held[i] or (groups[i] not in mixed and not is_switch)
        if is_traced if is_scalar else is_one:
            positions.append(i)
        else:
            statics.append((i, Static(value)))
    return Leaves(
        tree, values, tuple(paths), tuple(positions), tuple(statics), tuple(groups)
    )


def check_hashable(what: str, statics: Sequence[tuple[str, Static]]) -> None:
    """Refuse static values that cannot be compared between calls.

    Args:
      what: the call, for messages.
      statics: (path, value) of the static values.

    Raises:
      TraceError: a value has no hash.
    """
    for path, static in statics:
        try:
            hash(static)
        except TypeError:
            raise TraceError(
                f"{what}: `{path}` is no array, and cannot be a static value either,"
                " because it has no hash.",
                where=path,
                numbers=f"type {type(static.value).__name__}",
                fix="pass arrays, or give the type __hash__ and __eq__, or close"
                " over the value.",
            ) from None
