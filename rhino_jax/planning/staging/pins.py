"""Pins that say in which stage something is: path, line or scope → stage."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rhino_jax.errors import PinError, nearest
from rhino_jax.ir.op import Op, Source
from rhino_jax.ir.places import in_scope, known_places, on_line
from rhino_jax.ir.program import Program
from rhino_jax.transform.staged.apart import Apart
from rhino_jax.transform.staged.sides import Sides
from rhino_jax.transform.staged.stacks import Unstacked


def without_stages(
    pinned: Mapping[str, Any], stages: int
) -> tuple[dict[str, Any], dict[str, int]]:
    """Pins of layouts, and pins of stages, which are numbers.

    Args:
      pinned: key → spec or stage.
      stages: how many there are to be.
    Raises:
      PinError: there is no such stage.
    """
    found = {k: v for k, v in pinned.items() if type(v) is int}
    for key, stage in found.items():
        if 0 <= stage < stages and stages > 1:
            continue
        raise PinError(
            f"pin {key!r}: there is no stage {stage}.",
            where=repr(key),
            numbers=f"{stages} stages, from 0" if stages > 1 else "one stage",
            fix=f"pin it to a stage from 0 to {stages - 1}."
            if stages > 1
            else "say how many stages, as stages=2, or pin a PartitionSpec.",
        )
    return {k: v for k, v in pinned.items() if k not in found}, found


def pinned_ops(
    pins: Mapping[str, int], of_step: Unstacked, apart: Apart, sides: Sides
) -> dict[int, int]:
    """Forward ops that have to be in one stage: what reads a part of a stack, in the
    stage of that number, and what the user pins.

    Args:
      pins: key → stage. A path or glob means the ops that read the argument.
      of_step: the step, with stacks in parts.
      apart, sides: of a micro-batch of it.
    Returns:
      Position of an op in the body → stage.
    Raises:
      PinError: a key means nothing, or an op is pinned twice.
    """
    found: dict[int, int] = {}
    said: dict[int, str] = {}
    paths = [entry.path for entry in of_step.program.inputs]
    reads = list(_reads(of_step, apart, sides))
    for _, part, mine in reads:
        if part is not None:
            found.update(dict.fromkeys(mine, part))
    for key, stage in pins.items():
        glob = re.compile(fnmatch.translate(key.replace("[", "[[]")))
        ops = {i for at, _, mine in reads if glob.match(paths[at]) for i in mine}
        ops |= set(_inside(key, sides))
        if not ops:
            raise _means_nothing(key, paths, of_step.program)
        for i in sorted(ops):
            if found.setdefault(i, stage) != stage:
                raise _pinned_twice(key, stage, said.get(i, "a stack"), found[i])
            said[i] = key
    return found


def _reads(
    of_step: Unstacked, apart: Apart, sides: Sides
) -> Iterator[tuple[int, int | None, list[int]]]:
    """(input, its part of a stack, the forward ops that read it alone of all state)."""
    for value, sources in zip(sides.lines.inputs[1:], apart.sources, strict=True):
        state = sources - apart.data
        ops = [i for i in sides.readers.get(value, ()) if i in sides.forward]
        parts = {of_step.inputs[i].part for i in state} - {None}
        part = int(next(iter(parts)) or 0) if len(parts) == 1 else None
        for i in state if ops else ():
            yield i, part, ops


def _inside(key: str, sides: Sides) -> Iterator[int]:
    """Forward ops on a line or in a scope."""
    line, scope = on_line(key), in_scope(key)

    def is_there(source: Source) -> bool:
        return line(source) if line else scope(source.scopes) is not None

    program = sides.program
    for i in sides.forward:
        if _any(program, program.ops[program.body.ops[i]], is_there):
            yield i


def _any(program: Program, op: Op, is_there: Callable[[Source], bool]) -> bool:
    if is_there(op.source):
        return True
    regions = () if op.call is None else op.call.regions
    return any(_any(program, program.ops[o], is_there) for r in regions for o in r.ops)


def _means_nothing(key: str, paths: list[str], program: Program) -> PinError:
    places = known_places(program)
    if key in paths:
        return PinError(
            f"pin {key!r} of a stage is no parameter that a micro-batch reads forward.",
            where=repr(key),
            numbers="the batch is read wherever it is needed, state after the loop is"
            " where its parameter is",
            fix="pin a parameter that its first op reads, or that op's line.",
        )
    return PinError(
        f"pin {key!r} of a stage matches nothing that a micro-batch reads forward, no"
        f" source line and no scope.{nearest(key, [*paths, *places])}",
        where=repr(key),
        numbers=f"{len(paths)} paths, {len(places)} lines and scopes",
        fix="write a path or glob of parameters, a line as 'model.py:61', or a scope.",
    )


def _pinned_twice(key: str, stage: int, other: str, already: int) -> PinError:
    return PinError(
        f"pin {key!r} and {other!r} say two stages of one op.",
        where=repr(key),
        numbers=f"stages {stage} and {already}",
        fix="take one of them out; an op runs in one stage.",
    )
