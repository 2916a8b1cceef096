"""Congruence of two programs: pairs of values that equal ops compute.

A program that a pass wrote has other ops than the one before, in another order: values
are paired by the ops that compute them, never by position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, MutableMapping

from rhino_jax.ir.program import Op, Program, Region


def pair_regions(
    program: Program,
    region: Region,
    other: Program,
    its: Region,
    ids: MutableMapping[int, int],
) -> None:
    """Record which values of a region are equal to which values of another program's
    region.

    Args:
      program, region: the first program, and a region of it.
      other, its: the second program, and the region of it that computes the same.
      ids: ids of values of the first program → ids of the second; extended in place by
        the results of equal ops on paired values, nested regions included. A value that
        the second region does not compute is left out. Several equal ops on equal
        operands are paired in their order.
    """
    if len(region.inputs) == len(its.inputs):
        ids.update(zip(region.inputs, its.inputs, strict=True))
    waiting: dict[Hashable, deque[Op]] = {}
    for op_id in its.ops:
        op = other.ops[op_id]
        waiting.setdefault(_key(other, op, op.operands), deque()).append(op)
    for op_id in region.ops:
        op = program.ops[op_id]
        operands = tuple(ids.get(v, -1) for v in op.operands)
        found = waiting.get(_key(program, op, operands))
        if found:
            pair_ops(program, op, other, found.popleft(), ids)


def pair_ops(
    program: Program, op: Op, other: Program, its: Op, ids: MutableMapping[int, int]
) -> None:
    """Record the pairs of results of two equal ops, and of the values in their regions.

    Args:
      program, op: the first program, and an op of it.
      other, its: the second program, and the equivalent op; where name or number of
        results differ, nothing is recorded.
      ids: as in `pair_regions`.
    """
    if op.name != its.name or len(op.results) != len(its.results):
        return
    ids.update(zip(op.results, its.results, strict=True))
    bodies = [call.regions if call else () for call in (op.call, its.call)]
    if len(bodies[0]) == len(bodies[1]):
        for mine, theirs in zip(*bodies, strict=True):
            pair_regions(program, mine, other, theirs, ids)


def _key(program: Program, op: Op, operands: tuple[int, ...]) -> Hashable:
    """Return a hashable key of an op: its name, the ids of its operands and the types
    of its results. All literals are equal in it."""
    made = tuple((program.values[v].shape, program.values[v].dtype) for v in op.results)
    read = tuple(
        None if program.values[v].is_literal else known
        for v, known in zip(op.operands, operands, strict=True)
    )
    return op.name, read, made
