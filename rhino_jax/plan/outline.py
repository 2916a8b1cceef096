"""The ops of a program as a short text, so that a plan file can tell which one changed.

One line per op: name, operands as distances in the list of values, result types, a
digest of what else the fingerprint covers, and the source line. Compressed, since
layers repeat: 4 to 8 bytes per op (models of the zoo).
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterator

from rhino_jax.ir.program import Op, Program, RegionCall, Value
from rhino_jax.plan.fingerprint import rule_line
from rhino_jax.plan.plan import PlanData


def outline(program: Program) -> str:
    """Return the ops of a program, compressed, as ASCII text."""
    text = "\n".join("\t".join(line) for line in _lines(program))
    return base64.b85encode(zlib.compress(text.encode(), 9)).decode()


def outline_of(plan: PlanData) -> str:
    """Return the outline of the program that a plan is for.

    Empty if unknown, as for a plan from a file of an older version.
    """
    if plan.outline or plan.traced is None:
        return plan.outline
    return outline(plan.traced.program)


def first_change(before: str, after: str) -> str:
    """Describe the first op that differs between two outlines; empty if none is found.

    Args:
      before, after: outlines of the program when the plan was made, and now.
    """
    if not before or not after:
        return ""
    was, now = _parsed(before), _parsed(after)
    for i in range(max(len(was), len(now))):
        old, new = was[i : i + 1], now[i : i + 1]
        if [line[:-1] for line in old] != [line[:-1] for line in new]:
            return _told(old[0] if old else None, new[0] if new else None)
    return ""


_Line = tuple[str, ...]
"""Name, operands, result types, digest, source."""


def _parsed(text: str) -> list[_Line]:
    try:
        lines = zlib.decompress(base64.b85decode(text)).decode().splitlines()
    except (ValueError, binascii.Error, zlib.error):
        return []
    return [tuple(line.split("\t")) for line in lines]


def _lines(program: Program) -> Iterator[_Line]:
    digests: dict[int, str] = {}
    for op in program.ops:
        types = ", ".join(_type(program.values[v]) for v in op.results)
        first = min(op.results, default=0)
        operands = " ".join(str(first - v) for v in op.operands)
        rule = digests.get(id(op.rule))
        if rule is None:
            rule = digests[id(op.rule)] = "" if op.rule is None else rule_line(op.rule)
        digest = f"{zlib.crc32((rule + _rest(op)).encode()):08x}"
        yield op.name, operands, types, digest, str(op.source)


def _type(value: Value) -> str:
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def _rest(op: Op) -> str:
    """Return what a fingerprint covers of an op beyond its rule and the value ids."""
    call = op.call
    parts: list[object] = []
    if op.pin is not None:
        parts.append((op.pin.layout, op.pin.mesh_axes))
    if op.manual is not None:
        parts.append((op.manual.operands, op.manual.results))
    if call is not None:
        parts.append((call.kind.name, call.num_consts, call.num_cond_consts))
        parts.append((call.num_carry, _trips(call), call.is_remat))
        parts.append([len(region.ops) for region in call.regions])
    return repr(parts) if parts else ""


def _trips(call: RegionCall) -> int | None:
    return call.trip_count if call.is_trip_count_known else None


def _told(was: _Line | None, now: _Line | None) -> str:
    if now is None:
        assert was is not None
        return f"after the last op, `{was[0]}` -> {was[2]} is missing (was {was[4]})"
    if was is None:
        return f"`{now[0]}` -> {now[2]} at {now[4]} is new, after the last op there was"
    text = f"the first op that differs is `{now[0]}` -> {now[2]} at {now[4]}, "
    if was[:1] + was[2:3] != now[:1] + now[2:3]:
        return f"{text}was `{was[0]}` -> {was[2]} at {was[4]}"
    if was[1] != now[1]:
        return f"{text}reads other values than it did (was {was[4]})"
    return f"{text}does otherwise than it did (dims, options or pins; was {was[4]})"
