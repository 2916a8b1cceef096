"""Choose which ops run in which loop: only what is needed, as late as possible.

A value that is needed in full is computed by the last loop that is early enough, so
that sums which only the update reads cause no op to run twice. A cheap value is
computed outside of loops where it is needed before a loop could have computed it, or
where it would need another loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Demand:
    """The loops over micro-batches that the outputs of a program require.

    Attributes:
      found: the analysis.
      time: id of each value that is needed in full → index of the first loop that reads
        it.
      made: ids of those values that a loop computes.
      loops: the loops.
    """

    found: FlowResult
    time: dict[int, int]
    made: set[int]
    loops: tuple[MicrobatchLoop, ...]

    @classmethod
    def of(cls, found: FlowResult) -> Demand:
        """Require the outputs of a program in full."""
        flat, values = found.flat, found.flat.program.values
        time, made = dict[int, int](), set[int]()
        # The number of loops if every cheap value is computed outside of them.
        most_loops = 0

        def want(wanted: Iterable[int], at: int) -> None:
            """Require values in full, and with them the operands of ops outside of
            loops.

            Args:
              wanted: ids of the values.
              at: index of the loop that reads them; the number of loops or more: after
                all.
            """
            queue = list(wanted)
            while queue:
                value = queue.pop()
                if time.get(value, at + 1) <= at:
                    continue
                time[value] = at
                item, state = flat.maker.get(value), found.states[value]
                if item is None:
                    continue
                is_of_loop = _is_of_loop(state, min(at, most_loops))
                if is_of_loop and not joins_sums(item, state):
                    made.add(value)
                else:
                    made.discard(value)
                    queue += item.operands

        def joins_sums(item: FlatOp, state: State) -> bool:
            """Whether an op joins sums over the batch: these are added up one by one,
            and joined once, after the loop, as gradients of layers to a stack."""
            return (
                isinstance(state, Partial)
                and item.op.traits.kind is OpKind.MOVEMENT
                and len(item.operands) > 1
                and all(found.states[v] == state for v in item.operands)
                and sum(values[v].bytes for v in item.operands)
                == sum(values[v].bytes for v in item.results)
            )

        def loops_of_outputs() -> int:
            """Require the program's outputs; return the number of loops needed."""
            time.clear()
            made.clear()
            want(flat.top.outputs, 1 << 30)
            return 1 + max((found.states[v].phase for v in made), default=-1)

        def body_of(loop: int) -> MicrobatchLoop:
            leaving = sorted(v for v in made if time[v] == loop + 1)
            ops, entering = set[int](), set[LoopCrossing]()
            queue: list[tuple[int, State]] = [(v, found.states[v]) for v in leaving]
            seen = set(queue)
            # In the order of operands, not of a set, which differs between processes:
            # what is wanted early changes what later values need.
            while queue:
                value, use = queue.pop()
                state, item = found.states[value], flat.maker.get(value)
                # A complete sum does not give a micro-batch's partial value, nor its
                # own one: these are recomputed.
                is_known = (
                    value in made
                    and time[value] <= loop
                    and not (isinstance(state, Partial) or is_own(state))
                )
                if item is not None and is_there(state, use) and not is_known:
                    ops.add(item.op.id)
                    uses = found.ran[item.op.id].uses
                    reads = dict.fromkeys(zip(item.operands, uses, strict=True))
                    queue += [read for read in reversed(reads) if read not in seen]
                    seen.update(reads)
                    continue
                enters: Collection[int] = [value]
                if isinstance(use, RowsState):
                    leaves = found.leaves_of(value, use.span)
                    if leaves is None or value in made:
                        entering.add(LoopCrossing(value, "sliced", use.span))
                        want([value], loop)
                        continue
                    enters = leaves
                entering.update(LoopCrossing(v, "whole") for v in enters)
                want(enters, loop)
            return MicrobatchLoop(
                tuple(sorted(ops)),
                tuple(
                    sorted(entering, key=lambda c: (c.how != "whole", c.value, c.span))
                ),
                tuple(_leaving(v, found.states[v]) for v in leaving),
            )

        most_loops = loops_of_outputs() or 1 << 30
        after = loops_of_outputs()
        time.update(dict.fromkeys(time, after))
        while True:
            before = dict(time)
            loops = [*map(body_of, reversed(range(after)))]
            if time == before:
                return cls(found, time, made, tuple(reversed(loops)))

    def outside(self) -> tuple[tuple[int, ...], ...]:
        """Return ids of the ops that run on the whole batch, by the loop after them."""
        known = {v: self.time[v] for v in self.made}
        found: list[list[int]] = [[] for _ in range(len(self.loops) + 1)]
        for item in self.found.flat.top.ops:
            if self.made.issuperset(self.time.keys() & item.results):
                continue
            at = max((known.get(v, 0) for v in item.operands), default=0)
            known.update((v, at) for v in item.results if v not in self.made)
            found[at].append(item.op.id)
        return tuple(map(tuple, found))


def _is_of_loop(state: State, time: int) -> bool:
    """Whether a loop computes a value that is needed in full before loop `time`.

    It does where only a loop can, or where one that can has run by then.
    """
    if isinstance(state, WholeState):
        return not is_outside(state)
    return state.cheap is None or state.phase < time


def _leaving(value: int, state: State) -> LoopCrossing:
    if isinstance(state, Partial):
        return LoopCrossing(value, state.reducer)
    if isinstance(state, RowsState):
        return LoopCrossing(value, "stacked", state.span)
    if is_own(state):
        return LoopCrossing(value, "mean")
    return LoopCrossing(value, "unchanged")
