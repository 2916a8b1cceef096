"""Dataflow analysis of a whole program, given the inputs that hold the batch.

It covers all ops, whether their results are needed or not.

A batch of one row runs as one micro-batch. Dims of size one have no factors, so the
position of the batch is unknown; it is not needed either: every value that depends on
data belongs to the micro-batch, except for the update of state. A long sequence is such
a batch: its pipeline stages run slices of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rhino_jax.frontend.regions import REMATS
from rhino_jax.frontend.registry import part_of
from rhino_jax.ir.axes import AxisSpan
from rhino_jax.ir.program import RegionKind
from rhino_jax.ir.traits import OpKind
from rhino_jax.passes.microbatch.flow.evaluated import (
    RECOMPUTED_KINDS,
    UPDATING,
    operands_cut,
    spot_of,
)
from rhino_jax.passes.microbatch.flow.ops import (
    DimSizes,
    Needs,
    Ran,
    on_whole,
)
from rhino_jax.passes.microbatch.flow.orders import NeedsOrderOfAll, check_in_full
from rhino_jax.passes.microbatch.flow.regions import Coupled, Flow
from rhino_jax.passes.microbatch.flow.states import (
    DimPart,
    Partial,
    RowsState,
    State,
    WholeState,
    in_full,
    in_loop,
    inside,
    is_outside,
    known_after,
)
from rhino_jax.rewrite.flat import FlatOp, FlatProgram, trace_back


@dataclass(eq=False)
class OpenedRemat(Exception):
    """A recomputed region must be inlined, as an op in it needs the whole batch.

    Attributes:
      op: id of the region's op.
    """

    op: int


@dataclass(eq=False)
class Divided(Exception):
    """A scan must be split, as its body needs sums over the batch.

    Attributes:
      scan: the scan.
      values: ids of the sums.
      item: the op that needs them.
    """

    scan: FlatOp
    values: tuple[int, ...]
    item: FlatOp


@dataclass(frozen=True, slots=True)
class BatchCoupling:
    """An op that couples rows of the batch.

    Attributes:
      item: the op that needs operands in full.
      values: ids of these operands.
      why: the reason, in words.
      phase: number of loops that run before these are known.
      is_costly: whether the op then runs outside of loops, and is not cheap.
    """

    item: FlatOp
    values: tuple[int, ...]
    why: str
    phase: int
    is_costly: bool = False

    def __str__(self) -> str:
        """Return the op, its source line and the reason."""
        return f"`{self.item.op.name}` at {self.item.op.source}: {self.why}"


@dataclass(slots=True)
class FlowResult(Flow):
    """The analysis of a program.

    Attributes:
      part: the ops that may run in a loop; None: all of them.
      meetings: ops that couple rows of the batch, in order.
      full: ids of values that are needed in full.
    """

    part: DimPart | None = None
    meetings: list[BatchCoupling] = field(default_factory=list)
    full: set[int] = field(default_factory=set)
    _leaves: dict[tuple[int, AxisSpan], frozenset[int] | None] = field(
        default_factory=dict
    )

    def leaves_of(self, value: int, span: AxisSpan) -> frozenset[int] | None:
        """Return the values from which a micro-batch computes its slice of a value.

        Args:
          value: id of a value that is complete.
          span: the dim of it that holds the batch.
        Returns:
          Ids of the values, needed in full; None where the value itself has to be
            sliced.
        """
        key = value, span
        if key not in self._leaves:
            self._leaves[key] = self._leaves_of(*key)
        return self._leaves[key]

    def _leaves_of(self, value: int, span: AxisSpan) -> frozenset[int] | None:
        item = self.flat.maker.get(value)
        spot = None if item is None else spot_of(item, value, span)
        if item is None or spot is None:
            return None
        if part_of(item.eqn) is not None:
            return frozenset(item.operands)
        if item.op.traits.kind not in RECOMPUTED_KINDS or len(item.results) != 1:
            return None
        leaves = set[int]()
        for operand, cut in operands_cut(item, spot):
            more = {operand} if cut is None else self.leaves_of(operand, cut)
            if more is None:
                return None
            leaves |= more
        return frozenset(leaves)


def analyse(
    flat: FlatProgram,
    cut: Mapping[int, RowsState],
    sizes: DimSizes,
    takes_own: Callable[[FlatOp], bool] = lambda item: False,
    part: DimPart | None = None,
) -> FlowResult:
    """Analyse how the values of a program depend on the batch.

    Args:
      flat: the flattened program.
      cut: inputs that hold the batch, by value id.
      sizes: size of the batch, and limits on cheap values.
      takes_own: whether an op should compute sums over the batch from each
        micro-batch's own rows.
      part: the ops that may run in a loop; None: all of them.
    Raises:
      OpenedRemat: a recomputed region must be inlined first.
      Divided: a scan must be split first.
    """
    of_all = set[int]()
    while True:
        found = FlowResult(flat, sizes, takes_own=takes_own, part=part)
        found.orders.of_all = of_all
        states = found.states
        for value, const in flat.consts.items():
            is_zero = getattr(const, "shape", ()) == () and const == 0
            states[value] = WholeState(is_zero=bool(is_zero))
        states.update((v, cut.get(v, WholeState())) for v in flat.top.inputs)
        try:
            for item in flat.top.ops:
                found.keep(item, _run(found, item))
            check_in_full(states[v] for v in flat.top.outputs)
        except NeedsOrderOfAll as error:
            new = error.keys - of_all or found.orders.keys - of_all
            assert new
            of_all |= new
        else:
            return found


def _run(found: FlowResult, item: FlatOp) -> Ran:
    """Return how an op runs, with operands in full where it needs them so."""
    states = _as_known(found, item)
    if found.part is not None:
        if item.op.id not in found.part.ops:
            check_in_full(states)
            states = [s if is_outside(s) else in_full(s) for s in states]
        for i, span in found.part.seeds.get(item.op.id, {}).items():
            if is_outside(states[i]):
                states[i] = RowsState(span, phase=states[i].phase)
    is_cut, met = not all(isinstance(s, WholeState) for s in states), False
    while True:
        done = (
            _run_region(found, item, states)
            if item.regions
            else found.orders.run(item, states)
        )
        if isinstance(done, Ran):
            break
        own = found.with_own(item, states, done, is_inside=True)
        if own is not None:
            states = own
            continue
        met = True
        check_in_full(states[i] for i in done.operands)
        known = [in_full(states[i]) for i in done.operands]
        values = tuple(item.operands[i] for i in done.operands)
        phase = max(s.phase for s in known)
        found.meetings.append(BatchCoupling(item, values, done.why, phase))
        found.full.update(values)
        for i, state in zip(done.operands, known, strict=True):
            states[i] = state
    if met and is_cut and all(isinstance(s, WholeState) for s in done.results):
        last = found.meetings[-1]
        found.meetings[-1] = replace(last, is_costly=True)
    return done


def _as_known(found: FlowResult, item: FlatOp) -> list[State]:
    """Return the states of an op's operands: in full, where another operand delays the
    op until they all are known in full, and they are needed so elsewhere."""
    states = [found.states[v] for v in item.operands]
    waits = max((s.phase for s in states if isinstance(s, WholeState)), default=0)
    if all(
        isinstance(s, WholeState) or (v in found.full and known_after(s) <= waits)
        for v, s in zip(item.operands, states, strict=True)
    ):
        return [s if isinstance(s, WholeState) else in_full(s) for s in states]
    return states


def _run_region(
    found: FlowResult, item: FlatOp, states: Sequence[State]
) -> Ran | Needs:
    if all(isinstance(s, WholeState) for s in states):
        return on_whole(item, states)
    phase = max(s.phase for s in states)
    try:
        ran = found.region(item, [*map(inside, states)])
    except Coupled as error:
        partials = tuple(i for i, s in enumerate(states) if isinstance(s, Partial))
        if partials:
            return Needs(partials, error.why)
        if item.op.name in REMATS:
            raise OpenedRemat(item.op.id) from None
        if item.op.name == "scan" and error.values:
            if _made_once(item).issuperset(error.values):
                raise Divided(item, error.values, error.item) from None
        cuts = tuple(i for i, s in enumerate(states) if isinstance(s, RowsState))
        return Needs(cuts, error.why)
    uses = (
        state if isinstance(use, WholeState) else use
        for state, use in zip(states, ran.uses, strict=True)
    )
    return Ran(tuple(uses), tuple(in_loop(s, phase) for s in ran.results))


def _made_once(item: FlatOp) -> set[int]:
    """Return the ids of the values that an iteration of a loop, or one run of a
    recomputed region, computes: without those of loops and conditionals inside, which a
    split loop cannot stack."""
    found = set[int]()
    for inner in (i for block in item.regions for i in block.ops):
        found.update(inner.results)
        if inner.op.name in REMATS:
            found |= _made_once(inner)
    return found


def analyse_one(
    flat: FlatProgram, inputs: Mapping[int, RowsState], sizes: DimSizes
) -> FlowResult:
    """Return the analysis of a program whose batch is one row.

    Args:
      flat: the program.
      inputs: inputs that hold the batch, by value id.
      sizes: size of the batch.
    """
    found = FlowResult(flat, sizes)
    states = found.states
    states.update(dict.fromkeys(flat.consts, WholeState()))
    states.update({v: inputs.get(v, WholeState()) for v in flat.top.inputs})
    after = _after(flat, inputs)
    of_update = flat.top.read_by(after)
    for i, item in enumerate(flat.top.ops):
        uses = tuple(states[v] for v in item.operands)
        made: list[State] = [WholeState()] * len(item.results)
        if i in after:
            made = [WholeState(1)] * len(item.results)
        elif not all(s == WholeState() for s in uses):
            made = [
                Partial("sum")
                if v in of_update and "float" in flat.program.values[v].dtype
                else WholeState(0, is_inside=True)
                for v in item.results
            ]
        found.keep(item, Ran(uses, tuple(made)))
    return found


def _after(flat: FlatProgram, inputs: Collection[int]) -> set[int]:
    """Return the positions of the ops that run once per step, after the micro-batch.

    These are updates of state, ops that read them, and ops on gradients alone whose
    results the step returns.
    """
    top = flat.top
    ends = zip(flat.program.outputs, top.outputs, strict=True)
    state = [v for end, v in ends if end.state_of is not None]
    shapes = {flat.program.values[v].shape for v in state}

    def maker(value: int) -> int | None:
        """Return the op that computes a value, if it may be an update."""
        i = top.maker.get(value)
        return i if i is not None and _is_update(top.ops[i], shapes) else None

    # Elementwise ops and norms between gradients and the state, or all results.
    updates, _ = trace_back(state, maker, top.reads.__getitem__)
    metrics, _ = trace_back(top.outputs, maker, top.reads.__getitem__)
    data, late, found = {*inputs}, set[int](), set[int]()
    read = top.read_by(updates)
    for i, reads in enumerate(top.reads):
        of_data = data.intersection(reads)
        if not of_data:
            continue
        data.update(top.makes[i])
        is_metric = i in metrics and of_data <= read | late
        if i in updates or is_metric or not late.isdisjoint(of_data):
            late.update(top.makes[i])
            found.add(i)
    return found


def _is_update(item: FlatOp, shapes: Collection[tuple[int, ...]]) -> bool:
    """Whether an op may belong to an optimizer's update.

    Args:
      item: the op.
      shapes: shapes of the state.
    """
    if item.op.call is not None:
        return item.op.call.kind is RegionKind.COND  # skips non-finite updates
    if item.op.traits.kind is OpKind.REDUCTION:
        shape, made = item.eqn.invars[0].aval.shape, item.eqn.outvars[0].aval.shape
        return math.prod(made) == 1 and shape in shapes
    # Only automatic differentiation emits `add_any`, to sum cotangents.
    return item.op.traits.kind in UPDATING and item.op.name != "add_any"
