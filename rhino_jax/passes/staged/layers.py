"""Layer scans: which arrays are stacks of the same layers, by what reads them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from rhino_jax.ir.axes import ends_of
from rhino_jax.ir.factor import FactorKind
from rhino_jax.ir.program import Program
from rhino_jax.rewrite.flat import FlatOp, FlatRegion
from rhino_jax.rewrite.flatten import all_calls, flatten
from rhino_jax.utils.union_find import DisjointSets


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers that scans run one after the other.

    Attributes:
      length: number of layers.
      slots: positions of the step's inputs that stack them along dim 0: weights, and
        optimizer state.
      loops: ids of the scans over them, forward and backward.
      after: positions, among all `Layers` of the step, of those whose forward scans
        come before, as the scans over these layers read their results.
    """

    length: int
    slots: frozenset[int]
    loops: tuple[int, ...]
    after: frozenset[int] = frozenset()


def layers_of(program: Program, data: Collection[int] = ()) -> tuple[Layers, ...]:
    """Return all layers of a step, in the order of their first stacks.

    Two stacks are of the same layers where one scan goes through both, or an op works
    on both layer by layer, as an optimizer does on weights and gradients.

    `spmd_pipeline.body.layer_loops` finds scans over layers, too, but of the body of a
    loop over micro-batches. It has to tell scans that are pipelined from those over
    time, by what varies between micro-batches; here the inputs of a step before it is
    cut are grouped, with the optimizer's, and each group may be split at other layers.

    Args:
      program: the step.
      data: values of inputs that hold the batch: a scan over time is none over layers.
    """
    # Dims of values that are one index range are one set; layers are such sets.
    starts = [*accumulate((max(v.rank, 1) for v in program.values), initial=0)]
    sets, scans = DisjointSets(starts[-1]), list[tuple[int, int]]()
    top = flatten(program, entered=all_calls()).top

    def set_of(value: int) -> int:
        return sets.find(starts[value])

    def unite(ends: Iterable[tuple[int, int]]) -> None:
        """Unite dims that are one index range, given as (value id, dim)."""
        for a, b in pairwise(starts[top.named(value)] + dim for value, dim in ends):
            sets.union(a, b)

    for each in top.ops:
        op = each.op
        if each.is_scan:
            stacks = _stacks(each)
            unite((value, 0) for value in stacks)
            scans.extend((op.id, stack) for stack in stacks[:1])
        for f, factor in enumerate(op.rule.factors) if op.rule else ():
            if factor.kind in (FactorKind.PARALLEL, FactorKind.REDUCE):
                found = [e for e in ends_of(op, f) if e.span.is_plain]
                unite((e.value, e.span.dim) for e in found)
    slots, loops = defaultdict[int, set[int]](set), defaultdict[int, list[int]](list)
    for i, entry in enumerate(program.inputs):
        shape = program.values[entry.value].shape
        if shape and entry.value not in data:
            slots[set_of(entry.value)].add(i)
    for scan, stack in scans:
        loops[set_of(stack)].append(scan)
    ordered = sorted((min(slots[of]), of) for of in loops.keys() & slots.keys())
    before = _before(top, set_of, [of for _, of in ordered])
    return tuple(
        Layers(
            program.values[program.inputs[first].value].shape[0],
            frozenset(slots[of]),
            tuple(loops[of]),
            frozenset(before[k]),
        )
        for k, (first, of) in enumerate(ordered)
    )


def _before(
    region: FlatRegion, set_of: Callable[[int], int], order: Sequence[int]
) -> list[set[int]]:
    """Return for all layers the layers whose forward scans theirs depend on."""
    at = {of: k for k, of in enumerate(order)}
    needs: dict[int, frozenset[int]] = {}
    found: list[set[int]] = [set() for _ in order]
    for each in region.ops:
        if each.op.source.is_backward:
            continue
        had = frozenset[int]().union(
            *(needs.get(v, frozenset()) for v in each.operands)
        )
        stacks = _stacks(each) if each.is_scan else []
        mine = at.get(set_of(stacks[0])) if stacks else None
        if mine is not None:
            found[mine] |= had - {mine}
            had |= {mine}
        needs.update(dict.fromkeys(each.results, had))
    return found


def _stacks(scan: FlatOp) -> list[int]:
    """Return the values that a scan slices or stacks."""
    return [*scan.call.sliced(scan.operands), *scan.call.stacked(scan.results)]
