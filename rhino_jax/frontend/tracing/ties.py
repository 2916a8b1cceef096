"""Ties between a program's inputs and outputs: donated arguments, and results that
replace arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.tree_util import tree_flatten_with_path

from rhino_jax._compat import open_jaxpr
from rhino_jax.frontend.leaves import Leaves
from rhino_jax.frontend.objects.written import Written
from rhino_jax.frontend.parameters import Parameters
from rhino_jax.frontend.state import match_state
from rhino_jax.frontend.tracing.captured_references import CapturedReferences


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
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    arguments: Leaves,
    result: Leaves,
    written: Written | None,
    outs: Sequence[Any],
) -> Ends:
    """Tie results to the arguments that they replace.

    Args:
      parameters: the parameters of the function.
      args, kwargs: the call, its objects split.
      arguments, result: the leaves of the call and of its result.
      written: the values to write back after the result; None where there are no
        objects.
      outs: shape and type of every result, and of every array that is written back.
    """
    count, in_paths = len(result.positions), arguments.array_paths
    in_avals, out_avals = _avals(arguments.arrays), _avals(outs)
    donated = _asked(parameters, args, kwargs, arguments)
    state = match_state(
        arguments,
        donated,
        _roots(parameters, args, kwargs),
        result,
        out_avals[:count],
        in_avals,
    )
    paths = [*result.array_paths]
    if written is not None:
        ties = {
            o: i for o, i in written.replaced.items() if out_avals[o] == in_avals[i]
        }
        donated = written.donated(donated, ties.values())
        state = {o: i for o, i in state.items() if i not in ties.values()} | ties
        paths += written.paths(count)
    return Ends(
        donated,
        tuple(
            f"out: {in_paths[state[o]]}" if o in state else path
            for o, path in enumerate(paths)
        ),
        tuple(state.get(o) for o in range(len(outs))),
    )


def with_captured(ends: Ends, captured: CapturedReferences, jaxpr: Any) -> Ends:
    """Return the ends extended by the results that are written back to captured
    references.

    Args:
      ends: the function's own arguments and results.
      captured: the references, the last constants of the jaxpr.
      jaxpr: the function's jaxpr, closed.
    """
    if not captured.written:
        return ends
    opened = open_jaxpr(jaxpr)
    count = len(opened.invars) + len(opened.constvars)
    first = count - len(captured.references)
    return replace(
        ends,
        paths=(*ends.paths, *(f"out: {captured.names[k]}" for k in captured.written)),
        state_of=(*ends.state_of, *(first + k for k in captured.written)),
    )


def _avals(arrays: Sequence[Any]) -> list[tuple[tuple[int, ...], str]]:
    return [(tuple(x.shape), str(x.dtype)) for x in arrays]


def _roots(
    parameters: Parameters, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """Return (name, argument) of every argument, in the order of the leaves."""
    roots = list(zip(parameters.names(len(args)), args, strict=True))
    return roots + [(key, kwargs[key]) for key in sorted(kwargs)]


def _asked(
    parameters: Parameters,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    arguments: Leaves,
) -> tuple[bool, ...]:
    """Return whether the user donates each argument array."""
    if not parameters.donated:
        return (False,) * len(arguments.positions)
    keys: list[str | int] = [
        path[1].key if path[0].idx == 1 else path[1].idx
        for path, _ in tree_flatten_with_path((tuple(args), dict(kwargs)))[0]
    ]
    return tuple(parameters.is_donated(keys[p]) for p in arguments.positions)
