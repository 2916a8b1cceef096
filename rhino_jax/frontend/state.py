"""State: the results that replace arguments in the next call, and donated arguments.

A train step returns its new parameters and optimizer state; they must keep the sharding
that the next call expects. Results are matched with donated arguments first. Ties with
other arguments need another reason: the result has the argument's name (or key), or its
structure. A single array of the same shape is no reason: `tanh(x @ w)` replaces no `x`,
unless calls show that it does (see `rhino_jax.runtime.buffers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any

import jax
from jax.tree_util import (
    FlattenedIndexKey,
    SequenceKey,
    keystr,
    tree_flatten_with_path,
)

from rhino_jax._compat import jaxpr_consts, open_jaxpr
from rhino_jax.frontend.call import Call
from rhino_jax.frontend.leaves import Leaves
from rhino_jax.frontend.objects.held import Written
from rhino_jax.frontend.parameters import Parameters
from rhino_jax.frontend.tracing.captured import CapturedReferences
from rhino_jax.ir.program import Program


_DEPTH = 2
"""Largest depth below an argument or the result at which a subtree may start."""


@dataclass(frozen=True, slots=True)
class _Subtree:
    """A subtree of the arguments or of the result.

    Attributes:
      name: the key or attribute that leads to it ("" for a position).
      leaves: positions of its arrays among all arrays.
      shape_of: its key for matching: path, shape and type of each array.
      depth: the depth at which it starts.
      is_small: whether it holds nothing but scalars.
      is_told: whether its structure identifies it: it has keys or attributes, or arrays
        of several shapes.
    """

    name: str
    leaves: tuple[int, ...]
    shape_of: Any
    depth: int
    is_small: bool
    is_told: bool


def match_state(
    arguments: Leaves,
    donated: Sequence[bool],
    roots: Sequence[tuple[str, str, Any]],
    result: Leaves,
    out_avals: Sequence[tuple[tuple[int, ...], str]],
    in_avals: Sequence[tuple[tuple[int, ...], str]],
    returned: Sequence[int | None],
) -> dict[int, int]:
    """Return position of a result array → position of the argument array that it
    replaces.

    Args:
      arguments, result: the leaves of the call and of its result.
      returned: position of the argument array that each result array is, if any; it
        replaces no other.
      donated: whether each argument array is donated.
      roots: (name, tree path, argument) of every top-level argument.
      out_avals, in_avals: (shape, type) of every result and argument array.
    """
    sources = _subtrees(arguments, in_avals, roots)
    value = jax.tree.unflatten(result.tree, list(result.values))
    targets = _subtrees(result, out_avals, [("", "out", value)])
    tied: dict[int, int] = {}
    used: set[int] = set()

    def can_replace(out: int, argument: int) -> bool:
        return returned[out] in (None, argument)

    def match(is_donated: bool) -> None:
        able = [
            s for s in sources if all(donated[i] for i in s.leaves) or not is_donated
        ]
        # Of subtrees as deep, those with the name of an argument come first.
        names = {s.name for s in able} - {""}
        for target in sorted(targets, key=lambda t: (t.depth, t.name not in names)):
            if any(i in tied for i in target.leaves):
                continue
            fitting = [
                s
                for s in able
                if s.shape_of == target.shape_of
                and used.isdisjoint(s.leaves)
                and all(map(can_replace, target.leaves, s.leaves))
            ]
            source = _choose(target, fitting, is_donated)
            if source is not None:
                tied.update(zip(target.leaves, source.leaves, strict=True))
                used.update(source.leaves)

    if any(donated):
        match(is_donated=True)
        # Match the remaining donated arrays by the ends of their paths.
        ends: dict[tuple[str, Any], list[int]] = {}
        in_paths, out_paths = arguments.array_paths, result.array_paths
        for i, path in enumerate(in_paths):
            if donated[i] and i not in used:
                ends.setdefault((last_key(path), in_avals[i]), []).append(i)
        for o, path in enumerate(out_paths):
            candidates = ends.get((last_key(path), out_avals[o]), ())
            free = [i for i in candidates if i not in used and can_replace(o, i)]
            if o not in tied and free:
                pairs = {i: [in_paths[i][::-1], path[::-1]] for i in free}
                shared = {i: commonprefix(x) for i, x in pairs.items()}  # noqa: RUF071
                tied[o] = max(free, key=lambda i: len(shared[i]))
                used.add(tied[o])
    match(is_donated=False)
    return tied


def _choose(
    target: _Subtree, fitting: Sequence[_Subtree], is_donated: bool
) -> _Subtree | None:
    named = [s for s in fitting if s.name and s.name == target.name]
    if not (named or is_donated):
        # A loss is not the new learning rate, a hidden layer not the new batch.
        is_high = target.depth < _DEPTH
        fitting = [
            s
            for s in fitting
            if not target.is_small
            and (s.is_told or (is_high and s.depth == 0 and len(s.leaves) > 1))
        ]
    return next(iter([*named, *fitting]), None)


def with_ties(program: Program, ties: Mapping[int, int]) -> Program:
    """Return the program with more results that replace arguments.

    Args:
      program: the traced program.
      ties: positions of results → positions of arguments.
    """
    outputs = list(program.outputs)
    for out, argument in ties.items():
        path = f"out: {program.inputs[argument].path}"
        outputs[out] = replace(outputs[out], path=path, state_of=argument)
    return replace(program, outputs=tuple(outputs))


def last_key(path: str) -> str:
    """Return the last key of a tree path: `w` of `params['a'].w`, `'a'` of `x['a']`."""
    cut = max(path.rfind("["), path.rfind("."))
    return path[cut:].strip("[].'\"") if cut >= 0 else path


def _subtrees(
    leaves: Leaves, avals: Sequence[Any], roots: Sequence[tuple[str, str, Any]]
) -> list[_Subtree]:
    """Return the subtrees of the arguments or of the result, the largest first.

    Args:
      leaves: their leaves.
      avals: (shape, type) of every array.
      roots: (name, tree path, value) of each of them.
    """
    place = {p: i for i, p in enumerate(leaves.positions)}
    found: list[_Subtree] = []

    def visit(name: str, root: str, value: Any, first: int, depth: int) -> int:
        """Add the subtrees of a value whose leaves start at a position, and return the
        position after them."""
        positions = range(first, first + len(jax.tree.leaves(value)))
        arrays = tuple(place[p] for p in positions if p in place)
        if arrays:
            held = tuple(avals[place[p]] if p in place else None for p in positions)
            is_small = all(not avals[i][0] for i in arrays)
            is_told = len(set(held)) > 1 or any(
                not isinstance(key, SequenceKey | FlattenedIndexKey)
                for path, _ in tree_flatten_with_path(value)[0]
                for key in path
            )
            # By paths: the structure of an object may number other objects of the
            # call, too.
            below = tuple(leaves.paths[p].removeprefix(root) for p in positions)
            found.append(
                _Subtree(name, arrays, (below, held), depth, is_small, is_told)
            )
        if depth < _DEPTH:
            for path, child in tree_flatten_with_path(
                value, is_leaf=lambda x: x is not value
            )[0]:
                if child is value:
                    break
                inner = root + keystr(path)
                first = visit(_name(path), inner, child, first, depth + 1)
        return positions.stop

    first = 0
    for root in roots:
        first = visit(*root, first, 0)
    return sorted(found, key=lambda s: s.depth)


def _name(path: Any) -> str:
    text = keystr(path)
    is_position = text.startswith("[") and text[1:-1].isdigit()
    return "" if is_position else text.strip("[].'\"")


@dataclass(frozen=True, slots=True)
class Ends:
    """The inputs and outputs of a traced function.

    Attributes:
      donated: whether each argument array is donated.
      paths: tree paths of all results; one that replaces an argument has its path.
      state_of: position of the argument array that each result replaces; None where it
        replaces none.
    """

    donated: tuple[bool, ...]
    paths: tuple[str, ...]
    state_of: tuple[int | None, ...]


def tie(
    parameters: Parameters,
    call: Call,
    result: Leaves,
    written: Written | None,
    outs: Sequence[Any],
    captured: CapturedReferences,
    closed: Any,
) -> Ends:
    """Tie results to the arguments that they replace.

    Args:
      parameters: the parameters of the function.
      call: the call.
      result: the leaves of its result.
      written: the values to write back after the result; None where there are no
        objects.
      outs: shape and type of every result, and of every array that is written back;
        those of captured references are the last.
      captured: the references, the last constants of the function.
      closed: its closed jaxpr.
    """
    arguments, args, kwargs = call.leaves, call.args, call.kwargs
    count, in_paths = len(result.positions), arguments.array_paths
    outs, _ = captured.split(outs)
    in_avals, out_avals = _avals(arguments.arrays), _avals(outs)
    keys: list[str | int] = [
        path[1].key if path[0].idx == 1 else path[1].idx
        for path, _ in tree_flatten_with_path((tuple(args), dict(kwargs)))[0]
    ]
    donated = tuple(parameters.is_donated(keys[p]) for p in arguments.positions)
    named = zip(parameters.names(len(args)), args, strict=True)
    jaxpr = open_jaxpr(closed)
    places = {id(v): i for i, v in enumerate(jaxpr.invars)}
    state = match_state(
        arguments,
        donated,
        [(name, name, value) for name, value in (*named, *sorted(kwargs.items()))],
        result,
        out_avals[:count],
        in_avals,
        [places.get(id(v)) for v in jaxpr.outvars],
    )
    paths = [*result.array_paths]
    if written is not None:
        ties = {
            o: i for o, i in written.replaced.items() if out_avals[o] == in_avals[i]
        }
        donated = written.donated(donated, ties.values())
        state = {o: i for o, i in state.items() if i not in ties.values()} | ties
        paths += written.paths(count)
    first = len(in_paths) + len(jaxpr_consts(closed)) - len(captured.references)
    replaced = [(state.get(o), path) for o, path in enumerate(paths)]
    ends = [(i, path if i is None else f"out: {in_paths[i]}") for i, path in replaced]
    ends += [(first + k, f"out: {captured.names[k]}") for k in captured.written]
    return Ends(donated, tuple(path for _, path in ends), tuple(i for i, _ in ends))


def _avals(arrays: Sequence[Any]) -> list[tuple[tuple[int, ...], str]]:
    return [(tuple(x.shape), str(x.dtype)) for x in arrays]
