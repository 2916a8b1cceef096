"""State of one run of a region: results of its ops, slices of stacks that a loop reads
whole or as two loops, and what late ops read instead, in device or host memory.

How compilers treat copies to the host (jax 0.10.2, libtpu 0.0.52): XLA:TPU copies
slices of a loop's stacks out and in, step by step (a GPT of 2 layers on four v5e, three
stacks: peak 189 to 93 MiB). Values outside of loops it copies out and back in at once,
at one point of the schedule, which saves nothing. XLA:GPU, compile-only, and XLA:CPU
drop the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rhino_jax.passes.remat.rerun import Decided, recomputed_values
from rhino_jax.rewrite.flat import FlatOp, FlatProgram, FlatRegion


@dataclass(frozen=True, slots=True)
class LoopRange:
    """A range of a loop's steps.

    Attributes:
      number: 0 for the first range, 1 for the second.
      start, stop: slices that the range covers.
    """

    number: int
    start: int
    stop: int


@dataclass(slots=True, eq=False)
class SlicedStacks:
    """Stacks of which each step reads a slice.

    A range of a loop reads slices of whole stacks by index, since a slice of the stack
    for the range would be a copy of it.

    Attributes:
      part: range of the loop; None: the loop runs whole.
      stacks: the stacks, and whether each has only the slices of this range.
    """

    part: LoopRange | None
    stacks: list[tuple[Any, bool]] = field(default_factory=list)

    def add(self, stack: Any, is_part: bool) -> int:
        """Add a stack if it is new, and return its position."""
        for i, (other, _) in enumerate(self.stacks):
            if other is stack:
                return i
        self.stacks.append((stack, is_part or self.part is None))
        return len(self.stacks) - 1

    def scanned(self) -> list[Any]:
        """Return the arrays that the loop scans over."""
        found = [x for x, is_part in self.stacks if is_part]
        if self.part is not None:
            count = self.part.stop - self.part.start
            numbers = lax.iota(jnp.int32, count) + jnp.int32(self.part.start)
            found.append(numbers)
        return found

    def at_step(self, scanned: Sequence[Any]) -> list[Any]:
        """Return the slices of a step, given the step's slices of `scanned`."""
        rest = iter(scanned)
        return [
            next(rest)
            if is_part
            else lax.dynamic_index_in_dim(stack, scanned[-1], 0, keepdims=False)
            for stack, is_part in self.stacks
        ]


AHEAD = 40
"""Ops between the fetch of a value and its first reader: the copy overlaps them."""


def to_host(array: Any) -> Any:
    """Copy an array to host memory; XLA:CPU leaves it where it is."""
    return jax.device_put(array, jax.memory.Space.Host)


def from_host(array: Any, ties: Sequence[Any] = ()) -> Any:
    """Copy an array back to the device, not before the arrays `ties` are available."""
    if ties:
        array, *_ = lax.optimization_barrier([array, *ties])
    return jax.device_put(array, jax.memory.Space.Device)


def waits_on_host(array: Any) -> bool:
    """Whether an array is in the host's memory."""
    return getattr(jax.typeof(array), "memory_space", None) == jax.memory.Space.Host


Read = Callable[[int], Any]
"""Value id → array."""


Table = Mapping[int | None, Decided]
"""Op id of a loop (None: the whole program) → changes to its region."""


