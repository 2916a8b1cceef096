"""Arrays that are views of others with a dim split in two: not annotated on TPU.

Normalisation over groups of channels reshapes [n, h, w, 64] to [n, h, w, 32, 2],
computes elementwise ops and sums there, and merges the dims again. XLA:TPU eliminates
such reshapes and computes on [n, h, w, 64], unless a sharding is annotated on a value
in between: then two channels are a dim of their own, and other dims lie on the 128
lanes.

Source: a group norm between two 3x3 convolutions, f32[16,32,32,64], forward and
backward, compiled for v5e (libtpu 0.0.52): 88 us in addition to the convolutions, with
annotations 321; f32[16,16,16,128] 41 and 310, f32[64,32,32,64] 356 and 915 (XLA's
estimates).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rhino_jax.ir.program import Op, Program, RegionKind
from rhino_jax.ir.traits import OpKind
from rhino_jax.plan.decisions import Decisions


def without_split_views(
    program: Program, decisions: Decisions, lanes: int
) -> Decisions:
    """Remove decisions about arrays that are split views inside the program.

    These are left to propagation, which carries a spec through a reshape: results of
    reshapes with a last dim of fewer than `lanes` elements, and arrays of the same rank
    that elementwise ops and broadcasts compute from them. A whole group stays annotated
    if ops other than elementwise ops, reductions and reshapes (matrix products,
    kernels) read it: such an op works in those dims. So does each value that a reader
    needs resharded, or that is summed over devices.

    Args:
      program: the planned program.
      decisions: specs of all its values.
      lanes: elements of a row of a memory tile; 0: memory has no tiles.
    """
    if not lanes:
        return decisions
    kept = {i.value for i in program.inputs} | {o.value for o in program.outputs}
    kept |= set(decisions.waypoints)
    for op in program.ops:
        if op.call is not None and op.call.kind is not RegionKind.CALL:
            kept |= {*op.operands, *op.results}
            for region in op.call.regions:
                kept |= {*region.inputs, *region.outputs}
    kept |= {program.ops[op].operands[i] for op, i in decisions.operands}
    left_out = {v for v in _split(program, lanes) if v not in kept}
    values = {v: s for v, s in decisions.values.items() if v not in left_out}
    return replace(decisions, values=values)


_THROUGH = frozenset(
    {
        OpKind.ELEMENTWISE,
        OpKind.EXPONENTIAL,
        OpKind.CONVERSION,
        OpKind.IDENTITY,
        OpKind.BROADCAST,
    }
)


def _split(program: Program, lanes: int) -> Iterator[int]:
    """Yield the values of groups that only reductions, reshapes and elementwise ops
    use."""
    ranks = {v: value.rank for v, value in enumerate(program.values)}
    group = {v: v for v in ranks}

    def root(v: int) -> int:
        while group[v] != v:
            group[v] = v = group[group[v]]
        return v

    def join(values: Sequence[int]) -> None:
        for v in values[1:]:
            group[root(v)] = root(values[0])

    seeds, works_there = set[int](), set[int]()
    for op in program.ops:
        if op.name == "reshape":
            if _splits_last(program, op, lanes):
                seeds.update(op.results)
        elif op.traits.kind in _THROUGH:
            rank = ranks[op.results[0]]
            join([v for v in (*op.operands, *op.results) if ranks[v] == rank])
        elif op.call is not None and op.call.kind is RegionKind.CALL:
            # Calls are inlined.
            (region,) = op.call.regions
            for pair in zip(op.operands, region.inputs, strict=False):
                join(pair)
            for pair in zip(op.results, region.outputs, strict=True):
                join(pair)
        elif op.traits.kind is not OpKind.REDUCTION:
            works_there.update((*op.operands, *op.results))
    found = {root(v) for v in seeds} - {root(v) for v in works_there}
    yield from (v for v in ranks if root(v) in found)


def _splits_last(program: Program, op: Op, lanes: int) -> bool:
    before = program.values[op.operands[0]].shape
    after = program.values[op.results[0]].shape
    return (
        len(after) == len(before) + 1
        and after[: len(before) - 1] == before[:-1]
        and 1 < after[-1] < lanes
    )
