"""Transfer functions of ops with regions, for complete, sliced and partial operands.

A region runs inside one loop over micro-batches: whatever it needs of the batch in full
must be known before. Where it is not, `Coupled` names the op and what it needs.

Carries of a scan over rows may only accumulate, so that rows may come in any order.
A carry accumulates where each iteration adds to it (or takes the maximum, say) a value
that depends on no carry, and nothing else reads it: the gradient of a closed-over value
of the body, or a user's own running sum.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rhino_jax.ir.axes import crossings
from rhino_jax.ir.program import Program, RegionCall, RegionKind
from rhino_jax.ir.traits import OpKind
from rhino_jax.passes.microbatch.flow.ops import (
    DimSizes,
    Needs,
    Ran,
)
from rhino_jax.passes.microbatch.flow.orders import Orders, check_in_full
from rhino_jax.passes.microbatch.flow.states import (
    Partial,
    RowsState,
    State,
    WholeState,
    is_of_rows,
    is_own,
    is_sorted,
)
from rhino_jax.rewrite.flat import FlatOp, FlatProgram, FlatRegion


UNCHANGED = ""
"""Reducer of a carry that is not combined with anything."""


@dataclass(eq=False)
class NotAccumulated(Exception):
    """A carry is used otherwise than to accumulate.

    Attributes:
      item: the op that uses it; None where no single op does.
    """

    item: FlatOp | None = None


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
        v: (i, UNCHANGED) for i, v in enumerate(carries) if block.outputs[i] != v
    }  # An unchanged carry may be read by any op: it is the same for all rows.
    tracked = _Combining(program).follow(block, dict(changed))
    found = [tracked.get(v, (None, UNCHANGED)) for v in block.outputs]
    own = [changed.get(v, (None, UNCHANGED))[0] for v in carries]
    if [i for i, _ in found] != [*own, *(None for _ in call.stacked(found))]:
        raise NotAccumulated
    return tuple(reducer for _, reducer in found[: call.num_carry])


def is_summed(block: FlatRegion, entering: int, leaving: int, program: Program) -> bool:
    """Whether a carry is scaled, added to or selected to its next value alone.

    Args:
      block: the body of the loop.
      entering, leaving: ids of the carry, and of its next value.
      program: the program that ids refer to.
    """
    combining = _Combining(program, may_scale=True)
    try:
        tracked = combining.follow(block, {entering: (0, UNCHANGED)})
    except NotAccumulated:
        return False
    return tracked.keys() & block.outputs == {leaving}


Combined = tuple[int, str]
"""A carry, combined with other values: its position among the carries, the reducer."""


@dataclass(frozen=True, slots=True)
class _Combining:
    """A walk over a loop's body that follows carries, combined with other values.

    Attributes:
      program: the program that ids refer to.
      may_scale: whether linear ops may scale a carry, so that rows come in their order.
    """

    program: Program
    may_scale: bool = False

    def follow(
        self, block: FlatRegion, tracked: dict[int, Combined]
    ) -> dict[int, Combined]:
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
                made = (self._region if item.regions else self._plain)(item, at)
                tracked |= {item.results[i]: carry for i, carry in made.items()}
        return tracked

    def _plain(
        self, item: FlatOp, at: Mapping[int, Combined]
    ) -> Mapping[int, Combined]:
        """Return the results of an op that are accumulated carries, by position, given
        those among its operands."""
        traits, count = item.op.traits, len(item.operands)
        values = self.program.values
        dtypes = {values[v].dtype for v in (*item.operands, *item.results)}
        if traits.kind is OpKind.CONVERSION and len(dtypes) == 1:
            return at
        if traits.kind is OpKind.IDENTITY and traits.moves:
            if count == len(item.results):
                return at
        ways = traits.commutes_in(count)
        if self.may_scale:
            is_kept = traits.is_elementwise and any(at.keys() <= {*w} for w in ways)
        elif len(at) == 1 and at.keys() <= {*traits.accumulates}:
            return {0: _either([*at.values()], item, traits.reducer)}
        else:
            is_kept = traits.is_choice and tuple(at) in ways
        if not is_kept:
            raise NotAccumulated(item)
        return {0: _either([*at.values()], item)}

    def _region(
        self, item: FlatOp, at: Mapping[int, Combined]
    ) -> Mapping[int, Combined]:
        """Return the results of an op with regions that are accumulated carries."""
        kind, ends = item.call.kind, [*crossings(item.op)]
        if kind is RegionKind.WHILE or (kind is RegionKind.COND and 0 in at):
            raise NotAccumulated(item)
        tracked = {
            v: at[i] for e in ends for i in e.operands if i in at for v in e.entering
        }
        for block in item.regions:
            self.follow(block, tracked)
        found: dict[int, Combined] = {}
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


def _either(carries: Collection[Combined], item: FlatOp, *reducers: str) -> Combined:
    """Return the carry that all of these are, combined by further reducers.

    Raises:
      NotAccumulated: they are different carries, or combined by different reducers.
    """
    places = {place for place, _ in carries}
    found = {*reducers, *(reducer for _, reducer in carries)} - {UNCHANGED}
    if len(places) > 1 or len(found) > 1:
        raise NotAccumulated(item)
    return places.pop(), next(iter(found), UNCHANGED)


ROW_AFTER_ROW = "it carries something from row to row of the batch"


@dataclass(eq=False)
class Coupled(Exception):
    """An op inside a region needs a value of the whole batch.

    Attributes:
      item: the op.
      why: the reason, in words.
      values: ids of the values that it needs, where these are sums over the batch.
    """

    item: FlatOp
    why: str
    values: tuple[int, ...] = ()


@dataclass(slots=True)
class Flow:
    """States of a program's values, and how its ops run.

    Attributes:
      flat: the flattened program.
      sizes: size of the batch, and limits on cheap values.
      states: state of every value analysed, by id; inside regions relative to the loop.
      ran: how every op analysed runs, by id.
      takes_own: whether an op should compute sums over the batch from each
        micro-batch's own rows.
      own: ids of the ops that do.
      orders: the sorts that each micro-batch does by itself.
    """

    flat: FlatProgram
    sizes: DimSizes
    states: dict[int, State] = field(default_factory=dict)
    ran: dict[int, Ran] = field(default_factory=dict)
    takes_own: Callable[[FlatOp], bool] = lambda item: False
    own: set[int] = field(default_factory=set)
    orders: Orders = field(init=False)

    def __post_init__(self) -> None:
        self.orders = Orders(self.flat, self.states, self.ran, sizes=self.sizes)

    def block(self, block: FlatRegion) -> None:
        """Analyse the ops of a region, given the states of its inputs.

        Raises:
          Coupled: an op needs a value of the whole batch.
        """
        for item in block.ops:
            states = [self.states[v] for v in item.operands]
            run = self.region if item.regions else self.plain
            self.keep(item, run(item, states))

    def plain(self, item: FlatOp, states: list[State]) -> Ran:
        """Return how an op without regions runs inside of a region."""
        found = self.orders.run(item, states)
        if not isinstance(found, Needs):
            return found
        own = self.with_own(item, states, found, is_inside=False)
        return (
            self.masked(item, states, found) if own is None else self.plain(item, own)
        )

    def with_own(
        self, item: FlatOp, states: Sequence[State], needs: Needs, *, is_inside: bool
    ) -> list[State] | None:
        """Return the operands' states of an op that takes sums over each micro-batch
        alone.

        Args:
          item: the op.
          states: states of its operands.
          needs: the operands that it needs in full.
          is_inside: whether the op is at the top level, so that states are absolute.
        Returns:
          None where it should not, or an operand that it needs is no sum of floats over
            the batch.
        """
        if not self.takes_own(item):
            return None
        found = list(states)
        for i in needs.operands:
            state, dtype = states[i], self.flat.program.values[item.operands[i]].dtype
            if not isinstance(state, Partial) or state.reducer != "sum":
                return None
            if not ("float" in dtype or "complex" in dtype):
                return None
            found[i] = WholeState(state.phase, is_inside=is_inside, is_own=True)
        self.own.add(item.op.id)
        return found

    def keep(self, item: FlatOp, ran: Ran) -> None:
        """Record how an op runs, and the states of its results."""
        self.ran[item.op.id] = ran
        self.states.update(zip(item.results, ran.results, strict=True))

    def masked(self, item: FlatOp, states: list[State], needs: Needs) -> Ran:
        """Run an op that would be linear if its complete operand were partial as well.

        All micro-batches but the first then read zeros for that operand.

        Args:
          item: the op.
          states: states of its operands.
          needs: the operands that it needs in full, and why.
        Raises:
          Coupled: the op is no such addition.
        """
        at = [s for s in states if isinstance(s, Partial)]
        is_sum = bool(at) and all(s.reducer == "sum" for s in at)
        if item.op.traits.accumulates and item.op.traits.reducer == "sum" and is_sum:
            if all(isinstance(s, WholeState | Partial) for s in states):
                return Ran((at[0],) * len(states), (at[0],))
        values = tuple(item.operands[i] for i in needs.operands)
        is_summed = all(isinstance(self.states[v], Partial) for v in values)
        raise Coupled(item, needs.why, self.earliest(values) if is_summed else ())

    def earliest(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Trace values back to the sums over the batch that they are computed from.

        It stops where a sum would be larger than the value, and at the sizes of groups
        of rows, of which each micro-batch needs its own.
        """
        found = []
        for value in values:
            while (item := self.flat.maker.get(value)) is not None:
                sums = [v for v in item.operands if isinstance(self.states[v], Partial)]
                own = any(is_of_rows(self.states[v]) for v in item.operands)
                if len(sums) != 1 or own or self.bytes(sums[0]) > self.bytes(value):
                    break
                (value,) = sums
            found.append(value)
        return tuple(dict.fromkeys(found))

    def bytes(self, value: int) -> int:
        """Return the size in bytes of a value."""
        return self.flat.program.values[value].bytes

    def region(self, item: FlatOp, states: Sequence[State]) -> Ran:
        """Return how an op with regions runs inside a loop.

        Args:
          item: the op.
          states: states of its operands, relative to the loop.
        Raises:
          Coupled: an op in it needs a value of the whole batch.
        """
        if all(isinstance(s, WholeState) for s in states):
            made = WholeState(is_own=any(map(is_own, states)))
            return Ran(tuple(states), (made,) * len(item.results))
        kind, uses = item.call.kind, [*states]
        if kind is RegionKind.COND and not isinstance(states[0], WholeState):
            raise Coupled(item, "which way it goes depends on the whole batch")
        if kind is RegionKind.SCAN and any(
            isinstance(s, RowsState) and s.span.dim == 0
            for s in item.call.sliced(states)
        ):
            return _scan_over_rows(self.flat.program, item, states)
        results = self._around(item, uses)
        if kind in (RegionKind.CALL, RegionKind.SCAN) and self._cut_inside(item, uses):
            results = self._around(item, uses)
        return Ran(tuple(uses), tuple(results))

    def _around(self, item: FlatOp, uses: list[State]) -> list[State]:
        """Analyse the regions of an op, to a fixed point of its carries' states.

        Args:
          item: the op.
          uses: states in which it reads its operands; those of carries are updated.
        Returns:
          States of its results.
        """
        ends, results = [*crossings(item.op)], dict[int, State]()
        is_while = item.call.kind is RegionKind.WHILE
        while True:
            before = [*uses]
            for end in ends:
                for i in end.operands:
                    state = _moved(uses[i], -end.is_stack)
                    self.states.update(dict.fromkeys(end.entering, state))
            for block in item.regions:
                self.block(block)
                if is_while and block is item.regions[0]:
                    if not isinstance(self.states[block.outputs[0]], WholeState):
                        why = "how long it runs depends on the whole batch"
                        raise Coupled(item, why)
            for end in ends:
                left = [self.states[self.flat.top.named(v)] for v in end.leaving]
                for at in end.results:
                    found, *others = [*(uses[i] for i in end.operands), *left]
                    for other in others:
                        found = self.joined(item, found, other)
                    results[at] = _moved(found, end.is_stack)
                    for i in end.operands:
                        uses[i] = found
            if uses == before:
                return [results[k] for k in range(len(item.results))]

    def joined(self, item: FlatOp, a: State, b: State) -> State:
        """Return the state of a value that has one state or the other.

        Args:
          item: the op that merges them: a loop or conditional.
          a, b: the states.
        Raises:
          Coupled: no state covers both.
        """
        if isinstance(a, WholeState) and isinstance(b, WholeState):
            zero, own = a.is_zero and b.is_zero, a.is_own or b.is_own
            return replace(a, is_zero=zero, is_own=own)
        if isinstance(a, WholeState):
            a, b = b, a
        if a == b or (
            isinstance(b, WholeState)
            and not (isinstance(a, Partial) and a.reducer != "sum")
        ):
            return a
        raise Coupled(item, "what it carries is once cut, once a sum over the batch")

    def _cut_inside(self, item: FlatOp, uses: list[State]) -> bool:
        """Slice complete operands of which an op's region reads only rows of the batch.

        A mask that is broadcast to the batch outside of a loop over layers is then not
        computed for the whole batch.

        Args:
          item: a loop over layers, or a recomputed region, as analysed.
          uses: states in which it reads its operands; updated.
        Returns:
          Whether any is sliced.
        """
        (block,) = item.regions
        read: dict[int, list[State]] = {v: [self.states[v]] for v in block.outputs}
        for inner in block.ops:
            pairs = zip(inner.operands, self.ran[inner.op.id].uses, strict=True)
            for value, use in pairs:
                read.setdefault(value, []).append(use)
        is_call, before = item.call.kind is RegionKind.CALL, [*uses]
        count = len(uses) if is_call else item.call.num_consts
        for i, value in enumerate(block.inputs[:count]):
            own = read.get(value, [])
            spans = {use.span for use in own if isinstance(use, RowsState)}
            is_cut = isinstance(uses[i], WholeState) and len(spans) == 1
            if is_cut and all(
                isinstance(u, RowsState) and not is_sorted(u) for u in own
            ):
                uses[i] = RowsState(spans.pop())
        return uses != before


