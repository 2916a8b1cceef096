"""Decisions in terms of the IR: a spec for every value and every use of a value.

Arrays that are views of others with a dim split in two are not annotated on TPU
(`without_split_views`). Normalisation over groups of channels reshapes [n, h, w, 64] to
[n, h, w, 32, 2], computes elementwise ops and sums there, and merges the dims again.
XLA:TPU eliminates such reshapes and computes on [n, h, w, 64], unless a sharding is
annotated on a value in between: then two channels are a dim of their own, and other
dims lie on the 128 lanes.

Source: a group norm between two 3x3 convolutions, f32[16,32,32,64], forward and
backward, compiled for v5e (libtpu 0.0.52): 88 us in addition to the convolutions, with
annotations 321; f32[16,16,16,128] 41 and 310, f32[64,32,32,64] 356 and 915 (XLA's
estimates).

The annotation density says on which values a plan sets shardings. By default ("all") a
plan annotates every value. "matmul" annotates the operands and results of every matmul,
as people do by hand at best; values in between are left to the compiler's propagation.
"batch" annotates parameters, optimizer state, and the batch dim of activations, as most
people do.
"""

from __future__ import annotations

from collections.abc import (
    Iterator,
    Mapping,
    Sequence,
    Set as AbstractSet,
)
from dataclasses import dataclass, field, replace

from rhino_jax.hardware.lowering import AS_WRITTEN, LoweringPolicy
from rhino_jax.ir.program import Op, Program, RegionKind
from rhino_jax.ir.spec import Spec
from rhino_jax.ir.traits import OpKind
from rhino_jax.utils.union_find import DisjointSets


@dataclass(frozen=True, slots=True)
class Decisions:
    """The specs of a program's values.

    A value without an entry is left to the compiler (scalars, literals). Inside a
    region, value ids are those of the region. Inputs of CALL and COND regions have the
    specs in which the op reads its operands (see `operands`).

    Attributes:
      values: value id → spec of the value after the op that makes it (and after any
        reduction of partial sums); for loop-region inputs, the spec inside the loop.
      operands: (op id, operand position) → spec in which the op reads the operand, only
        where it differs from the value's spec. For a loop op the operand has its outer
        (stacked) shape.
      region_outputs: (op id, region position, output position) → spec in which a value
        leaves a region, only where it differs from the value's spec.
      outputs: one spec per program output.
      waypoints: value id → specs that its partial sums pass through before they reach
        the spec in `values`, one after each reduce-scatter but the last.
      through: (op id, operand position) → specs that the operand passes through on its
        way to its spec in `operands`; each copy is computed once for all readers that
        share it.
      lowering: how the compiler lowers shardings: it determines the specs that
        resharded values pass through.
    """

    values: Mapping[int, Spec] = field(default_factory=dict)
    operands: Mapping[tuple[int, int], Spec] = field(default_factory=dict)
    region_outputs: Mapping[tuple[int, int, int], Spec] = field(default_factory=dict)
    outputs: tuple[Spec, ...] = ()
    waypoints: Mapping[int, tuple[Spec, ...]] = field(default_factory=dict)
    through: Mapping[tuple[int, int], tuple[Spec, ...]] = field(default_factory=dict)
    lowering: LoweringPolicy = AS_WRITTEN


def held_specs(op: Op, decisions: Decisions) -> list[Spec | None]:
    """Return the specs in which an op reads its operands, then those of its results."""
    values, operands = decisions.values, decisions.operands
    read = enumerate(op.operands)
    return [
        *(operands.get((op.id, i), values.get(v)) for i, v in read),
        *(values.get(v) for v in op.results),
    ]


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
    ranks = [value.rank for value in program.values]
    groups = DisjointSets(len(ranks))

    def join(values: Sequence[int]) -> None:
        for v in values[1:]:
            groups.union(v, values[0])

    seeds, works_there = set[int](), set[int]()
    for op in program.ops:
        if op.name == "reshape":
            before = program.values[op.operands[0]].shape
            after = program.values[op.results[0]].shape
            if (
                len(after) == len(before) + 1
                and after[: len(before) - 1] == before[:-1]
                and 1 < after[-1] < lanes
            ):
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
    names = groups.names()
    found = {names[v] for v in seeds} - {names[v] for v in works_there}
    yield from (v for v, name in enumerate(names) if name in found)


def only_around_matmuls(program: Program, decisions: Decisions) -> Decisions:
    """Reduce decisions to program arguments and results, loop borders, and matmuls.

    Operands and results of contractions and kernels count as matmuls; nothing is
    decided about other values.

    Args:
      program: the planned program.
      decisions: specs of all its values.
    """
    held = decisions.values
    kept = {i.value for i in program.inputs} | {o.value for o in program.outputs}
    operands: dict[tuple[int, int], Spec] = {}
    for op in program.ops:
        is_loop = op.call is not None and op.call.kind in _LOOPS
        is_kernel = op.traits.kind is OpKind.KERNEL
        if not (op.traits.is_contraction or is_kernel or is_loop):
            continue
        kept |= set(op.results)
        for i, value in enumerate(op.operands):
            spec = decisions.operands.get((op.id, i), held.get(value))
            if spec is not None:
                operands[op.id, i] = spec
        if op.call is not None:
            for region in op.call.regions:
                kept |= {*region.inputs, *region.outputs}
    return Decisions(
        values={v: spec for v, spec in held.items() if v in kept},
        operands=operands,
        region_outputs=decisions.region_outputs,
        outputs=decisions.outputs,
        lowering=decisions.lowering.kernels,
    )


def only_the_batch(
    program: Program, decisions: Decisions, led_by_batch: AbstractSet[int]
) -> Decisions:
    """Reduce decisions to arguments, results, and the batch dim of activations.

    Nothing is decided about other values.

    Args:
      program: the planned program.
      decisions: specs of all its values.
      led_by_batch: ids of the values whose leading dim is the batch; its axes are
        listed in the mesh's order, as people write them.
    """
    held = decisions.values
    kept = {i.value for i in program.inputs} | {o.value for o in program.outputs}
    pinned = {
        v: (tuple(sorted(spec[0])), *((),) * (len(spec) - 1))
        for v, spec in held.items()
        if v in led_by_batch and spec[0]
    }
    return Decisions(
        values=pinned | {v: spec for v, spec in held.items() if v in kept},
        outputs=decisions.outputs,
        lowering=decisions.lowering.kernels,
    )


_LOOPS = (RegionKind.SCAN, RegionKind.WHILE)
