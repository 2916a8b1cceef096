"""Names of places in a user's program: source lines, scopes, modules, functions; and
the trip counts that users state for `while` loops there."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from rhino_jax.ir.op import Op, RegionCall, RegionKind, Source
from rhino_jax.ir.program import Program, WhileTrips


_LINE = re.compile(r"(?P<file>.+):(?P<line>\d+)")
_NUMBER = re.compile(r"_\d+$")


def path_glob(key: str) -> re.Pattern[str]:
    """Return the pattern of a glob over tree paths, whose brackets are no sets.

    Numbers may be ranges, as tables fold them: `[0..11]`, every second `[0,2..10]`, and
    `[0,4]`.
    """
    ranges = iter(_RANGE.findall(key))
    glob = fnmatch.translate(_RANGE.sub(_A_RANGE, key).replace("[", "[[]"))
    return re.compile(re.sub(_A_RANGE, lambda _: _one_of(*next(ranges)), glob))


_RANGE = re.compile(r"(\d+)(?:\.\.(\d+)|,(\d+)(?:\.\.(\d+))?)")
_A_RANGE = "\ue000"
"""Private character that stands for a range in a glob."""


def _one_of(low: str, high: str, second: str, last: str) -> str:
    step = int(second) - int(low) if second else 1
    numbers = range(int(low), int(high or last or second) + 1, max(step, 1))
    return f"0*(?:{'|'.join(map(str, numbers))})"  # `layer_00` folds as 0


def on_line(key: str) -> Callable[[Source], bool] | None:
    """Return a predicate of sources for a key like `model.py:61`; None for any other
    key."""
    line = _LINE.fullmatch(key)
    if line is None:
        return None
    ending, number = "/" + line["file"].lstrip("/"), int(line["line"])

    def is_there(source: Source) -> bool:
        return source.line == number and ("/" + source.file).endswith(ending)

    return is_there


def in_scope(key: str) -> Callable[[str], str | None]:
    """Return a function from a name stack's scopes to the outermost scope that a glob
    matches, or None."""
    pattern = re.compile(fnmatch.translate(key.strip("/")))

    @functools.cache
    def scope(scopes: str) -> str | None:
        return next((p for p in prefixes(scopes) if pattern.fullmatch(p)), None)

    return scope


def at_place(key: str) -> Callable[[Source], bool]:
    """Return a predicate of sources, forward and backward, for a place in the user's
    code.

    Args:
      key: a line (`model.py:61`), a glob over scopes (`encoder/layer_*`), over a single
        scope without its number (`BatchNorm`: all Flax modules of that class), or over
        functions (`batch_norm`).
    """
    is_on_line = on_line(key)
    if is_on_line is not None:
        return is_on_line
    scope, one = in_scope(key), re.compile(fnmatch.translate(key))

    @functools.cache
    def is_there(scopes: str, function: str) -> bool:
        parts = [*scopes.split("/"), function, *function.split(".")]
        names = {n for p in parts for n in (p, _NUMBER.sub("", p)) if n}
        return scope(scopes) is not None or any(map(one.fullmatch, names))

    return lambda source: is_there(source.scopes, source.function)


def known_places(program: Program) -> list[str]:
    """Return the lines and scopes of a program, to suggest in place of an unknown
    one."""
    lines: dict[str, None] = {}
    scopes: dict[str, None] = {}
    for op in program.ops:
        source = op.source
        if source.file and not source.is_backward:
            lines[f"{source.file.rsplit('/', 1)[-1]}:{source.line}"] = None
        scopes.update(dict.fromkeys(prefixes(source.scopes)))
    return [*lines, *scopes]


def prefixes(scopes: str) -> Iterator[str]:
    """Yield the prefixes of a scope path: `a`, `a/b` and `a/b/c` of `a/b/c`."""
    end = -1
    while scopes and (end := scopes.find("/", end + 1)) != -1:
        yield scopes[:end]
    if scopes:
        yield scopes


EVERYWHERE = ""
"""The place of a trip count that is stated for all loops."""


def loops_ended_by_data(program: Program) -> Iterator[tuple[Op, RegionCall]]:
    """Yield the `while` loops whose trip count does not follow from the program."""
    for op in program.ops:
        call = op.call
        if call is None or call.kind is not RegionKind.WHILE:
            continue
        if not call.is_trip_count_known:
            yield op, call


def with_while_trips(program: Program, stated: WhileTrips) -> Program:
    """Return the program with trip counts as stated; where several places match a loop,
    the last one holds."""
    if not stated:
        return program
    places = [
        (None if place == EVERYWHERE else at_place(place), count)
        for place, count in stated
    ]
    ops = list(program.ops)
    for op, call in loops_ended_by_data(program):
        for is_there, count in places:
            if is_there is None or is_there(op.source):
                ops[op.id] = replace(op, call=replace(call, trip_count=count))
    return replace(program, ops=tuple(ops), while_trips=stated)
