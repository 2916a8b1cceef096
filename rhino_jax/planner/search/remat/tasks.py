"""The residuals between forward and backward tasks as remat candidates, with costs.

A task is compiled separately: every value that another task reads is written to memory,
even if it would stay in registers in a single program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from rhino_jax.analysis.graph import NodeKind
from rhino_jax.passes.remat.late import Halves, with_late
from rhino_jax.passes.remat.rerun import again
from rhino_jax.passes.remat.residual_stacks import ResidualStack
from rhino_jax.pipeline.offload import MOVING
from rhino_jax.planner.search.records import LIMITS, SolvedMesh
from rhino_jax.planner.search.remat.candidates import ResidualReader
from rhino_jax.planner.search.remat.choice import RematQuestion, RematRow
from rhino_jax.rewrite.flat import FlatRegion
from rhino_jax.solver.remat.question import SavedValue, coarse


@dataclass(frozen=True, slots=True)
class Tasks:
    """Tasks of a program, each a call of its own.

    Attributes:
      before: op ids of the calls that run before all forward passes.
      forward: op ids of the calls whose values may be recomputed.
      sums: results of these that are accumulated over micro-batches.
      received: inputs of the program that are of a micro-batch as well.
      in_flight: number of micro-batches whose residuals are live.
      keeps_stacks: whether stacked residuals of loops stay, as where backward passes
        are split.
      hosted: results of the program's calls, and inputs, that may be offloaded.
      host_bytes_per_s: bandwidth of a device's link to host memory, one way.
    """

    before: frozenset[int]
    forward: frozenset[int]
    sums: frozenset[int]
    received: frozenset[int]
    in_flight: int
    keeps_stacks: bool = False
    hosted: frozenset[int] = frozenset()
    host_bytes_per_s: float = 0.0


class AskingTasks(ResidualReader):
    """Read candidates off the tasks of a stage.

    Every value that crosses from task to task is stored, and may be recomputed if a
    forward task computes it.
    """

    def __init__(self, solved: SolvedMesh, tasks: Tasks) -> None:
        self.tasks, self.beside = tasks, dict[int, int]()
        super().__init__(solved)
        self.is_held = self.model.analysis.liveness.is_held
        self.bound = frozenset()
        self.free = {
            v
            for line in self.block.ops
            if line.within and line.within[0].op.id in tasks.forward
            for v in line.results
        }
        self.free -= {self.block.named(v) for v in tasks.sums}
        self.hosted = {self.block.named(v) for v in tasks.hosted}
        self.hosted &= self.free | tasks.received

    def _sources(self, stored: Collection[int]) -> list[int]:
        """Return results of matmuls, which are in memory anyway: such as attention's
        scores, from which its exponentials are recomputed."""
        free = (v for v in stored if v in self.free and v not in self.stacks)
        return self._products(free, {*stored, *self.bound})

    @property
    def most_saved_s(self) -> float:
        """Seconds to write and read all stacked residuals, and all values that would
        stay in registers but for the border between tasks."""
        stacks = [s for s in self.stacks.values() if self._may_go(s)]
        plain = (v for v in self._kept() if v in self.free and v not in self.stacks)
        stacks_s = self.device.stack_passes * sum(map(self._pass_s, stacks))
        return stacks_s + 2 * sum(map(self._border_s, plain))

    def _border_s(self, value: int) -> float:
        """Return the seconds of all writes of a value that could stay in registers."""
        port = self.model.graph.held.get(value)
        if port is None or port.id not in self.model.analysis.liveness.handed:
            return 0.0
        return self.micro_batches * self._memory_s(self._bytes(value))

    def _may_go(self, stack: ResidualStack) -> bool:
        return stack.value in self.free and not self.tasks.keeps_stacks

    def _pass_s(self, stack: ResidualStack) -> float:
        # All micro-batches are counted, as in other seconds.
        within = self.block.ops[stack.loop].within
        task = within[0].op.call if within else None
        times = task.trip_count if task is not None else 1
        return times * super()._pass_s(stack)

    def _halves(self) -> Halves:
        early = self.tasks.before | self.tasks.forward
        lines = self.flat.top.ops
        is_late = [
            not line.within or line.within[0].op.id not in early for line in lines
        ]
        return with_late(self.flat.top, is_late)

    def asked(self) -> RematQuestion:
        """Return the remat problem with residuals of all micro-batches in flight."""
        found = super().asked()
        question, inputs = found.question, {*self.block.inputs}
        # Values of one micro-batch, as those of loops' bodies are.
        of_one = self.free | self.tasks.received
        candidates = tuple(
            self._held(c, self.beside.get(v, 0))
            if v in of_one or (v not in self.block.maker and v not in inputs)
            else c
            for v, c in zip(found.values, question.candidates, strict=True)
        )
        question = replace(question, candidates=candidates, beside_s=self._beside_s())
        # Late times become a few, and operands that are recomputed within one of them
        # are live one after the other.
        if (few := coarse(question, LIMITS.late_times)) is not question:
            plain = (replace(c, extra_bytes=0) for c in few.candidates)
            question = replace(few, candidates=tuple(plain))
        # A stage's choice saves all slices of a stack, or none.
        return replace(found, question=question, is_ordered=False, parts=1)

    def _beside_s(self) -> float:
        """Return the seconds of the shorter pass of all micro-batches: the time that
        offload and fetch may each take concurrently with compute."""
        if not self.hosted:
            return 0.0
        passes = [0.0, 0.0]
        for line, is_late in zip(self.block.ops, self.halves.is_late, strict=True):
            task = line.within[0].op if line.within else None
            if task is None or task.id in self.tasks.before or task.call is None:
                continue
            if task.call.trip_count == self.micro_batches:
                passes[is_late] += self._line_s(line)
        return min(passes)

    def _sent(self, row: RematRow) -> RematRow:
        """Return a candidate that may be offloaded: it is written to device memory
        first, and copies read and write that, whatever runs concurrently."""
        if row.value not in self.hosted:
            return replace(row, offload_s=None)
        size = self.micro_batches * self._bytes(row.value)
        link_s = size / self.tasks.host_bytes_per_s
        offload_s = row.save_s + 2 * self._memory_s(size)
        return replace(row, offload_s=offload_s, link_s=link_s)

    @property
    def micro_batches(self) -> int:
        """Number of runs of the calls of forward tasks."""
        ops = (self.program.ops[i] for i in self.tasks.forward)
        return max((o.call.trip_count for o in ops if o.call is not None), default=1)

    def _held(self, c: SavedValue, beside: int) -> SavedValue:
        """Return a candidate as a task's argument, which is live from the task's start
        to its end."""
        own = c.bytes if c.remat_bytes is None else c.remat_bytes
        always, moving = (
            count * c.bytes
            for count in (self.tasks.in_flight, min(self.tasks.in_flight, MOVING))
        )
        return replace(
            c,
            bytes=0,
            remat_bytes=own,
            always_bytes=always,
            sent_bytes=moving,
            extra_bytes=beside,
        )

    def _layer(self, node: int) -> tuple[int | None, int]:
        return None, 0  # Values of a stage's few layers are chosen one by one.

    def _is_stored(self, value: int) -> bool:
        return value in self.model.graph.held

    def _is_in_memory(self, value: int) -> bool:
        port = self.model.graph.held[value]
        is_op = self.model.graph.nodes[port.node].kind is NodeKind.OP
        return not is_op or bool(self.is_held[port.id])

    def _row(self, value: int, kept: set[int], uses: set[int]) -> RematRow:
        row = super()._row(value, kept, uses)
        if value in self.stacks:
            return self._sent(row)
        if value not in self.free:
            return self._sent(replace(row, remat_s=None))
        border_s = self._border_s(value)
        row = replace(row, save_s=2 * border_s)
        if row.remat_s is not None:
            lines = self._again(value, kept - {value}).lines
            gone_s = self._gone_s(self.block, lines, self.block.outputs)
            # The largest temporary while it is recomputed.
            made = {v for k in lines for v in self.block.ops[k].results} - {value}
            stored = (v for v in made if self._is_stored(v) and self._is_in_memory(v))
            self.beside[value] = max(map(self._bytes, stored), default=0)
            # Its cost in the plan includes the write to memory.
            remat_s = max(row.remat_s - gone_s - border_s, 0.0)
            row = replace(row, remat_s=remat_s)
        # A recomputed value is computed where it is read, as in a single program.
        is_held = self._is_in_memory(value)
        return self._sent(row if is_held else replace(row, remat_bytes=0))

    def _stack_row(self, stack: ResidualStack, uses: set[int]) -> RematRow:
        row = super()._stack_row(stack, uses)
        if not self._may_go(stack):
            return replace(row, remat_s=None)
        if row.remat_s is None:
            return row
        body = self.block.ops[stack.loop].regions[0]
        mine = [s for s in self.stacks.values() if s.loop == stack.loop]
        others = {s.inside for s in mine if s.inside != stack.inside}
        lines = again(self.program, body, [stack.inside], others).lines
        carried = self.block.ops[stack.loop].call.num_carry
        left = [v for v in body.outputs[carried:] if v != stack.inside]
        gone_s = self._gone_s(body, lines, (*body.outputs[:carried], *left))
        return replace(row, remat_s=max(row.remat_s - gone_s, 0.0))

    def _gone_s(
        self, block: FlatRegion, lines: Sequence[int], outputs: Collection[int]
    ) -> float:
        """Return the seconds of equations that need not run in the forward pass once
        they run in the backward pass.

        Args:
          block: the region of the equations.
          lines: equations that run in the backward pass.
          outputs: values that the forward equations are for, other than recomputed
            ones.
        """
        readers: dict[int, set[int]] = defaultdict(set)  # in the forward pass
        is_top = block is self.block
        for k, line in enumerate(block.ops):
            for v in () if is_top and self.halves.is_late[k] else line.operands:
                readers[v].add(k)
        needed, gone = {*outputs}, set[int]()
        for k in reversed(lines):
            makes = block.ops[k].results
            read = set().union(*(readers[v] for v in makes))
            if needed.isdisjoint(makes) and read <= gone:
                gone.add(k)
        return sum(self._line_s(block.ops[k]) for k in gone)

    def _carried(self, rows: list[RematRow]) -> list[RematRow]:
        return [*super()._carried(rows), *self._received(rows)]

    def _loops(self, rows: list[RematRow]) -> dict[int, tuple[int, tuple[int, ...]]]:
        made = [row for row in rows if row.value not in self.tasks.received]
        assert rows[len(rows) - len(made) :] == made, "what is received comes first"
        first = len(rows) - len(made)
        return {
            loop: (count, tuple(first + i for i in members))
            for loop, (count, members) in super()._loops(made).items()
        }

    def _received(self, rows: Collection[RematRow]) -> list[RematRow]:
        """Return inputs that only recomputation reads in the backward pass; and inputs
        that may be offloaded."""
        read = {v for row in rows for v in row.needs} & self.tasks.received
        late: dict[int, set[int]] = {}
        for line, is_late in zip(self.block.ops, self.halves.is_late, strict=True):
            for v in line.operands if is_late else ():
                late.setdefault(v, set()).update(self._times(line))
        hosted = self.hosted & self.tasks.received & late.keys()
        asked = sorted(v for v in (read - late.keys()) | hosted)
        uses = {v: tuple(sorted(late[v] - {0})) for v in hosted}
        return [
            self._sent(
                RematRow(self._bytes(v), 0, uses.get(v, ()), place=(-1, k), value=v)
            )
            for k, v in enumerate(asked)
            if v in self.model.graph.held
        ]
