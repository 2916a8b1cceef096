"""Match the arrays of a pytree to a plan's arguments."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from rhino_jax.errors import RhinoError
from rhino_jax.frontend.call import array_type
from rhino_jax.frontend.leaves import Leaves
from rhino_jax.ir.printer import format_array
from rhino_jax.ir.spec import axes_text, format_spec
from rhino_jax.plan.kept import ArrayLeaf, agree, arguments_of, find_places, keys_of
from rhino_jax.plan.plan import Leaf, PlanData


Kind = Callable[[tuple[int, ...], str], Any]
"""Function of shape and dtype whose value must be equal for two arrays to match."""


def as_planned(shape: tuple[int, ...], dtype: str) -> Any:
    return shape, dtype


def of_equal_rank(shape: tuple[int, ...], dtype: str) -> Any:
    return len(shape), dtype


@dataclass(frozen=True, slots=True)
class ArgumentSubtree:
    """Arrays of a pytree, relative to one of its nodes.

    Attributes:
      name: the key of the node, if it has one.
      numbers: positions of its arrays in the whole pytree.
      arrays: these arrays, with paths relative to the node.
    """

    name: str
    numbers: tuple[int, ...]
    arrays: tuple[ArrayLeaf, ...]

    def children(self) -> Iterator[ArgumentSubtree]:
        """Yield the child subtrees, in order."""
        found: dict[str, list[int]] = {}
        for i, array in enumerate(self.arrays):
            found.setdefault(array.path[0], []).append(i)
        for key, members in found.items():
            yield ArgumentSubtree(
                key,
                tuple(self.numbers[i] for i in members),
                tuple(self.arrays[i].below(1) for i in members),
            )


def leaves_for(
    plan: PlanData,
    leaves: Leaves,
    what: str,
    kind: Kind = as_planned,
    shape_of: Callable[[Leaf], tuple[int, ...]] = lambda leaf: leaf.shape,
) -> list[Leaf]:
    """Return the plan's leaf for each array of a pytree.

    The pytree is the tuple of arguments (or of the first of them), one argument, a part
    of one, or a tuple, list or dict of such; names of a dict's keys decide where
    structure is ambiguous.

    Args:
      plan: the plan to whose arguments the arrays belong.
      leaves: leaves of the pytree, from `split_result`.
      what: name of the calling API, for messages.
      kind: property that must be equal, in addition to the tree paths.
      shape_of: the shape in which a leaf of the plan is given.
    Raises:
      RhinoError: an array matches no argument, or several with different specs.
    """
    known = arguments_of(plan)
    planned = [
        ArrayLeaf(keys_of(leaf.path), kind(shape_of(leaf), leaf.dtype))
        for leaf in known
    ]
    finder = _SubtreeFinder(what, plan, known, planned)
    types = [array_type(x) for x in leaves.arrays]
    # Paths begin with `out`.
    arrays = tuple(
        ArrayLeaf(keys_of(path)[1:], kind(shape, _type_name(dtype)))
        for path, (shape, dtype, *_) in zip(leaves.array_paths, types, strict=True)
    )
    if not arrays:
        return []
    whole = ArgumentSubtree("", tuple(range(len(arrays))), arrays)
    kind_of, _ = leaves.tree.node_data() or (None, None)
    found = finder.find(whole, is_sequence=kind_of in (tuple, list))
    return [known[found[i]] for i in range(len(arrays))]


def _type_name(dtype: Any) -> str:
    """Return JAX's canonical dtype name: float64 is float32, unless x64 is enabled."""
    found = jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
    return str(found)


_Misfits = list[tuple[ArrayLeaf, Leaf]]
"""Arrays, and the planned leaf at the place of each."""


