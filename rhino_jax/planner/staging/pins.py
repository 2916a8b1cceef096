"""Stage pins: path, line or scope → stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rhino_jax.errors import PinError, nearest
from rhino_jax.ir.places import in_scope, known_places, on_line, path_glob
from rhino_jax.passes.staged.apart import Apart
from rhino_jax.passes.staged.sides import Sides
from rhino_jax.passes.staged.stacks import Unstacked
from rhino_jax.plan.kept import Part


def without_stages(
    pinned: Mapping[str, Any], stages: int
) -> tuple[dict[str, Any], dict[str, int]]:
    """Separate layout pins from stage pins, which are numbers.

    Args:
      pinned: key → spec or stage.
      stages: the number of stages.
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


PartOf = tuple[int, int]
"""(Position of a stack, index of one of its parts)."""

Chain = tuple[tuple[int, ...], ...]
"""For each part of a stack, the forward ops that read it, as positions in the body."""


def pinned_ops(
    pins: Mapping[str, int],
    of_step: Unstacked,
    apart: Apart,
    sides: Sides,
    kept: Mapping[int, Part],
) -> tuple[dict[int, int], list[Chain]]:
    """Return the ops that stage pins and split stacks fix to stages.

    A forward op is fixed to a stage if the user pins it, or if it reads a part of a
    stack whose stages are known; the readers of parts of other stacks are fixed to
    consecutive stages.

    Args:
      pins: key → stage. A path or glob stands for the ops that read the argument.
      of_step: the step, with layer stacks split.
      apart, sides: a micro-batch of it, and its passes.
      kept: input of the step → its stages in a plan whose cut is taken over, except for
        pins. The first op that reads it is there: more stages may have copies.
    Returns:
      Position of an op in the body → stage; chains.
    Raises:
      PinError: a key matches nothing, or an op is pinned twice.
    """
    found: dict[int, int] = {}
    said: dict[int, str] = {}
    paths = [entry.path for entry in of_step.program.inputs]
    stack_of = {i: k for k, s in enumerate(of_step.stacks) for i in s.slots}
    # (Input, its stack part or None, forward ops that read no other state).
    reads: list[tuple[int, PartOf | None, list[int]]] = []
    for value, sources in zip(sides.region.inputs[1:], apart.sources, strict=True):
        state = sources - apart.data
        readers = [i for i in sides.readers.get(value, ()) if i in sides.forward]
        parted = (of_step.inputs[i] for i in state)
        parts = {(stack_of[e.whole], e.part) for e in parted if e.part is not None}
        whose = next(iter(parts)) if len(parts) == 1 else None
        reads += [(i, whose, readers) for i in state if readers]
    chains: list[Chain] = []
    for k, stack in enumerate(of_step.stacks):
        links = [
            {i for _, end, mine in reads if end == (k, part) for i in mine}
            for part in range(len(stack.sizes))
        ]
        if not all(links):
            continue
        if stack.first is None:
            chains.append(tuple(tuple(sorted(link)) for link in links))
            continue
        for part, link in enumerate(links, stack.first):
            found.update(dict.fromkeys(link, part))
    for key, stage in pins.items():
        glob = path_glob(key)
        ops = {i for at, _, mine in reads if glob.match(paths[at]) for i in mine}
        # Those on a line or in a scope.
        line, scope, program = on_line(key), in_scope(key), sides.program
        for i in sides.forward:
            inside = program.within(program.ops[program.body.ops[i]])
            lines = (op.source for op, _ in inside)
            if any(line(x) if line else scope(x.scopes) is not None for x in lines):
                ops.add(i)
        if not ops:
            places = known_places(of_step.program)
            if key in paths:
                raise PinError(
                    f"pin {key!r} of a stage is no parameter that a micro-batch reads"
                    " forward.",
                    where=repr(key),
                    numbers="the batch is read wherever it is needed, state after the"
                    " loop is where its parameter is",
                    fix="pin a parameter that its first op reads, or that op's line.",
                )
            raise PinError(
                f"pin {key!r} of a stage matches nothing that a micro-batch reads"
                " forward, no source line and no scope."
                f"{nearest(key, [*paths, *places])}",
                where=repr(key),
                numbers=f"{len(paths)} paths, {len(places)} lines and scopes",
                fix="write a path or glob of parameters, a line as 'model.py:61', or a"
                " scope.",
            )
        for i in sorted(ops):
            if found.setdefault(i, stage) != stage:
                raise _pinned_twice(key, stage, said.get(i, "a stack"), found[i])
            said[i] = key
        for chain in chains:
            if sum(1 for link in chain if ops.intersection(link)) > 1:
                raise _pinned_twice(key, stage, "a stack", stage + 1)
    for at, end, mine in reads:
        stage, count = kept.get(of_step.inputs[at].whole, (0, 0))
        if count == 1 and end is None:
            found.setdefault(min(mine), stage)
    return found, chains


def _pinned_twice(key: str, stage: int, other: str, already: int) -> PinError:
    return PinError(
        f"pin {key!r} and {other!r} say two stages of one op.",
        where=repr(key),
        numbers=f"stages {stage} and {already}",
        fix="take one of them out; an op runs in one stage.",
    )
