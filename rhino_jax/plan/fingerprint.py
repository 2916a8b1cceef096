"""The fingerprint of a program: a plan is applied only to the program it is for."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

from rhino_jax.ir.factor import Rule
from rhino_jax.ir.program import Program, Region


def fingerprint(program: Program, mesh_axes: Sequence[tuple[str, int]]) -> str:
    """Hash of what a plan depends on, as hexadecimal digits.

    Shapes, types, ops, factors, regions, tree paths and the mesh count; source
    lines, labels, and what is donated do not.

    Args:
      program: the program.
      mesh_axes: (name, size) of the mesh axes, major first.
    """
    lines: list[bytes] = []
    rules: dict[int, bytes] = {}

    def add(*things: object) -> None:
        lines.append(_line(*things))

    add("mesh", tuple((name, int(size)) for name, size in mesh_axes))
    lines += [_value_line(v.shape, v.dtype, v.is_literal) for v in program.values]
    for op in program.ops:
        rule = op.rule
        add(op.name, op.operands, op.results)
        if rule is not None:
            # Ops share rules.
            line = rules.get(id(rule))
            if line is None:
                line = rules[id(rule)] = _rule_line(rule)
            lines.append(line)
        if op.call is not None:
            call = op.call
            add(
                call.kind.name,
                tuple(_region(r) for r in call.regions),
                call.num_consts,
                call.num_cond_consts,
                call.num_carry,
                call.trip_count,
                call.is_remat,
            )
    add("body", _region(program.body))
    for entry in program.inputs:
        add(entry.value, entry.path, entry.is_const)
    for result in program.outputs:
        add(result.value)
    return hashlib.sha256(b"".join(lines)).hexdigest()


def _line(*things: object) -> bytes:
    return repr(things).encode() + b"\n"


@functools.lru_cache(maxsize=1 << 12)
def _value_line(shape: tuple[int, ...], dtype: str, is_literal: bool) -> bytes:
    return _line(shape, dtype, is_literal)


def _rule_line(rule: Rule) -> bytes:
    factors = tuple((f.size, f.kind.name, f.reducer, f.halo) for f in rule.factors)
    return _line(factors, rule.operands, rule.results)


def _region(region: Region) -> tuple[object, ...]:
    return region.inputs, region.ops, region.outputs