def _distance(given: ArrayLeaf, planned: Leaf) -> tuple[float, ...] | None:
    """Return a shape's distance from a planned one; None if rank or dtype differ."""
    kind: Any = given.kind
    shape, dtype = kind
    is_near = isinstance(shape, tuple) and len(shape) == len(planned.shape)
    if not is_near or dtype != planned.dtype:
        return None
    pairs = [(a, b) for a, b in zip(shape, planned.shape, strict=True) if a != b]
    return len(pairs), sum(abs(a - b) / max(a, b) for a, b in pairs)


@dataclass(frozen=True, slots=True)
class _SubtreeFinder:
    what: str
    plan: PlanData
    known: Sequence[Leaf]
    arrays: Sequence[ArrayLeaf]

    def find(self, whole: ArgumentSubtree, *, is_sequence: bool) -> dict[int, int]:
        """Return positions of arrays → positions of known leaves."""
        if is_sequence:
            for placed in (self._in_order(whole), self._as_pair(whole)):
                if placed is not None:
                    return placed
            # Refuse a full argument list whose paths match and whose arrays do not.
            there = {
                (str(i), *self.arrays[k].path[1:]): k
                for i, members in enumerate(self._arguments())
                for k in members
            }
            if {*there} == {a.path for a in whole.arrays}:
                raise self._misfit([self._differing(whole, there)])
        return self._found(whole, is_root=True)

    def _in_order(self, whole: ArgumentSubtree) -> dict[int, int] | None:
        """Match the arrays as the plan's arguments from the first on, or None."""
        arguments = self._arguments()
        found: dict[int, int] = {}
        for part in whole.children():
            place = int(part.name)
            if place >= len(arguments):
                return None
            there = {self.arrays[k].below(1): k for k in arguments[place]}
            if set(there) != set(part.arrays):
                return None
            numbered = zip(part.numbers, part.arrays, strict=True)
            found.update((n, there[a]) for n, a in numbered)
        return found

    def _as_pair(self, whole: ArgumentSubtree) -> dict[int, int] | None:
        """Match the arrays as a pair (args, kwargs), or return None."""
        paths = {k: ("1", *array.path) for k, array in enumerate(self.arrays)}
        for i, members in enumerate(self._arguments()):
            paths |= {k: ("0", str(i), *self.arrays[k].path[1:]) for k in members}
        there = {ArrayLeaf(p, self.arrays[k].kind): k for k, p in paths.items()}
        if set(there) != set(whole.arrays):
            return None
        return {n: there[a] for n, a in zip(whole.numbers, whole.arrays, strict=True)}

    def _arguments(self) -> list[list[int]]:
        """Return the positions of each argument's known leaves, possibly none."""
        args, _ = self.plan.in_tree.children()
        ends = [*itertools.accumulate(arg.num_leaves for arg in args.children())]
        # The last list is of keyword arguments.
        found: list[list[int]] = [[] for _ in range(len(ends) + 1)]
        for k, position in enumerate(self.plan.in_leaf_positions):
            found[bisect.bisect(ends, position)].append(k)
        return found[:-1]

    def _found(self, part: ArgumentSubtree, *, is_root: bool = False) -> dict[int, int]:
        places = find_places(part.arrays, self.arrays, part.name, needs_name=False)
        if places and not agree(places, [leaf.spec for leaf in self.known]):
            raise self._ambiguous(part, places)
        if places:
            return dict(zip(part.numbers, places[0], strict=True))
        if not is_root or not all(a.path for a in part.arrays):
            raise self._nowhere(part)
        found: dict[int, int] = {}
        try:
            for child in part.children():
                found.update(self._found(child))
        except RhinoError:
            if near := self._nearest(part):
                raise self._misfit(near) from None
            raise
        return found

    def _nearest(self, part: ArgumentSubtree) -> list[_Misfits]:
        """Return the places with a part's paths where the fewest arrays differ.

        For an array by itself, the leaves with the nearest shape.
        """
        first = part.arrays[0].path
        depth, paths = len(first), {a.path for a in part.arrays}
        ranked: list[tuple[Any, _Misfits]] = []
        for array in self.arrays:
            root = array.path[: len(array.path) - depth]
            there = {
                a.path[len(root) :]: k
                for k, a in enumerate(self.arrays)
                if a.path[: len(root)] == root
            }
            if array.path[len(root) :] != first or {*there} != paths:
                continue
            is_named = bool(root) and root[-1] == part.name
            misfits = self._differing(part, there)
            if is_named or depth:
                ranked.append(((not is_named, len(misfits), len(root)), misfits))
            elif (distance := _distance(*misfits[0])) is not None:
                ranked.append(((True, *distance), misfits))
        least = min((rank for rank, _ in ranked), default=None)
        return [misfits for rank, misfits in ranked if rank == least]

    def _differing(
        self, part: ArgumentSubtree, there: Mapping[tuple[str, ...], int]
    ) -> _Misfits:
        pairs = ((a, there[a.path]) for a in part.arrays)
        return [(a, self.known[k]) for a, k in pairs if a.kind != self.arrays[k].kind]

    def _misfit(self, places: Sequence[_Misfits]) -> RhinoError:
        """Return the error of arrays that differ from the planned ones.

        Args:
          places: candidate places of the arrays, each with those that differ.
        """
        given, planned = places[0][0]
        shape, dtype = planned.shape, planned.dtype
        numbers = f"got {_kind_text(given)}, planned {format_array(dtype, shape)} as"
        numbers += f" {self._spec(planned)}"
        numbers += f" over {axes_text(self.plan.mesh_axes)}"
        if len(places[0]) > 1:
            numbers += f"; {len(places[0])} arrays differ"
        return RhinoError(
            f"{self.what}: an array is not as `{self.plan.program_name}` was planned.",
            where=" or ".join(place[0][1].path for place in places[:3]),
            numbers=numbers,
            fix="give it in this shape and type (pad a batch that is too small, or"
            " leave it out), or plan for what you have: `.plan(…)` of the function"
            " under `auto_shard`.",
        )

    def _spec(self, leaf: Leaf) -> str:
        return format_spec(leaf.spec, [name for name, _ in self.plan.mesh_axes])

    def _ambiguous(
        self, part: ArgumentSubtree, places: Sequence[Sequence[int]]
    ) -> RhinoError:
        firsts = [self.known[place[0]] for place in places]
        return RhinoError(
            f"{self.what}: {_called(part)} could be several arguments of"
            f" `{self.plan.program_name}`, which are not sharded alike.",
            where=" or ".join(leaf.path for leaf in firsts),
            numbers="; ".join(f"{leaf.path} {self._spec(leaf)}" for leaf in firsts),
            fix="say which: give the whole argument in a dict, as"
            f" {{{keys_of(firsts[0].path)[0]!r}: …}}, or all arguments in order.",
        )

    def _nowhere(self, part: ArgumentSubtree) -> RhinoError:
        if near := self._nearest(part):
            return self._misfit(near)
        first = part.arrays[0]
        path = first.path or (part.name,)
        ends = [x for x in self.known if keys_of(x.path)[-len(path) :] == path]
        like = ends or self.known
        shown = ", ".join(
            f"{x.path} {format_array(x.dtype, x.shape)}" for x in like[:3]
        )
        more = ", …" if len(like) > 3 else ""
        return RhinoError(
            f"{self.what}: {_called(part)} is no argument of"
            f" `{self.plan.program_name}`, and no part of one.",
            where=".".join(path) or "the array itself",
            numbers=f"arrays: {len(part.arrays)}, the first {_kind_text(first)}; the"
            f" plan has {shown}{more}",
            fix="give arguments as they were planned, in structure, shapes and types;"
            " keep what else there is apart.",
        )


def _called(part: ArgumentSubtree) -> str:
    return f"`{part.name}`" if part.name else "this"


def _kind_text(array: ArrayLeaf) -> str:
    kind: Any = array.kind
    shape, dtype = kind
    is_known = isinstance(shape, tuple)
    return format_array(dtype, shape) if is_known else f"{dtype} rank {shape}"
