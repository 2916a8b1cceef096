"""The content of a plan file: a plan as JSON data, and back.

It contains everything but meshes (devices are not portable). Axes are named in the
specs of inputs and outputs, which people read, and numbered elsewhere.

Tree structures are stored too, so that a loaded plan has pytrees of specs. Dicts,
lists, tuples and None are restored as they were. A named tuple is restored as the same
class if the reading program has already imported it, else as a named tuple with the
same name and fields. Any other container (a registered class, an Equinox module, NNX
state) becomes a dict from attribute or key to child: files never import code. If the
children of a container have no distinct names, they are numbered. Custom keys of dicts
become text.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import fields
from importlib import metadata
from typing import Any

import jax

from rhino_jax.plan.decisions import Decisions
from rhino_jax.plan.fingerprint import outline_of
from rhino_jax.plan.plan import Leaf, PlanData
from rhino_jax.plan.stages import StagePlan
from rhino_jax.utils.codec import from_json, to_json


SCHEMA_VERSION = 8
FORMAT = "rhino_jax plan"

_LAST = ("pipeline", "transforms", "variants", "stages")
"""Keys after those that people read."""

_TREES = ("in_tree", "out_tree", "in_leaf_positions", "out_leaf_positions")
_OF_THE_PROCESS = ("mesh", "cached", "origin", "traced")
_SAVED = tuple(
    f.name
    for f in fields(PlanData)
    if f.name not in (*_LAST, *_TREES, *_OF_THE_PROCESS, "versions")
)

KEYS = ("format", "schema_version", "versions", *_SAVED, "trees", *_LAST, "checksum")
"""Keys of a plan file, in the order in which they are written."""


def plan_to_dict(plan: PlanData) -> dict[str, Any]:
    """Return the content of a plan file, without its checksum."""
    names = [name for name, _ in plan.mesh_axes]
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "versions": dict(plan.versions) or current_versions(),
        **{name: to_json(getattr(plan, name)) for name in _SAVED},
        "inputs": [_leaf_to_json(x, names) for x in plan.inputs],
        "outputs": [_leaf_to_json(x, names) for x in plan.outputs],
        "outline": outline_of(plan),
        "trees": {
            "in": tree_to_json(plan.in_tree),
            "in_leaf_positions": list(plan.in_leaf_positions),
            "out": tree_to_json(plan.out_tree),
            "out_leaf_positions": list(plan.out_leaf_positions),
        },
        **{name: to_json(getattr(plan, name)) for name in _LAST[:-1]},
        "stages": _stages_to_json(plan.stages),
    }


def plan_from_dict(data: Mapping[str, Any]) -> PlanData:
    """Convert the content of a plan file to a plan without a mesh.

    Raises:
      KeyError, TypeError, ValueError: the content does not fit the schema.
    """
    place = {name: i for i, (name, _) in enumerate(data["mesh_axes"])}
    trees = data["trees"]
    in_tree, in_positions = tree_from_json(
        trees["in"], tuple(trees["in_leaf_positions"])
    )
    out_tree, out_positions = tree_from_json(
        trees["out"], tuple(trees["out_leaf_positions"])
    )
    saved = {name: data[name] for name in ("versions", *_SAVED, *_LAST)}
    saved |= {
        "inputs": [_leaf(x, place) for x in data["inputs"]],
        "outputs": [_leaf(x, place) for x in data["outputs"]],
        "stages": _stages(data["stages"]),
        "in_tree": in_tree,
        "out_tree": out_tree,
        "in_leaf_positions": in_positions,
        "out_leaf_positions": out_positions,
    }
    return from_json(PlanData, saved)


def current_versions() -> dict[str, str]:
    """Return the versions of the installed rhino_jax and JAX."""
    try:
        ours = metadata.version("rhino_jax")
    except metadata.PackageNotFoundError:
        ours = "not installed"
    return {"rhino_jax": ours, "jax": jax.__version__}


def _leaf_to_json(leaf: Leaf, names: Sequence[str]) -> dict[str, Any]:
    return {**to_json(leaf), "spec": [[names[a] for a in dim] for dim in leaf.spec]}


def _leaf(data: Mapping[str, Any], place: Mapping[str, int]) -> Leaf:
    spec = [[place[name] for name in dim] for dim in data["spec"]]
    return from_json(Leaf, {**data, "spec": spec})


def _stages_to_json(stages: Sequence[StagePlan]) -> list[dict[str, Any]]:
    """Convert stages to JSON data, without their meshes, which belong to a process.

    Decisions that several stages share are written once, then as the position of the
    first stage that has them.
    """
    first: dict[int, int] = {}
    found = []
    for i, stage in enumerate(stages):
        known = first.setdefault(id(stage.decisions), i)
        saved = ("mesh_axes", "predicted", "sends", "layers")
        found.append(
            {
                **{name: to_json(getattr(stage, name)) for name in saved},
                "devices": _runs(stage.devices),
                "decisions": to_json(stage.decisions) if known == i else known,
            }
        )
    return found


def _stages(data: Iterable[Mapping[str, Any]]) -> list[StagePlan]:
    found: list[StagePlan] = []
    for x in data:
        said = x["decisions"]
        is_shared = isinstance(said, int)
        decisions = found[said].decisions if is_shared else from_json(Decisions, said)
        devices = [d for start, stop in x["devices"] for d in range(start, stop)]
        stage = {**x, "decisions": decisions, "devices": devices}
        found.append(from_json(StagePlan, stage))
    return found


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    """Compress numbers to [start, stop) runs: [0, 1, 2, 8] is [[0, 3], [8, 9]]."""
    found: list[list[int]] = []
    for n in numbers:
        if found and found[-1][1] == n:
            found[-1][1] = n + 1
        else:
            found.append([n, n + 1])
    return found


def tree_to_json(tree: Any) -> Any:
    """Convert a PyTreeDef to JSON data; leaves are numbered in order."""
    if tree is None:
        return None
    return _encode(tree, iter(range(tree.num_leaves)))


def tree_from_json(
    data: Any, positions: tuple[int, ...]
) -> tuple[Any, tuple[int, ...]]:
    """Convert the result of `tree_to_json` back, with the new positions of its arrays.

    A container that was restored as a dict may list its leaves in another order.

    Args:
      data: result of `tree_to_json`.
      positions: positions of the array leaves in the original tree.
    """
    if data is None:
        return None, positions
    order, tree = jax.tree.flatten(_decode(data))
    place = {leaf: i for i, leaf in enumerate(order)}
    return tree, tuple(place[p] for p in positions)


def _encode(tree: Any, leaves: Any) -> Any:
    data = tree.node_data()
    if data is None:
        return next(leaves)
    kind, aux = data
    if kind is type(None):
        return {"none": []}
    children = [_encode(child, leaves) for child in tree.children()]
    if kind in (tuple, list):
        return {kind.__name__: children}
    if kind in (dict, collections.OrderedDict, collections.defaultdict):
        # The children of a plain dict are listed by sorted key.
        keys = aux[1] if kind is collections.defaultdict else aux
        name = "ordered" if kind is collections.OrderedDict else "dict"
        return {name: [[_key(k), c] for k, c in zip(keys, children, strict=True)]}
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return {
            "namedtuple": children,
            "class": [kind.__module__, kind.__qualname__],
            "fields": list(kind._fields),
        }
    names = _child_names(tree, len(children))
    return {
        "dict": [[n, c] for n, c in zip(names, children, strict=True)],
        "was": f"{kind.__module__}.{kind.__qualname__}",
    }


def _key(key: Hashable) -> Any:
    return key if isinstance(key, str | int | bool) else str(key)


def _child_names(tree: Any, count: int) -> list[str]:
    """Return the names of a custom container's children, from its key paths."""
    try:
        node = jax.tree.unflatten(tree, range(tree.num_leaves))
        keyed, _ = jax.tree_util.tree_flatten_with_path(
            node, is_leaf=lambda x: x is not node
        )
        names = [_key_text(path[0]) for path, _ in keyed]
    except Exception:  # a container's own unflatten may refuse stand-in leaves
        names = []
    if len(names) == count and len(set(names)) == count:
        return names
    return [f"{i:04d}" for i in range(count)]


def _key_text(key: Any) -> str:
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _decode(data: Any) -> Any:
    if isinstance(data, int):
        return data
    if "none" in data:
        return None
    if "tuple" in data:
        return tuple(_decode(c) for c in data["tuple"])
    if "list" in data:
        return [_decode(c) for c in data["list"]]
    if "ordered" in data:
        return collections.OrderedDict((k, _decode(c)) for k, c in data["ordered"])
    if "dict" in data:
        return {k: _decode(c) for k, c in data["dict"]}
    children = [_decode(c) for c in data["namedtuple"]]
    module, name = data["class"]
    return _named_tuple(module, name, tuple(data["fields"]))(*children)


def _named_tuple(module: str, name: str, fields: tuple[str, ...]) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if (
        isinstance(found, type)
        and issubclass(found, tuple)
        and getattr(found, "_fields", None) == fields
    ):
        return found
    return collections.namedtuple(name.rsplit(".", 1)[-1], fields, rename=True)
