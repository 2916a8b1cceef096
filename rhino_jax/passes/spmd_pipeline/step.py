"""A whole step on one stage: which values are sharded by layers, and its ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rhino_jax._compat import at_line_of, hide_frames
from rhino_jax.passes.spmd_pipeline.along import (
    Stacked,
    StackedRegion,
    StageValues,
    makes_along,
    reads_along,
)
from rhino_jax.passes.spmd_pipeline.found import StageLoop
from rhino_jax.passes.spmd_pipeline.run import StageRun
from rhino_jax.passes.spmd_pipeline.spread import StageAxis
from rhino_jax.rewrite.flat import FlatOp, FlatProgram, FlatRegion


hide_frames(__file__)


@dataclass(frozen=True, eq=False)
class LoopedStep(StackedRegion):
    """A step around its loop over micro-batches, calls inlined.

    Attributes:
      loop: that loop.
      results: for every result, whether it is sharded by layers.
    """

    loop: StageLoop
    results: tuple[bool, ...]

    def shapes(self, stages: int) -> list[tuple[int, ...]]:
        """Return the shapes of inputs, then constants, on one stage."""
        found = []
        for v in self.region.inputs:
            shape = tuple(self.region.avals[v].shape)
            if v in self.stacks:
                shape = (shape[0] // stages, *shape[1:])
            found.append(shape)
        return found


def step_of(flat: FlatProgram, loop: StageLoop) -> LoopedStep:
    """Determine which values are sharded by layers.

    These are stacks that the loop reads, what it outputs of them, and what depends on
    these elementwise, as optimizer state.

    Args:
      flat: the step, calls inlined.
      loop: found in it.
    """
    region, state = flat.top, [e.state_of for e in flat.program.outputs]
    wanted = _read_by_loop(loop)
    while True:
        given, made = _back(region, loop, wanted)
        stacks, stacked = _forth(region, loop, given, made)
        late = {
            region.inputs[of]
            for v, of in zip(region.outputs, state, strict=True)
            if v in stacks and of is not None
        } - stacks
        if not late:
            break
        wanted |= late
    by_layers = tuple(
        v in stacks if of is None else region.inputs[of] in stacks
        for v, of in zip(region.outputs, state, strict=True)
    )
    return LoopedStep(region, frozenset(stacks), stacked, loop, by_layers)


def _read_by_loop(loop: StageLoop) -> set[int]:
    pairs = zip(loop.op.operands, loop.body.reads_stacks, strict=False)
    return {v for v, is_stack in pairs if is_stack}


def _back(
    region: FlatRegion, loop: StageLoop, wanted: set[int]
) -> tuple[set[int], dict[FlatOp, Stacked]]:
    """Return inputs that must be sharded by layers, and ops that keep them so.

    It walks backward from values that must be sharded by layers.

    Args:
      region: ops of the step.
      loop: the loop over micro-batches.
      wanted: ids of values that must be sharded.
    """
    wanted, made = set(wanted), dict[FlatOp, Stacked]()
    for each in reversed(region.ops):
        if each is loop.op or not wanted.intersection(each.results):
            continue
        found = makes_along(each)
        if found is not None:
            made[each] = found
            wanted |= found.stacks_of(each.operands)
    return wanted & set(region.inputs), made


def _forth(
    region: FlatRegion,
    loop: StageLoop,
    given: set[int],
    made: Mapping[FlatOp, Stacked],
) -> tuple[set[int], dict[FlatOp, Stacked]]:
    """Return all values that are sharded by layers, and ops on them.

    Args:
      region: ops of the step.
      loop: the loop over micro-batches.
      given: ids of inputs that are sharded.
      made: ops that `_back` found.
    """
    stacks, stacked = set(given), dict[FlatOp, Stacked]()
    for each in region.ops:
        if each is loop.op:
            pairs = zip(each.results, loop.body.sums, strict=False)
            stacks |= {v for v, s in pairs if loop.body.is_stacked_sum(s)}
            continue
        found = made.get(each)
        if found is None and stacks.intersection(each.operands):
            found = reads_along(each, stacks)
        if found is not None:
            stacked[each] = found
            stacks |= found.stacks_in(each.results)
    return stacks, stacked


class OnStage(StageValues):
    """One stage of a step, while it is traced."""

    def __init__(
        self, step: LoopedStep, axis: StageAxis, arrays: Sequence[Any]
    ) -> None:
        super().__init__(axis, step, dict(zip(step.region.inputs, arrays, strict=True)))
        self.step = step

    def results(self) -> list[Any]:
        """Return the results of the step, stacks as this stage's part."""
        step = self.step
        for each in step.region.ops:
            made = self._looped(each) if each is step.loop.op else self._run(each)
            self.env.update(zip(each.results, made, strict=True))
        return [*map(self._left, step.region.outputs, step.results)]

    def _run(self, each: FlatOp) -> list[Any]:
        with at_line_of(each.eqn):
            made = self.run(each, self.read)
            found = self.step.stacked.get(each)
            if found is not None and found.reducer:
                made = [self.axis.together(x, found.reducer) for x in made]
        return made

    def _looped(self, each: FlatOp) -> list[Any]:
        """Run the loop over micro-batches and return its outputs."""
        body = self.step.loop.body
        arrays = [
            self._as_part(v) if is_stack else self.read(v, False)
            for v, is_stack in zip(each.operands, body.reads_stacks, strict=False)
        ]
        # Slices of micro-batches: a stage takes its own.
        rows = each.call.sliced(each.operands)
        arrays += [self.part(self.read(v, False)) for v in rows]
        made = StageRun(body, self.axis, arrays).results()
        return [*made[: body.carries], *map(self.axis.whole, made[body.carries :])]

    def _as_part(self, value: int) -> Any:
        """Return this stage's part of a value that is sharded by layers."""
        x = self.read(value, True)
        return x if value in self.step.stacks else self.part(x)

    def _left(self, value: int, is_part: bool) -> Any:
        region = self.step.region
        if value in region.consts:
            x = region.result(value, {})
            return self.part(x) if is_part else x
        return self._as_part(value) if is_part else self.read(value, False)
