"""Choose which ops run in which loop: only what is needed, as late as possible.

A value that is needed in full is computed by the last loop that is early enough, so
that sums which only the update reads cause no op to run twice. A cheap value is
computed outside of loops where it is needed before a loop could have computed it, or
where it would need another loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from rhino_jax.ir.axes import AxisSpan
from rhino_jax.ir.traits import OpKind
from rhino_jax.passes.microbatch.cut import LoopCrossing, MicrobatchLoop
from rhino_jax.passes.microbatch.flow.analysis import FlowResult
from rhino_jax.passes.microbatch.flow.states import (
    Partial,
    RowsState,
    State,
    WholeState,
    is_outside,
    is_own,
    is_there,
)
from rhino_jax.rewrite.flat import FlatOp


@dataclass(slots=True)
class LoopDemand:
    """Ops, inputs and outputs of one loop over micro-batches.

    Attributes:
      ops: ids of the ops that run on each micro-batch.
      entering: values that each micro-batch reads in full, or its rows of.
      made: ids of the values that the loop computes in full, for later readers.
    """

    ops: set[int] = field(default_factory=set)
    entering: set[LoopCrossing] = field(default_factory=set)
    made: list[int] = field(default_factory=list)


class Demand:
    """The loops over micro-batches that the outputs of a program require.

    Attributes:
      found: the analysis.
      flat: the flattened program.
      time: id of each value that is needed in full → index of the first loop that reads
        it.
      made: ids of those values that a loop computes.
      bodies: ops, inputs and outputs of each loop.
    """

    def __init__(self, found: FlowResult) -> None:
        self.found, self.flat = found, found.flat
        self.time: dict[int, int] = {}
        self.made: set[int] = set()
        self.bodies: list[LoopDemand] = []
        # The number of loops if every cheap value is computed outside of them.
        self._most_loops = 0
        self._most_loops = self._loops_of_outputs() or 1 << 30
        after = self._loops_of_outputs()
        self.time = dict.fromkeys(self.time, after)
        while True:
            before = dict(self.time)
            self.bodies = [LoopDemand() for _ in range(after)]
            for loop in reversed(range(after)):
                self._body(loop)
            if self.time == before:
                break

    def _loops_of_outputs(self) -> int:
        """Require the program's outputs in full; return the number of loops needed."""
        self.time, self.made = {}, set()
        self.want(self.flat.top.outputs, 1 << 30)
        phases = [self.found.states[v].phase for v in self.made]
        return max(phases, default=-1) + 1

    def want(self, values: Iterable[int], time: int) -> None:
        """Require values in full, and with them the operands of ops outside of loops.

        Args:
          values: ids of the values.
          time: index of the loop that reads them; the number of loops or more: after
            all.
        """
        queue = list(values)
        while queue:
            value = queue.pop()
            if self.time.get(value, time + 1) <= time:
                continue
            self.time[value] = time
            item, state = self.flat.maker.get(value), self.found.states[value]
            if item is None:
                continue
            if (
                is_outside(state)
                or not self._is_of_loop(state, time)
                or self._joins_sums(item, state)
            ):
                self.made.discard(value)
                queue += item.operands
            else:
                self.made.add(value)

    def _is_of_loop(self, state: State, time: int) -> bool:
        """Whether a loop computes a value that is needed in full before loop `time`.

        It does where only a loop can, or where one that can has run by then.
        """
        if isinstance(state, WholeState) or state.cheap is None:
            return True
        return state.phase < min(time, self._most_loops)

    def _joins_sums(self, item: FlatOp, state: State) -> bool:
        """Whether an op joins sums over the batch: these are added up one by one, and
        joined once, after the loop, as gradients of layers to a stack."""
        joined = [self.found.states[v] for v in item.operands]
        values = self.flat.program.values
        return (
            isinstance(state, Partial)
            and item.op.traits.kind is OpKind.MOVEMENT
            and len(joined) > 1
            and all(x == state for x in joined)
            and sum(values[v].bytes for v in item.operands)
            == sum(values[v].bytes for v in item.results)
        )

    def _body(self, loop: int) -> None:
        body = self.bodies[loop]
        body.made = sorted(v for v in self.made if self.time[v] == loop + 1)
        queue: list[tuple[int, State]] = [(v, self.found.states[v]) for v in body.made]
        seen = set(queue)
        # In the order of operands, not of a set, which differs between processes: what
        # is wanted early changes what later values need.
        while queue:
            value, use = queue.pop()
            state, item = self.found.states[value], self.flat.maker.get(value)
            # A complete sum does not give a micro-batch's partial value, nor its own
            # one: these are recomputed.
            is_known = (
                value in self.made
                and self.time[value] <= loop
                and not (isinstance(state, Partial) or is_own(state))
            )
            if item is not None and is_there(state, use) and not is_known:
                body.ops.add(item.op.id)
                uses = self.found.ran[item.op.id].uses
                reads = dict.fromkeys(zip(item.operands, uses, strict=True))
                queue += [read for read in reversed(reads) if read not in seen]
                seen.update(reads)
            elif isinstance(use, RowsState):
                self._slice(body, value, use.span, loop)
            else:
                self._enter(body, [value], loop)

    def _slice(self, body: LoopDemand, value: int, span: AxisSpan, loop: int) -> None:
        leaves = self.found.leaves_of(value, span)
        if leaves is None or value in self.made:
            body.entering.add(LoopCrossing(value, "sliced", span))
            self.want([value], loop)
        else:
            self._enter(body, leaves, loop)

    def _enter(self, body: LoopDemand, values: Collection[int], loop: int) -> None:
        body.entering.update(LoopCrossing(v, "whole") for v in values)
        self.want(values, loop)

    def loops(self) -> tuple[MicrobatchLoop, ...]:
        """Return the loops as data."""
        return tuple(
            MicrobatchLoop(
                tuple(sorted(b.ops)),
                tuple(
                    sorted(
                        b.entering, key=lambda c: (c.how != "whole", c.value, c.span)
                    )
                ),
                tuple(_leaving(v, self.found.states[v]) for v in b.made),
            )
            for b in self.bodies
        )

    def outside(self) -> tuple[tuple[int, ...], ...]:
        """Return ids of the ops that run on the whole batch, by the loop after them."""
        known: dict[int, int] = {}
        found: list[list[int]] = [[] for _ in range(len(self.bodies) + 1)]
        for item in self.flat.top.ops:
            wanted = [v for v in item.results if v in self.time]
            for value in wanted:
                if value in self.made:
                    known[value] = self.time[value]
            if not any(v not in self.made for v in wanted):
                continue
            at = max((known.get(v, 0) for v in item.operands), default=0)
            known.update((v, at) for v in item.results if v not in self.made)
            found[at].append(item.op.id)
        return tuple(map(tuple, found))


def _leaving(value: int, state: State) -> LoopCrossing:
    if isinstance(state, Partial):
        return LoopCrossing(value, state.reducer)
    if isinstance(state, RowsState):
        return LoopCrossing(value, "stacked", state.span)
    if is_own(state):
        return LoopCrossing(value, "mean")
    return LoopCrossing(value, "unchanged")
