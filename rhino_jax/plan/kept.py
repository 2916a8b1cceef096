"""Which arguments of a program are arguments of another plan, and keep its layout.

A train step and an evaluation share parameters; a smaller last batch shares all state.
Leaves are told by tree path and shape. Where an argument has another name (`p` for
`params`, or `state.params`), it is told by its structure, as long as that is
unambiguous.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from rhino_jax.ir.blocks import Stored, stored_in_blocks
from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import Spec
from rhino_jax.plan.plan import Leaf, PlanData


_KEY = re.compile(r"\[(?:'[^']*'|\"[^\"]*\"|[^\]])*\]|\.?\w+")
"""One key of a tree path: `params`, `['w']`, `[0]`, `.mu`."""


_DEPTH = 2
"""How deep in an argument a part of another's may begin."""


Part = tuple[int, int]
"""Of a leaf, the first stage that has some of it, and how many have."""


@dataclass(frozen=True, slots=True)
class ArrayLeaf:
    """A leaf as others see it: its path in keys, and what else must be equal."""

    path: tuple[str, ...]
    kind: Hashable

    def below(self, depth: int) -> ArrayLeaf:
        """The same, seen from that many keys further down."""
        return ArrayLeaf(self.path[depth:], self.kind)


def keys_of(path: str) -> tuple[str, ...]:
    """The keys of a tree path, as `params`, `0`, `mu`, `w` of `params[0].mu['w']`.

    What is an attribute here may be a key there, and Flax's variables are themselves
    here and hold a `.value` there.
    """
    keys = _KEY.findall(path)
    if len(keys) > 1 and keys[-1] == ".value":
        keys.pop()
    return tuple(key.strip("[].'\"") for key in keys)


def arguments_of(plan: PlanData) -> tuple[Leaf, ...]:
    """The arrays of a plan's arguments; captured constants left out."""
    return plan.inputs[: len(plan.in_leaf_positions)]


def kept_specs(like: PlanData, program: Program) -> dict[int, Spec]:
    """Positions of a program's inputs → the spec of the same leaf in `like`."""
    return {i: like.inputs[k].spec for i, k in _kept(like, program).items()}


def kept_blocks(like: PlanData, program: Program) -> Stored:
    """What of a program's inputs is stored in blocks in `like`, and how."""
    stored = stored_in_blocks(like.transforms)
    if not stored:
        return {}
    return {
        (i, dim): blocks
        for i, k in _kept(like, program).items()
        for dim, blocks in stored.get(k, ())
    }


def kept_stages(like: PlanData, program: Program) -> dict[int, Part]:
    """Positions of a program's inputs → where the same leaf is in `like`; of a plan in
    one stage, and of one with several chunks of the model in every stage, nothing."""
    if like.pipeline is None or like.pipeline.group_of:
        return {}
    leaves = {i: like.inputs[k] for i, k in _kept(like, program).items()}
    return {i: (leaf.stage, leaf.num_stages) for i, leaf in leaves.items()}


def _kept(like: PlanData, program: Program) -> dict[int, int]:
    """Positions of a program's inputs → position of the same leaf in `like`."""
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
    """Which known leaf each wanted one is.

    Args:
      wanted: leaves of arguments, by position; their first key names the argument.
      known: leaves to find them among.
      specs: of the known; places that agree in all specs are not ambiguous.
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
    """A subtree, or else its children by their names: of `{"params": …, "batch_stats":
    …}` each may be a part of a whole training state."""
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
            # An array by itself is told by its argument's name only.
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
    """Where among known leaves a subtree may be: its leaves' numbers at each place.

    Of places whose last key is `name` those; else those nearest to the root. A place
    holds all of the subtree and no more.

    Args:
      wanted: paths from the subtree's root on; a single array has none.
      known: leaves to find them among.
      name: what the subtree is called.
      needs_name: whether an array by itself must have the name.
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
    # An array by itself has no structure that would tell one place from another.
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
