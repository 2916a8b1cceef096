"""Ops along the layers of stacks `[L, …]`: each stage may run its own part.

And values of all micro-batches, spread over stages: each has some rows, or all of them.
m micro-batches, S stages, T = m + S - 1 ticks: micro-batch j is at tick j + p at the
stage that is p-th in a scan's direction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rhino_jax._compat import at_line_of
from rhino_jax.ir.factor import Layout
from rhino_jax.ir.program import Op
from rhino_jax.ir.traits import OpKind
from rhino_jax.passes.ops_along import Stacked, along
from rhino_jax.rewrite.emit import bind_part
from rhino_jax.rewrite.flat import FlatOp, FlatRegion


REDUCE: Mapping[str, Callable[..., Any]] = {
    "sum": jnp.sum,
    "prod": jnp.prod,
    "max": jnp.max,
    "min": jnp.min,
    "and": jnp.all,
    "or": jnp.any,
}


@dataclass(frozen=True, slots=True)
class StageAxis:
    """The mesh axis of stages, as seen by one of its devices.

    Attributes:
      name: its name.
      stages: number of stages.
      count: number of micro-batches.
      stage: index of this stage, traced.
    """

    name: str
    stages: int
    count: int
    stage: Any

    @property
    def ticks(self) -> int:
        return self.count + self.stages - 1

    def place(self, is_reversed: bool) -> Any:
        """Return how many stages come before this one in a scan's direction."""
        return self.stages - 1 - self.stage if is_reversed else self.stage

    def handed_on(self, x: Any, is_reversed: bool) -> Any:
        """Send an array to the next stage; return that of the one before.

        The first stage gets zeros.
        """
        pairs = [(i, i + 1) for i in range(self.stages - 1)]
        return self._sent(x, [(b, a) for a, b in pairs] if is_reversed else pairs)

    def whole(self, rows: Any) -> Any:
        """Gather [m/S, …] of each stage → [m, …]."""
        return jnp.reshape(self._each(lambda k: rows), (-1, *rows.shape[1:]))

    def rows_of_last(self, ticks: Any, is_reversed: bool) -> Any:
        """Distribute [T, …] of the last stage in a scan's direction → [m/S, …]."""
        last = 0 if is_reversed else self.stages - 1
        parts = self._parts(ticks[self.stages - 1 :])
        own = parts[last]
        for k in range(self.stages):
            if k != last:
                sent = self._sent(parts[k], [(last, k)])
                own = either(self.stage == k, sent, own)
        return own

    def rows_of_stack(self, ticks: Any, is_reversed: bool) -> Any:
        """Exchange [T, L/S, …] → [m/S, L, …]."""
        found = self._exchanged(self._own(ticks, is_reversed))
        found = jnp.moveaxis(found, 0, 1)
        return jnp.reshape(found, (found.shape[0], -1, *found.shape[3:]))

    def rows_of_parts(self, ticks: Any, is_reversed: bool, reducer: str) -> Any:
        """Reduce [T, …], each stage's own, over stages → [m/S, …]."""
        found = self._exchanged(self._own(ticks, is_reversed))
        return REDUCE[reducer](found, axis=0).astype(found.dtype)

    def together(self, x: Any, how: str) -> Any:
        """Reduce an array over all stages."""
        if how == "sum":
            return lax.psum(x, self.name)
        return REDUCE[how](self._each(lambda k: x), axis=0).astype(x.dtype)

    def _own(self, ticks: Any, is_reversed: bool) -> Any:
        start = self.place(is_reversed)
        return lax.dynamic_slice_in_dim(ticks, start, self.count, 0)

    def _exchanged(self, x: Any) -> Any:
        """Exchange [m, …] → [S, m/S, …]: each stage's values of this stage's rows."""
        parts = self._parts(x)

        def for_stage(k: int) -> Any:
            to = (self.stage + k) % self.stages
            return lax.dynamic_index_in_dim(parts, to, 0, keepdims=False)

        return self._each(for_stage)

    def _parts(self, x: Any) -> Any:
        """Reshape [m, …] → [S, m/S, …]."""
        return jnp.reshape(x, (self.stages, -1, *x.shape[1:]))

    def _each(self, given: Callable[[int], Any]) -> Any:
        """Return [S, …] of what every stage gives to this one, by permutes.

        All-gathers and all-to-alls of arrays that are sharded along axes left to XLA,
        it first gathers along these (TPU v5e and H100, jax 0.10.2).

        Args:
          given: function of k that returns what this stage gives to the one k later.
        """
        found = None
        for k in range(self.stages):
            to = [(i, (i + k) % self.stages) for i in range(self.stages)]
            part = self._sent(given(k), to) if k else given(k)
            if found is None:
                found = jnp.broadcast_to(part, (self.stages, *part.shape))
            else:
                at = (self.stage - k) % self.stages
                found = lax.dynamic_update_index_in_dim(found, part, at, 0)
        return found

    def _sent(self, x: Any, pairs: Sequence[tuple[int, int]]) -> Any:
        """Permute an array by (source, target) stages; random keys as their bits."""
        if not is_key(x):
            return lax.ppermute(x, self.name, pairs)
        bits = lax.ppermute(jax.random.key_data(x), self.name, pairs)
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(x))


def either(condition: Any, x: Any, y: Any) -> Any:
    """Select one of two arrays by a scalar."""
    return lax.select(jnp.broadcast_to(condition, x.shape), x, y)


def is_key(x: Any) -> bool:
    """Whether an array has random keys, whose bits are of a type of their own."""
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


_PASSING = (OpKind.IDENTITY, OpKind.CONVERSION)


def reads_along(each: FlatOp, stacks: Collection[int]) -> Stacked | None:
    """Return an op along dim 0 of stacks that it reads; None where it needs them whole.

    Args:
      each: the op.
      stacks: value ids of stacks.
    """
    rule, operands = each.op.rule, each.operands
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
    rule = each.op.rule
    if rule is None or len(each.results) != 1:
        return None
    found = _along(each.op, rule.results[0][:1], {})
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
                pairs = zip(each.operands, found.dims, strict=True)
                wanted |= {v for v, d in pairs if d == 0}
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
