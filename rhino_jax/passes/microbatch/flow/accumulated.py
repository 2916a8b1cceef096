"""Carries of a scan over rows that only accumulate, so that rows may come in any order.

A carry accumulates where each iteration adds to it (or takes the maximum, say) a value
that depends on no carry, and nothing else reads it: the gradient of a closed-over value
of the body, or a user's own running sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rhino_jax.ir.axes import crossings
from rhino_jax.ir.program import Program, RegionCall, RegionKind
from rhino_jax.ir.traits import OpKind
from rhino_jax.rewrite.flat import FlatOp, FlatRegion


UNCHANGED = ""
"""Reducer of a carry that is not combined with anything."""


class NotAccumulated(Exception):
    """A carry is used otherwise than to accumulate.

    Attributes:
      item: the op that uses it; None where no single op does.
    """

    def __init__(self, item: FlatOp | None = None) -> None:
        super().__init__()
        self.item = item


def reducers_of(
    block: FlatRegion, call: RegionCall, program: Program
) -> tuple[str, ...]:
    """Return how each carry of a scan's body accumulates.

    Args:
      block: the body.
      call: the scan.
      program: the program that ids refer to.
    Returns:
      A reducer per carry, as in `states.Partial`; `UNCHANGED` where a carry leaves as
      it enters.
    Raises:
      NotAccumulated: a carry does not accumulate.
    """
    carries = call.carries(block.inputs)
    changed = {
        v: _Carry(i, program) for i, v in enumerate(carries) if block.outputs[i] != v
    }  # An unchanged carry may be read by any op: it is the same for all rows.
    tracked = _follow(block, dict(changed))
    found = [tracked.get(v) for v in block.outputs]
    is_own = all(
        carry is None if v not in changed else carry is not None and carry.index == i
        for i, (v, carry) in enumerate(zip(carries, found, strict=False))
    )
    if not is_own or any(c is not None for c in call.stacked(found)):
        raise NotAccumulated
    return tuple(UNCHANGED if c is None else c.reducer for c in found[: call.num_carry])


def is_summed(block: FlatRegion, entering: int, leaving: int, program: Program) -> bool:
    """Whether a carry is scaled, added to or selected to its next value alone.

    Args:
      block: the body of the loop.
      entering, leaving: ids of the carry, and of its next value.
      program: the program that ids refer to.
    """
    try:
        tracked = _follow(block, {entering: _Carry(0, program, may_scale=True)})
    except NotAccumulated:
        return False
    return tracked.keys() & block.outputs == {leaving}


@dataclass(frozen=True, slots=True)
class _Carry:
    """A carry, combined with other values.

    Attributes:
      index: position among the carries.
      program: the program that ids refer to.
      may_scale: whether linear ops may scale it, so that rows come in their order.
      reducer: how it is combined.
    """

    index: int
    program: Program
    may_scale: bool = False
    reducer: str = UNCHANGED

    def by(self, reducer: str, item: FlatOp) -> _Carry:
        """Return the carry after one more combination by `reducer`.

        Raises:
          NotAccumulated: it was combined by another reducer before.
        """
        if self.reducer not in (UNCHANGED, reducer):
            raise NotAccumulated(item)
        return replace(self, reducer=reducer)


def _follow(block: FlatRegion, tracked: dict[int, _Carry]) -> dict[int, _Carry]:
    """Return the values of a region that are carries combined with others, by id.

    Args:
      block: the region.
      tracked: those among its inputs; extended by this.
    Raises:
      NotAccumulated: another op reads a carry.
    """
    for item in block.ops:
        at = {i: tracked[v] for i, v in enumerate(item.operands) if v in tracked}
        if at:
            results = _combined(item, at)
            tracked |= {item.results[i]: c for i, c in results.items()}
    return tracked


def _combined(item: FlatOp, at: Mapping[int, _Carry]) -> dict[int, _Carry]:
    """Return the results of an op that are accumulated carries, by position.

    Args:
      item: the op.
      at: those among its operands, by position.
    """
    traits, count = item.op.traits, len(item.operands)
    if item.regions:
        return _region(item, at)
    first, *_ = at.values()
    values = first.program.values
    dtypes = {values[v].dtype for v in (*item.operands, *item.results)}
    if traits.kind is OpKind.CONVERSION and len(dtypes) == 1:
        return dict(at)
    if traits.kind is OpKind.IDENTITY and traits.moves and count == len(item.results):
        return dict(at)
    if first.may_scale:
        ways = traits.commutes_in(count) if traits.is_elementwise else ()
        if any(at.keys() <= {*way} for way in ways):
            return {0: _either([*at.values()], item)}
        raise NotAccumulated(item)
    if len(at) == 1 and at.keys() <= set(traits.accumulates):
        (carry,) = at.values()
        return {0: carry.by(traits.reducer, item)}
    if traits.is_choice and tuple(at) in traits.commutes_in(count):
        return {0: _either([*at.values()], item)}
    raise NotAccumulated(item)


def _either(carries: list[_Carry], item: FlatOp) -> _Carry:
    """Merge a carry's alternatives at a conditional or select.

    Raises:
      NotAccumulated: they are different carries, or combined by different reducers.
    """
    found = carries[0]
    for other in carries[1:]:
        if other.index != found.index:
            raise NotAccumulated(item)
        if other.reducer != UNCHANGED:
            found = found.by(other.reducer, item)
    return found


def _region(item: FlatOp, at: Mapping[int, _Carry]) -> dict[int, _Carry]:
    """Return the results of an op with regions that are accumulated carries."""
    kind, ends = item.call.kind, [*crossings(item.op)]
    if kind is RegionKind.WHILE or (kind is RegionKind.COND and 0 in at):
        raise NotAccumulated(item)
    tracked = {
        v: at[i] for e in ends for i in e.operands if i in at for v in e.entering
    }
    for block in item.regions:
        _follow(block, tracked)
    found: dict[int, _Carry] = {}
    for end in ends:
        entered = [at[i] for i in end.operands if i in at]
        left = [tracked.get(item.regions[0].named(v)) for v in end.leaving]
        made = [c for c in left if c is not None]
        # Of a scan, carries alone, and as they enter.
        is_other = item.is_scan and len(entered) != len(made)
        if is_other or len(made) not in (0, len(left)):
            raise NotAccumulated(item)
        if made:
            found[end.results[0]] = _either([*entered, *made], item)
    return found
