from __future__ import annotations

import collections
import json
import sys
from dataclasses import dataclass
from typing import NamedTuple

import jax
import pytest

from rhino_jax.plan.files.schema import tree_from_json, tree_to_json


class Point(NamedTuple):
    x: object
    y: object


@jax.tree_util.register_dataclass
@dataclass
class Module:
    weight: object
    bias: object


@jax.tree_util.register_pytree_node_class
class Strict:
    """A container that refuses leaves it does not expect."""

    def __init__(self, a, b):
        if isinstance(a, int):
            raise TypeError("no integers, please")
        self.a, self.b = a, b

    def tree_flatten(self):
        return (self.a, self.b), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def round_trip(tree):
    leaves, structure = jax.tree.flatten(tree)
    data = json.loads(json.dumps(tree_to_json(structure)))
    new, positions = tree_from_json(data, tuple(range(len(leaves))))
    placed = [None] * new.num_leaves
    for position, leaf in zip(positions, leaves, strict=True):
        placed[position] = leaf
    return jax.tree.unflatten(new, placed)


@pytest.mark.parametrize(
    "tree",
    [
        "leaf",
        (),
        ("a", ["b", {"z": "c", "a": "d"}], None, {}),
        {3: "three", 1: "one"},
        collections.OrderedDict([("z", "first"), ("a", "second")]),
        Point("x", [Point("y", "z")]),
    ],
)
def test_plain_containers_come_back_as_they_were(tree) -> None:
    back = round_trip(tree)
    assert back == tree
    assert jax.tree.structure(back) == jax.tree.structure(tree)


def test_a_default_dict_comes_back_as_a_dict() -> None:
    tree = collections.defaultdict(list, {"b": "x", "a": "y"})
    assert round_trip(tree) == {"a": "y", "b": "x"}


def test_a_named_tuple_of_an_unknown_class_keeps_its_fields(
    monkeypatch,
) -> None:
    structure = jax.tree.structure(Point("x", "y"))
    data = tree_to_json(structure)
    monkeypatch.delattr(sys.modules[__name__], "Point")
    new, positions = tree_from_json(data, (0, 1))
    back = jax.tree.unflatten(new, ["a", "b"])
    assert (back.x, back.y) == ("a", "b")
    assert type(back).__name__ == "Point"
    assert positions == (0, 1)


def test_a_dataclass_comes_back_as_a_dict_with_its_leaves_in_place() -> None:
    # Fields are listed as declared, keys of a dict sorted: leaves must follow.
    assert round_trip([Module("w", "b"), "end"]) == [
        {"weight": "w", "bias": "b"},
        "end",
    ]


def test_a_container_that_refuses_stand_ins_has_numbered_children() -> None:
    assert round_trip({"s": Strict("a", ["b"])}) == {"s": {"0000": "a", "0001": ["b"]}}


def test_nothing_in_a_file_imports_code() -> None:
    data = {"namedtuple": [0], "class": ["antigravity", "X"], "fields": ["x"]}
    tree_from_json(data, (0,))
    assert "antigravity" not in sys.modules


def test_optax_state_keeps_its_classes() -> None:
    optax = pytest.importorskip("optax")
    params = {"w": jax.numpy.zeros(3)}
    state = optax.adamw(1e-3).init(params)
    assert jax.tree.structure(round_trip(state)) == jax.tree.structure(state)


def test_equinox_modules_come_back_by_field() -> None:
    equinox = pytest.importorskip("equinox")
    module = equinox.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    back = round_trip(module)
    assert back["layers"][0]["weight"].shape == (4, 2)
    assert len(jax.tree.leaves(back)) == len(jax.tree.leaves(module))
