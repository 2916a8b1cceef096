"""Layouts reused from another plan: the arguments that two programs have in common.

A train step and an evaluation share parameters; a smaller last batch shares all state.
Leaves are matched by tree path and shape. If an argument has another name (`p` for
`params`, or `state.params`), it is matched by its structure, provided that the match is
unambiguous.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import Spec
from rhino_jax.ir.transform import Stored, stored_in_blocks
from rhino_jax.plan.plan import Leaf, PlanData


_KEY = re.compile(r"\[(?:'[^']*'|\"[^\"]*\"|[^\]])*\]|\.?\w+")
"""One key of a tree path: `params`, `['w']`, `[0]`, `.mu`."""


_DEPTH = 2
"""Deepest level of an argument at which subtrees are matched with another's."""


Part = tuple[int, int]
"""(first stage that owns a part of a leaf, number of stages that do)."""


@dataclass(frozen=True, slots=True)
class ArrayLeaf:
    """A leaf for matching.

    Attributes:
      path: keys of its tree path.
      kind: shape, or other key, that matched leaves have in common.
    """

    path: tuple[str, ...]
    kind: Hashable

    def below(self, depth: int) -> ArrayLeaf:
        """Return the leaf with the first `depth` keys of its path removed."""
        return ArrayLeaf(self.path[depth:], self.kind)


def keys_of(path: str) -> tuple[str, ...]:
    """Return the keys of a tree path: `params`, `0`, `mu`, `w` of `params[0].mu['w']`.

    Attributes and keys compare equal, and a trailing `.value` is dropped: an attribute
    in one program may be a key in the other, and Flax's variables may appear as
    themselves or as their `.value`.
    """
    keys = _KEY.findall(path)
    if len(keys) > 1 and keys[-1] == ".value":
        keys.pop()
    return tuple(key.strip("[].'\"") for key in keys)


def arguments_of(plan: PlanData) -> tuple[Leaf, ...]:
    """Return the array leaves of a plan's arguments, without captured constants."""
    return plan.inputs[: len(plan.in_leaf_positions)]


def reused_specs(like: PlanData, program: Program) -> dict[int, Spec]:
    """Return program input position → spec of the same leaf in the plan `like`."""
    return {i: like.inputs[k].spec for i, k in _kept(like, program).items()}


def reused_blocks(like: PlanData, program: Program) -> Stored:
    """Return the interleaved storage of a program's inputs, as in the plan `like`."""
    stored = stored_in_blocks(like.transforms)
    if not stored:
        return {}
    return {
        (i, dim): blocks
        for i, k in _kept(like, program).items()
        for dim, blocks in stored.get(k, ())
    }


def reused_stages(like: PlanData, program: Program) -> dict[int, Part]:
    """Return program input position → stages that own the same leaf in the plan `like`.

    Empty if `like` has a single stage, or several chunks per stage.
    """
    if like.pipeline is None or like.pipeline.group_of:
        return {}
    leaves = {i: like.inputs[k] for i, k in _kept(like, program).items()}
    return {i: (leaf.stage, leaf.num_stages) for i, leaf in leaves.items()}


def _kept(like: PlanData, program: Program) -> dict[int, int]:
    """Return program input position → position of the same leaf in the plan `like`."""
    known = arguments_of(like)
    wanted = {
        i: ArrayLeaf(keys_of(entry.path), program.values[entry.value].shape)
        for i, entry in enumerate(program.inputs)
        if not entry.is_const
    }
    every = [ArrayLeaf(keys_of(leaf.path), leaf.shape) for leaf in known]
    return same_leaves(wanted, every, [leaf.spec for leaf in known])


def same_leaves(
    wanted: Mapping[int, ArrayLeaf], known: Sequence[ArrayLeaf], specs: Sequence[Spec]
) -> dict[int, int]:
    """Match leaves of two programs: wanted position → position of the known leaf.

    Args:
      wanted: leaves to match, by position; the first key of a path names the argument.
      known: leaves to match them with.
      specs: specs of the known leaves; several matches that agree in all specs are
        unambiguous.
    """
    exact = {array: k for k, array in enumerate(known)}
    found = {i: exact[array] for i, array in wanted.items() if array in exact}
    for name, members in _by_argument(wanted).items():
        if found.keys().isdisjoint(members):
            below = {i: a.below(1) for i, a in members.items()}
            found.update(_located(below, name, known, specs))
    return found


def _located(
    wanted: Mapping[int, ArrayLeaf],
    name: str,
    known: Sequence[ArrayLeaf],
    specs: Sequence[Spec],
    depth: int = 0,
) -> dict[int, int]:
    """Match a subtree, or else its children by their names.

    Each child of `{"params": …, "batch_stats": …}` may be a part of a whole training
    state.
    """
    places = find_places(list(wanted.values()), known, name)
    if depth:
        length = len(next(iter(wanted.values())).path)
        roots = [known[place[0]].path[: -length or None] for place in places]
        places = [p for p, r in zip(places, roots, strict=True) if r and r[-1] == name]
    if places:
        is_clear = agree(places, specs)
        return dict(zip(wanted, places[0], strict=True)) if is_clear else {}
    found: dict[int, int] = {}
    if depth < _DEPTH:
        for key, members in _by_argument(wanted).items():
            below = {i: a.below(1) for i, a in members.items()}
            # A single array is matched by its argument's name only.
            if all(a.path for a in below.values()):
                found.update(_located(below, key, known, specs, depth + 1))
    return found


def find_places(
    wanted: Sequence[ArrayLeaf],
    known: Sequence[ArrayLeaf],
    name: str = "",
    *,
    needs_name: bool = True,
) -> list[list[int]]:
    """Return the places of a subtree among known leaves: its leaves' positions at each.

    Places whose last key is `name` are preferred; else those nearest to the root. A
    place holds all of the subtree and nothing else.

    Args:
      wanted: leaves with paths from the subtree's root; empty for a single array.
      known: leaves to search.
      name: name of the subtree.
      needs_name: whether a single array must have the name.
    """
    exact = {array: k for k, array in enumerate(known)}
    sizes: dict[tuple[str, ...], int] = {}
    for array in known:
        for depth in range(len(array.path) + 1):
            root = array.path[:depth]
            sizes[root] = sizes.get(root, 0) + 1
    first = wanted[0]
    depth = len(first.path)
    roots = [
        a.path[: len(a.path) - depth]
        for a in known
        if a.kind == first.kind and a.path[len(a.path) - depth :] == first.path
    ]
    full = [
        root
        for root in roots
        if sizes[root] == len(wanted)
        and all(ArrayLeaf((*root, *a.path), a.kind) in exact for a in wanted)
    ]
    named = [root for root in full if root and name and root[-1] == name]
    if not named and not depth and needs_name:
        return []
    nearest = min(map(len, full), default=0)
    # A single array has no structure that would distinguish places.
    chosen = named or [root for root in full if len(root) == nearest or not depth]
    return [
        [exact[ArrayLeaf((*root, *a.path), a.kind)] for a in wanted] for root in chosen
    ]


def agree(places: Sequence[Sequence[int]], specs: Sequence[Spec]) -> bool:
    """Whether all places have equal specs."""
    return len({tuple(specs[k] for k in place) for place in places}) == 1


def _by_argument(wanted: Mapping[int, ArrayLeaf]) -> dict[str, dict[int, ArrayLeaf]]:
    found: dict[str, dict[int, ArrayLeaf]] = {}
    for i, array in wanted.items():
        found.setdefault(array.path[0] if array.path else "", {})[i] = array
    return found
