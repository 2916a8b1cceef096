"""Layouts of arguments and results as Python literals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from rhino_jax.ir.printer import format_array
from rhino_jax.plan.plan import Leaf, PlanData


LeafText = Callable[[Leaf], str]
"""Function from an array of a plan to the source of its layout."""


@dataclass(frozen=True, slots=True)
class _Static:
    """Placeholder for a leaf of a tree that is not an array."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument, or the result.

    Attributes:
      name: name of the argument; `result`.
      text: source of its layouts: a pytree; or, if its containers cannot be written as
        literals, their list in the order of `jax.tree.leaves`.
      is_list: whether it is such a list.
      has_statics: whether it contains leaves that are not arrays.
      leaves: the layouts alone, in order.
    """

    name: str
    text: str
    is_list: bool
    has_statics: bool
    leaves: tuple[str, ...]


def arguments_of(plan: PlanData, text: LeafText) -> tuple[list[Argument], list[str]]:
    """Return all arguments, and the names of the last ones, passed by keyword."""
    args, kwargs = _filled(
        plan.in_tree, plan.in_leaf_positions, plan.inputs[: len(plan.in_leaf_positions)]
    )
    taken: set[str] = set(kwargs)
    found = []
    for i, tree in enumerate(args):
        name = _root(tree) or f"arg_{i}"
        name = name if name.isidentifier() and name not in taken else f"arg_{i}"
        taken.add(name)
        found.append(_written(name, tree, text))
    found += [_written(name, tree, text) for name, tree in kwargs.items()]
    return found, list(kwargs)


def results_of(plan: PlanData, text: LeafText) -> tuple[list[Argument], bool]:
    """Return the result, and whether it is a tuple, whose elements these then are.

    Values written back to arguments are not included.
    """
    count = len(plan.out_leaf_positions)
    tree = _filled(plan.out_tree, plan.out_leaf_positions, plan.outputs[:count])
    if type(tree) is tuple and tree:
        parts = [_written(f"result_{i}", x, text) for i, x in enumerate(tree)]
        return parts, True
    return [_written("result", tree, text)], False


def spec_text(spec: PartitionSpec) -> str:
    """Return the source of a spec, as `P("data", None)`."""
    return f"P({', '.join(map(_dim_text, spec))})"


def _dim_text(dim: Any) -> str:
    if dim is PartitionSpec.UNCONSTRAINED:
        return "P.UNCONSTRAINED"
    if isinstance(dim, tuple):
        return f"({', '.join(quoted(name) for name in dim)})"
    return "None" if dim is None else quoted(dim)


def tuple_text(items: Iterable[str]) -> str:
    """Return items of source as the source of their tuple."""
    found = list(items)
    return f"({', '.join(found)}{',' if len(found) == 1 else ''})"


def quoted(text: str) -> str:
    """Return a string as source, with double quotes if that needs no escapes."""
    return (
        f'"{text}"'
        if text.isprintable() and not set(text) & {'"', "\\"}
        else (repr(text))
    )


def _filled(tree: Any, positions: Sequence[int], leaves: Sequence[Leaf]) -> Any:
    everything: list[Any] = [_Static()] * tree.num_leaves
    for position, leaf in zip(positions, leaves, strict=True):
        everything[position] = leaf
    return jax.tree.unflatten(tree, everything)


def _root(tree: Any) -> str:
    """Return the name of the argument that contains the tree's arrays."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, Leaf):
            return leaf.path.partition("[")[0].partition(".")[0]
    return ""


def _written(name: str, tree: Any, text: LeafText) -> Argument:
    leaves = jax.tree.leaves(tree)
    has_statics = any(isinstance(x, _Static) for x in leaves)
    specs = tuple(text(x) if isinstance(x, Leaf) else "None" for x in leaves)
    written = _literal(tree, text, 0)
    if written is not None:
        return Argument(name, written, False, has_statics, specs)
    lines = [f"    {_leaf(x, text)}" for x in leaves]
    listed = "\n".join(["[", *lines, "]"])
    return Argument(name, listed, True, has_statics, specs)


def _leaf(leaf: Any, text: LeafText) -> str:
    if not isinstance(leaf, Leaf):
        return "None,  # no array"
    return f"{text(leaf)},  # {leaf.path}: {format_array(leaf.dtype, leaf.shape)}"


def _literal(tree: Any, text: LeafText, depth: int) -> str | None:
    """Return dicts, lists, tuples and None as source; None for other containers."""
    if isinstance(tree, Leaf):
        return text(tree)
    if tree is None or isinstance(tree, _Static):
        return "None"
    items: list[tuple[str, Any]]
    if type(tree) is dict and all(isinstance(k, str | int) for k in tree):
        keys = [quoted(k) if isinstance(k, str) else repr(k) for k in tree]
        items = list(zip([f"{k}: " for k in keys], tree.values(), strict=True))
        marks = "{}"
    elif type(tree) in (list, tuple):
        items, marks = [("", x) for x in tree], "[]" if type(tree) is list else "()"
    else:
        return None
    return _block(items, marks, text, depth)


def _block(
    items: Sequence[tuple[str, Any]], marks: str, text: LeafText, depth: int
) -> str | None:
    if not items:
        return marks
    inner, outer = "    " * (depth + 1), "    " * depth
    lines = []
    for key, value in items:
        written = _literal(value, text, depth + 1)
        if written is None:
            return None
        shape = ""
        if isinstance(value, Leaf):
            shape = f"  # {value.dtype}[{','.join(map(str, value.shape))}]"
        lines.append(f"{inner}{key}{written},{shape}")
    return "\n".join([marks[0], *lines, f"{outer}{marks[1]}"])
