"""The fingerprint of a program: a plan is applied only to its own program.

The outline of a program has its ops as a short text, so that a plan file can tell which
one changed. One line per op: name, operands as distances in the list of values, result
types, a digest of what else the fingerprint covers, and the source line. Compressed,
since layers repeat: 4 to 8 bytes per op (models of the zoo).
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import zlib
from collections.abc import Iterator, Sequence

from rhino_jax.ir.factor import Rule
from rhino_jax.ir.printer import format_array
from rhino_jax.ir.program import Op, Program, Region, RegionCall
from rhino_jax.plan.plan import PlanData


def fingerprint(program: Program, mesh_axes: Sequence[tuple[str, int]]) -> str:
    """Return a hash of everything that makes a plan valid, as hexadecimal digits.

    It covers shapes, types, ops, factors, regions, tree paths and the mesh; not source
    lines, labels, donation, and assumed trip counts.

    Args:
      program: the program.
      mesh_axes: (name, size) of the mesh axes, major first.
    """
    axes = tuple((name, int(size)) for name, size in mesh_axes)
    lines = [repr(("mesh", axes))]
    lines += [
        _value_line(v.shape, v.dtype, v.is_literal, v.on_host) for v in program.values
    ]
    rules: dict[int, str] = {}
    for op in program.ops:
        rule = op.rule
        lines.append(repr((op.name, op.operands, op.results)))
        if op.pin is not None:
            lines.append(repr((op.pin.layout, op.pin.mesh_axes)))
        if op.manual is not None:
            lines.append(repr((op.manual.operands, op.manual.results)))
        if rule is not None:
            # Ops share rules.
            line = rules.get(id(rule))
            if line is None:
                line = rules[id(rule)] = rule_line(rule)
            lines.append(line)
        if op.call is not None:
            lines.append(
                repr(
                    (
                        op.call.kind.name,
                        tuple(_region(r) for r in op.call.regions),
                        op.call.num_consts,
                        op.call.num_cond_consts,
                        op.call.num_carry,
                        op.call.trip_count if op.call.is_trip_count_known else None,
                        op.call.is_remat,
                    )
                )
            )
    lines.append(repr(("body", _region(program.body))))
    lines += [repr((e.value, e.path, e.is_const)) for e in program.inputs]
    lines += [repr((result.value,)) for result in program.outputs]
    lines.append("")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@functools.lru_cache(maxsize=1 << 12)
def _value_line(
    shape: tuple[int, ...], dtype: str, is_literal: bool, on_host: bool
) -> str:
    return repr((shape, dtype, is_literal, *["host"] * on_host))


def rule_line(rule: Rule) -> str:
    """Return a rule as one line of text."""
    factors = tuple((f.size, f.kind.name, f.reducer, f.halo) for f in rule.factors)
    return repr((factors, rule.operands, rule.results))


def _region(region: Region) -> tuple[object, ...]:
    return region.inputs, region.ops, region.outputs


def outline(program: Program) -> str:
    """Return the ops of a program, compressed, as ASCII text."""
    text = "\n".join("\t".join(line) for line in _lines(program))
    return base64.b85encode(zlib.compress(text.encode(), 9)).decode()


def outline_of(plan: PlanData) -> str:
    """Return the outline of the program that a plan is for.

    Empty if unknown.
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
        made = [program.values[v] for v in op.results]
        types = ", ".join(format_array(value.dtype, value.shape) for value in made)
        first = min(op.results, default=0)
        operands = " ".join(str(first - v) for v in op.operands)
        rule = digests.get(id(op.rule))
        if rule is None:
            rule = digests[id(op.rule)] = "" if op.rule is None else rule_line(op.rule)
        digest = f"{zlib.crc32((rule + _rest(op)).encode()):08x}"
        yield op.name, operands, types, digest, str(op.source)


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
