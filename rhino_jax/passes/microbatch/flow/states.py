"""States of values in a loop over micro-batches.

The batch is an axis, as `rhino_jax.ir.axes` follows it. A micro-batch has some of its
rows, and of a dim (outer, rows, inner) that holds it (outer, its rows, inner).
`DimPart` states which ops may run in the loop, where not all may. Candidates for the
batch are inputs that may hold it, and its size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from rhino_jax.analysis.roles import data_inputs
from rhino_jax.ir.axes import AxisSpan
from rhino_jax.ir.factor import FactorKind, Rule
from rhino_jax.ir.program import Program
from rhino_jax.rewrite.flat import FlatProgram


@dataclass(frozen=True, slots=True)
class WholeState:
    """A value that is known in full before loop `phase` runs.

    Attributes:
      phase: number of loops that run before the value is known.
      is_zero: whether every element is zero.
      is_inside: whether it is computed inside loop `phase`, equal in all micro-batches.
      is_own: whether it differs between micro-batches, as the user requested: each
        computes it from its own rows. Outside of the loop, the mean over micro-batches
        replaces it.
    """

    phase: int = 0
    is_zero: bool = False
    is_inside: bool = False
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class Positions:
    """Positions of rows among those of a micro-batch; see `orders`.

    Attributes:
      order: the order in which they count rows, as `RowsState.order`.
      table: number of the array that has them where rows are in their own order.
    """

    order: int | None
    table: int


@dataclass(frozen=True, slots=True)
class RowsState:
    """A value computed inside loop `phase`, of which each micro-batch has its rows.

    Attributes:
      span: the dim that holds the batch.
      phase: the first loop that can compute it.
      cheap: number of loops that run before it may be computed in full, cheaply,
        outside of loops; None: it is not cheap.
      is_own: whether an op reads these rows of a sum over the batch that each
        micro-batch computes from its own rows.
      order: id of the keys by which each micro-batch has sorted its rows; None: they
        are in the order of the batch.
      at: the positions that the elements are, if any.
    """

    span: AxisSpan
    phase: int = 0
    cheap: int | None = None
    is_own: bool = False
    order: int | None = None
    at: Positions | None = None

    def moved(self, by: int) -> RowsState:
        """Return the state with its dim shifted by `by` positions."""
        return replace(self, span=self.span.moved(by))


@dataclass(frozen=True, slots=True)
class Partial:
    """A value computed inside loop `phase` as a partial result of each micro-batch.

    Attributes:
      reducer: the reduction over micro-batches that yields the value: "sum", "max",
        "min", "prod", "and" or "or".
      phase, cheap: see `RowsState`.
      counts: id of the keys whose rows it counts by group, if any.
    """

    reducer: str
    phase: int = 0
    cheap: int | None = None
    counts: int | None = None


State = WholeState | RowsState | Partial


def is_sorted(state: State) -> bool:
    """Whether rows are in an order of their micro-batch, or are positions in it."""
    if not isinstance(state, RowsState):
        return False
    return state.order is not None or state.at is not None


def is_of_rows(state: State) -> bool:
    """Whether each micro-batch has its own: its rows, or their number in each group."""
    return isinstance(state, RowsState) or (
        isinstance(state, Partial) and state.counts is not None
    )


def is_outside(state: State) -> bool:
    """Whether a value is computed outside of loops."""
    return isinstance(state, WholeState) and not state.is_inside


def is_there(state: State, use: State) -> bool:
    """Whether a loop that computes a value in one state has it in another.

    Otherwise the value is needed in full, or computed outside of the loop.

    Args:
      state: state of the value.
      use: state in which an op reads it.
    """
    if isinstance(state, WholeState):
        return state.is_inside and (not isinstance(use, WholeState) or state == use)
    if isinstance(state, RowsState):
        return isinstance(use, RowsState) and state.span == use.span
    return isinstance(use, Partial) or use.is_own


def known_after(state: State) -> int:
    """Return the number of loops that run before a value is known in full."""
    if isinstance(state, WholeState):
        return state.phase + state.is_inside
    return state.phase + 1 if state.cheap is None else state.cheap


def in_full(state: State) -> WholeState:
    """Return the state of a value once it is known in full."""
    return WholeState(known_after(state))


def inside(state: State) -> State:
    """Return a state relative to a region that runs inside a loop."""
    if isinstance(state, WholeState):
        return WholeState(is_zero=state.is_zero, is_own=state.is_own)
    return in_loop(state, 0)


def in_loop(state: State, phase: int) -> State:
    """Return the state of a value that loop `phase` computes."""
    if isinstance(state, WholeState):
        return WholeState(phase, state.is_zero, is_inside=True, is_own=state.is_own)
    return replace(state, phase=phase, cheap=None)


def is_own(state: State) -> bool:
    """Whether each micro-batch computes a value from its own rows."""
    return isinstance(state, WholeState) and state.is_own


def is_free(rule: Rule, factor: int) -> bool:
    """Whether slices of a factor can be computed independently, up to a reduction."""
    return rule.factors[factor].kind in (FactorKind.PARALLEL, FactorKind.REDUCE)


@dataclass(frozen=True, slots=True)
class DimPart:
    """Ops of a program that may run in a loop, and the operands that they slice.

    Attributes:
      ops: ids of the ops that may run in a loop.
      seeds: op id → operand position → the dim by which the loop slices that operand,
        although it is known in full.
    """

    ops: frozenset[int]
    seeds: Mapping[int, Mapping[int, AxisSpan]]


Inputs = dict[int, RowsState]
"""Value id of an input → position of the batch in it."""


def candidates(flat: FlatProgram, least: int = 2) -> list[tuple[int, Inputs]]:
    """Return candidate batch sizes with the inputs that hold it, likeliest first.

    A dim that happens to have that size mostly does no harm: it is read in full where
    it turns out to be no batch. It may where rows of one array meet those of another:
    of several dim classes of one size, each alone is a candidate, too. Where a program
    splits a leading dim by a reshape, as one does that accumulates gradients itself, or
    maps over the batch some rows at a time, each factor of the dim is a candidate.

    Args:
      flat: the flattened program.
      least: minimum size of the batch.
    """
    program = flat.program
    dims = data_inputs(program).items()
    data = {program.inputs[i].value: at for i, at in dims if at is not None}
    values = [program.values[value] for value in data]
    found = defaultdict[_Key, Inputs](dict)
    of_class = defaultdict[tuple[_Key, int | None], Inputs](dict)
    for value in values:
        dim, dim_class = data[value.id]
        key = _Key(value.shape[dim])
        found[key][value.id] = of_class[key, dim_class][value.id] = key.state(dim)
    seconds = {v.shape[min(v.rank - 1, 1)] for v in values}
    if len(seconds) == 1:  # time-major data: [time, batch, …] in all inputs
        key = _Key(seconds.pop(), dim=1)
        found[key] = {v.id: key.state(min(v.rank - 1, 1)) for v in values}
    for item in flat.top.ops:
        if item.op.name != "reshape":
            continue
        value = program.values[item.operands[0]]
        if value not in values:
            continue
        made = program.values[item.results[0]].shape
        if len(made) > 1 and made[0] * made[1] == value.shape[0]:
            # Scans over the first dim that stack at least as many bytes as the value
            # has, as those that save residuals do: fewer iterations then save memory.
            is_mapped = any(
                sum(program.values[v].bytes for v in scan.call.stacked(scan.results))
                >= program.values[item.results[0]].bytes
                for scan in flat.top.ops
                if scan.is_scan and item.results[0] in scan.call.sliced(scan.operands)
            )
            for key in (
                _Key(made[0], 1 if is_mapped else 3, inner=made[1]),
                _Key(made[1], 2, outer=made[0]),
            ):
                found[key][value.id] = key.state()
    order = sorted(found, key=lambda k: (k.dim, k.rank, -len(found[k]), -k.rows))
    every = [(k.rows, found[k]) for k in order]
    every += [(k.rows, a) for (k, _), a in of_class.items() if len(a) < len(found[k])]
    return [(rows, inputs) for rows, inputs in every if rows >= least]


class _Key(NamedTuple):
    """Size and position of a candidate batch: (outer, rows, inner) of dim `dim`.

    Attributes:
      rows: size of the batch.
      rank: order among candidates: 0 for a whole leading dim, 1 for the factor of it
        that is mapped over, 2 and 3 for other factors.
      dim: the dim that holds the batch.
      outer, inner: sizes of its major and minor factors next to the batch.
    """

    rows: int
    rank: int = 0
    dim: int = 0
    outer: int = 1
    inner: int = 1

    def state(self, dim: int = 0) -> RowsState:
        """Return the state of an input that holds the batch in a dim."""
        return RowsState(AxisSpan(dim, self.rows, self.outer, self.inner), cheap=0)


def moved(inputs: Inputs, before: FlatProgram, after: Program) -> Inputs:
    """Map the inputs of a program to those of its rewritten program.

    Args:
      inputs: position of the batch by value id of the original program.
      before: the flattened original program.
      after: the rewritten program, with as many inputs.
    """
    ids = dict(zip(before.program.body.inputs, after.body.inputs, strict=True))
    return {ids[value]: rows for value, rows in inputs.items()}