def _moved(state: State, by: int) -> State:
    """Return the state of slices of a value, or of their stack."""
    return state.moved(by) if isinstance(state, RowsState) and by else state


def _scan_over_rows(program: Program, item: FlatOp, states: Sequence[State]) -> Ran:
    """Return how a scan over rows of the batch runs: with fewer iterations.

    Its body runs unchanged.
    """
    check_in_full(states)
    call, first = item.call, item.call.first_slice
    sliced, consts = call.sliced(states), call.consts(states)
    cuts = {s.span for s in sliced if isinstance(s, RowsState)}
    if len(cuts) > 1 or any(isinstance(s, RowsState) for s in states[:first]):
        raise Coupled(item, "it reads the batch of a row, and that of all rows")
    if any(isinstance(s, Partial) for s in (*consts, *sliced)):
        raise Coupled(item, "what it does to each row needs a sum over the batch")
    try:
        reducers = reducers_of(item.regions[0], call, program)
    except NotAccumulated as error:
        raise Coupled(error.item or item, ROW_AFTER_ROW) from None
    carries: list[State] = []
    for state, reducer in zip(call.carries(states), reducers, strict=True):
        is_other = isinstance(state, Partial) and state.reducer != reducer
        if (is_other or is_own(state)) and reducer != UNCHANGED:
            raise Coupled(item, ROW_AFTER_ROW)
        carries.append(state if reducer == UNCHANGED else Partial(reducer))
    rows = (RowsState(cuts.pop()),)
    made = (*carries, *rows * len(call.stacked(item.results)))
    return Ran((*consts, *carries, *rows * len(sliced)), made)
