"""Ops along the layers of stacks `[L, …]`: each stage may run its own part."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from rhino_jax._compat import at_line_of
from rhino_jax.ir.factor import Layout
from rhino_jax.ir.program import Op
from rhino_jax.ir.traits import OpKind
from rhino_jax.passes.ops_along import Stacked, along
from rhino_jax.passes.spmd_pipeline.spread import StageAxis
from rhino_jax.rewrite.emit import bind_part
from rhino_jax.rewrite.flat import FlatOp, FlatRegion


_PASSING = (OpKind.IDENTITY, OpKind.CONVERSION)


def reads_along(each: FlatOp, stacks: Collection[int]) -> Stacked | None:
    """Return an op along dim 0 of stacks that it reads; None where it needs them whole.

    Args:
      each: the op.
      stacks: value ids of stacks.
    """
    rule, operands = each.op.rule, each.operands
    if passes_on(each.op):
        return Stacked((0,), (0,))
    if rule is None:
        return None
    is_same = each.op.traits.kind is OpKind.IDENTITY
    if is_same and len(operands) == len(each.results):
        same = tuple(0 if v in stacks else -1 for v in operands)
        return Stacked(same, same)
    known = {k: 0 for k, v in enumerate(operands) if v in stacks}
    cut = {rule.operands[k][:1] for k in known}
    return _along(each.op, next(iter(cut)), known) if len(cut) == 1 else None


def makes_along(each: FlatOp) -> Stacked | None:
    """Return an op along dim 0 of its only result; None where it is not."""
    if len(each.results) != 1:
        return None
    if passes_on(each.op):
        return Stacked((0,), (0,))
    rule = each.op.rule
    found = None if rule is None else _along(each.op, rule.results[0][:1], {})
    if found is not None and 0 not in found.dims:
        # A result that depends on positions alone (an iota) differs on every stage.
        return found if each.op.traits.kind is OpKind.BROADCAST else None
    return found


def traced_back(
    region: FlatRegion, values: Collection[int], ends: Collection[FlatOp]
) -> tuple[set[int], dict[FlatOp, Stacked]]:
    """Return the stacks from which ops along layers compute some stacks.

    Args:
      region: its ops.
      values: ids of the stacks.
      ends: ops behind which nothing is sought.
    Returns:
      Ids of all these values; the ops, with their dims.
    """
    wanted, made = {*values}, dict[FlatOp, Stacked]()
    for each in reversed(region.ops):
        if each not in ends and not wanted.isdisjoint(each.results):
            if (found := makes_along(each)) is not None:
                made[each] = found
                wanted |= found.stacks_of(each.operands)
    return wanted, made


def passes_on(op: Op) -> bool:
    """Whether an op's result is its operand, perhaps of another type."""
    is_one = len(op.operands) == 1 == len(op.results)
    return is_one and op.traits.kind in _PASSING


def _along(op: Op, layout: Layout, known: Mapping[int, int]) -> Stacked | None:
    """Return an op along the factor that is dim 0 of a layout, and of its results.

    Args:
      op: the op.
      layout: of an operand or result; its dim 0 is the factor.
      known: index of an operand → the dim that must be the factor.
    """
    found = along(op, layout[0]) if layout else None
    if found is None or {*found.results} not in ({0}, {-1}):
        return None
    return None if any(found.dims[k] != d for k, d in known.items()) else found


@dataclass(frozen=True, eq=False)
class StackedRegion:
    """A region some of whose values a stage has in part.

    Attributes:
      region: its ops.
      stacks: values of which a stage has its part of dim 0: its layers.
      stacked: ops on such values.
    """

    region: FlatRegion
    stacks: set[int]
    stacked: dict[FlatOp, Stacked]


class StageValues:
    """Values of a region on one stage, while it is traced.

    Attributes:
      axis: the stages.
      stacked_region: the region.
      env: value id → array; stacks are this stage's part.
      gathered: value id → the whole array.
    """

    def __init__(
        self, axis: StageAxis, stacked_region: StackedRegion, env: dict[int, Any]
    ) -> None:
        self.axis, self.stacked_region, self.env = axis, stacked_region, env
        self.gathered: dict[int, Any] = {}

    def line(self, value: int | None) -> AbstractContextManager[None]:
        """Enter the source line of the op that computed a value."""
        region = self.stacked_region.region
        at = None if value is None else region.maker.get(value)
        return nullcontext() if at is None else at_line_of(region.ops[at].eqn)

    def read(self, value: int, as_stack: bool) -> Any:
        """Return a value.

        Args:
          value: its id.
          as_stack: whether a stack is wanted as this stage's part, instead of whole.
        """
        x = self.stacked_region.region.read(value, self.env)
        if as_stack or value not in self.stacked_region.stacks:
            return x
        if value not in self.gathered:
            self.gathered[value] = self.axis.whole(x)
        return self.gathered[value]

    def part(self, x: Any, dim: int = 0) -> Any:
        """Return this stage's part of a whole array."""
        size = x.shape[dim] // self.axis.stages
        return lax.dynamic_slice_in_dim(x, self.axis.stage * size, size, dim)

    def run(self, each: FlatOp, read: Callable[[int, bool], Any]) -> list[Any]:
        """Run an op, on this stage's layers where it is along stacks.

        Args:
          each: the op.
          read: (value id, as_stack) → operand; see `read`.
        """
        stacked = self.stacked_region.stacked.get(each)
        args = [read(v, stacked is not None) for v in each.operands]
        if stacked is None:
            return each.bind(args)
        given = [
            self.part(x, d) if d != -1 and jnp.shape(x) == tuple(v.aval.shape) else x
            for x, d, v in zip(args, stacked.dims, each.eqn.invars, strict=True)
        ]
        results = zip(each.eqn.outvars, stacked.results, strict=True)
        sizes = [v.aval.shape[d] // self.axis.stages for v, d in results if d != -1]
        with each.context():
            return bind_part(each.eqn, given, stacked.results, max(sizes, default=0))
