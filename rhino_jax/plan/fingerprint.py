"""The fingerprint of a program: a plan is applied only to its own program."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

from rhino_jax.ir.factor import Rule
from rhino_jax.ir.program import Program, Region, RegionCall


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
    lines += [_value_line(v.shape, v.dtype, v.is_literal) for v in program.values]
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
            lines.append(_call_line(op.call))
    lines.append(repr(("body", _region(program.body))))
    lines += [repr((e.value, e.path, e.is_const)) for e in program.inputs]
    lines += [repr((result.value,)) for result in program.outputs]
    lines.append("")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@functools.lru_cache(maxsize=1 << 12)
def _value_line(shape: tuple[int, ...], dtype: str, is_literal: bool) -> str:
    return repr((shape, dtype, is_literal))


def rule_line(rule: Rule) -> str:
    """Return a rule as one line of text."""
    factors = tuple((f.size, f.kind.name, f.reducer, f.halo) for f in rule.factors)
    return repr((factors, rule.operands, rule.results))


def _call_line(call: RegionCall) -> str:
    return repr(
        (
            call.kind.name,
            tuple(_region(r) for r in call.regions),
            call.num_consts,
            call.num_cond_consts,
            call.num_carry,
            call.trip_count if call.is_trip_count_known else None,
            call.is_remat,
        )
    )


def _region(region: Region) -> tuple[object, ...]:
    return region.inputs, region.ops, region.outputs
