"""The content of a plan file: a plan as JSON data, and back.

It is the plan's record, and nothing else, as `rhino_jax.utils.codec` writes it, but for
meshes (devices are not portable). Axes are named in the specs of inputs and outputs,
which people read, and numbered elsewhere. Decisions that several stages share are
written once, then as the position of the first stage that has them.

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
from collections.abc import Hashable, Mapping, Sequence
from importlib import metadata
from typing import Any

import jax

from rhino_jax.plan.decisions import Decisions
from rhino_jax.plan.fingerprint import outline_of
from rhino_jax.plan.plan import PlanData
from rhino_jax.utils.codec import from_json, saved_fields, to_json


SCHEMA_VERSION = 9
FORMAT = "rhino_jax plan"

KEYS = ("format", "schema_version", *saved_fields(PlanData), "checksum")
"""Keys of a plan file, in the order in which they are written: those that people read,
and then the others."""


def plan_to_dict(plan: PlanData) -> dict[str, Any]:
    """Return the content of a plan file, without its checksum."""
    data = to_json(plan)
    names = [name for name, _ in plan.mesh_axes]
    for leaf in (*data["inputs"], *data["outputs"]):
        leaf["spec"] = [[names[a] for a in dim] for dim in leaf["spec"]]
    first: dict[int, int] = {}
    for i, stage in enumerate(plan.stages):
        known = first.setdefault(id(stage.decisions), i)
        if known != i:
            data["stages"][i]["decisions"] = known
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        **data,
        "versions": data["versions"] or current_versions(),
        "outline": outline_of(plan),
        "in_tree": tree_to_json(plan.in_tree),
        "out_tree": tree_to_json(plan.out_tree),
    }


def plan_from_dict(data: Mapping[str, Any]) -> PlanData:
    """Convert the content of a plan file to a plan without a mesh.

    Raises:
      KeyError, TypeError, ValueError: the content does not fit the schema.
    """
    saved = {name: data[name] for name in saved_fields(PlanData)}
    place = {name: i for i, (name, _) in enumerate(data["mesh_axes"])}
    for end in "inputs", "outputs":
        saved[end] = [
            x | {"spec": [[place[name] for name in dim] for dim in x["spec"]]}
            for x in data[end]
        ]
    for end in "in", "out":
        keys = f"{end}_tree", f"{end}_leaf_positions"
        tree, positions = (data[key] for key in keys)
        saved.update(zip(keys, tree_from_json(tree, positions), strict=True))
    decisions: list[Decisions] = []
    for stage in data["stages"]:
        own = stage["decisions"]
        is_shared = isinstance(own, int)
        decisions.append(decisions[own] if is_shared else from_json(Decisions, own))
    saved["stages"] = [
        stage | {"decisions": own}
        for stage, own in zip(data["stages"], decisions, strict=True)
    ]
    return from_json(PlanData, saved)


def current_versions() -> dict[str, str]:
    """Return the versions of the installed rhino_jax and JAX."""
    try:
        ours = metadata.version("rhino_jax")
    except metadata.PackageNotFoundError:
        ours = "not installed"
    return {"rhino_jax": ours, "jax": jax.__version__}


def tree_to_json(tree: Any) -> Any:
    """Convert a PyTreeDef to JSON data; leaves are numbered in order."""
    if tree is None:
        return None
    return _encode(tree, iter(range(tree.num_leaves)))


def tree_from_json(data: Any, positions: Sequence[int]) -> tuple[Any, tuple[int, ...]]:
    """Convert the result of `tree_to_json` back, with the new positions of its arrays.

    A container that was restored as a dict may list its leaves in another order.

    Args:
      data: result of `tree_to_json`.
      positions: positions of the array leaves in the original tree.
    """
    if data is None:
        return None, tuple(positions)
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