@dataclass(slots=True, eq=False)
class Frame:
    """One run of a region.

    Attributes:
      flat: the program, calls inlined.
      table: the changes to all of its regions.
      decided: the changes to this one.
      early: value → array, as its op produced it.
      late: value → array that late ops read in its place, where that differs.
      stacks: (forward loop, value of its body) → the stack that was added for it.
      parts: stack of a loop that ran as two → stacks of both, None where the second
        stacked nothing.
      sources: input of the region whose operand was dropped → function that recomputes
        it.
      remat: value that late ops recompute → its array; None where there are none.
      reading: the op that runs now, if it is late; else None.
      last: the last value that a barrier can wait for; a late one if there is any.
      ties: late values that a barrier can wait for, in order of production.
      matmuls: result of a late matmul that the next group of recomputed ops waits for →
        the ops so far that only convert or move it, such as a gradient's transpose.
      hosted: value → its array in host memory.
    """

    flat: FlatProgram
    table: Table
    decided: Decided
    early: dict[int, Any] = field(default_factory=dict)
    late: dict[int, Any] = field(default_factory=dict)
    stacks: dict[tuple[int, int], Any] = field(default_factory=dict)
    parts: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    sources: dict[int, Callable[[], Any]] = field(default_factory=dict)
    remat: Callable[[int], Any] | None = None
    reading: FlatOp | None = None
    last: int | None = None
    ties: list[Any] = field(default_factory=list)
    matmuls: dict[int, list[FlatOp]] = field(default_factory=dict)
    hosted: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.decided.again.lines:
            self.remat = recomputed_values(
                self.flat,
                self.block,
                self.decided.again,
                self.read_late,
                self.barred,
            )

    @property
    def block(self) -> FlatRegion:
        return self.decided.block

    def outputs(self) -> list[Any]:
        """Return the arrays of the region's outputs."""
        is_early = self.decided.halves.is_early
        return [
            self.late[v] if v in self.late and not is_early(v) else self.read(v)
            for v in self.block.outputs
        ]

    def read(self, value: int) -> Any:
        """Return a value as its op produced it."""
        if value in self.sources:
            return self.sources[value]()
        if value in self.parts and self.early.get(value) is None:
            self.early[value] = lax.concatenate(self.parts[value], 0)
        literals = self.flat.consts
        return literals[value] if value in literals else self.early[value]

    def read_late(self, value: int) -> Any:
        """Return the array that late ops read: recomputed, from the host, or as is."""
        if value in self.late:
            return self.late[value]
        if self.remat is not None and value in self.decided.again.values:
            self.late[value] = self.remat(value)
            return self.late[value]
        if value in self.hosted:
            ties = self.ties[-AHEAD:][:1]
            self.late[value] = from_host(self.hosted[value], ties)
            return self.late[value]
        return self.read(value)

    def stack(self, value: int, part: LoopRange | None, read: Read) -> tuple[Any, bool]:
        """Return a stack for a range of a loop, and whether it has no other slices."""
        if part is not None and value in self.parts:
            return self.parts[value][part.number], True
        return read(value), False

    def made(self, line: FlatOp, results: Sequence[Any], is_late: bool) -> None:
        """Record the results of an op; offload those that are to be on the host."""
        self.early.update(zip(line.results, results, strict=True))
        is_early = self.decided.halves.is_early
        for v in line.results:
            if v in self.decided.offloaded and self.early[v] is not None:
                self.hosted[v] = to_host(self.early[v])
            if is_late and can_tie(self.early[v]):
                self.ties.append(self.early[v])
                if self.decided.is_ordered:
                    self._order(line, v)
            has_late = self.last is not None and not is_early(self.last)
            if can_tie(self.early[v]) and (is_late or not has_late):
                self.last = v

    def _order(self, line: FlatOp, value: int) -> None:
        """Note a late matmul, or an op that passes the result of one on."""
        if line.op.traits.is_contraction:
            self.matmuls[value] = []
        elif line.op.traits.keeps_data and len(line.operands) == 1:
            for matmul, passing in self.matmuls.items():
                if line.operands[0] in (
                    matmul,
                    *(v for p in passing for v in p.results),
                ):
                    passing.append(line)

    def tie(self) -> int | None:
        """Return the late value that values read now have to wait for."""
        for v in self.reading.operands if self.reading is not None else ():
            is_late = v in self.block.maker and not self.decided.halves.is_early(v)
            if is_late and can_tie(self.early.get(v)):
                return v
        return self.last

    def barred(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the arrays behind a barrier on the current late value, see `tie`.

        A barrier waits only for values that are read behind it: what was computed
        from a matmul's result before is computed from it behind the barrier instead.
        """
        tie = self.tie()
        ties = [] if tie is None else [tie]
        ties += [v for v in self.matmuls if v != tie]
        waits = [self.late.get(v, self.early[v]) for v in ties]
        with ExitStack() as stack:
            if self.reading is not None:
                stack.enter_context(self.reading.context())
            found = list(lax.optimization_barrier([*arrays, *waits]))
        self.late.update(zip(ties, found[len(arrays) :], strict=True))
        for passing in self.matmuls.values():
            for line in passing:
                again = line.bind([self.late[line.operands[0]]])
                self.late.update(zip(line.results, again, strict=True))
        self.matmuls.clear()
        return found[: len(arrays)]


def can_tie(array: Any) -> bool:
    """Whether an array can stand in an optimization barrier."""
    dtype = getattr(array, "dtype", None)
    return (
        isinstance(array, jax.core.Tracer)
        and dtype is not None
        and dtype != jax.dtypes.float0
        and not jnp.issubdtype(dtype, jax.dtypes.extended)
    )
