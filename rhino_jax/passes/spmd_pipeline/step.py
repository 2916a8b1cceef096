"""A whole step on one stage: its loop over micro-batches whose layers are spread over
stages, which values are sharded by layers, and its ops; and the pass, from a
micro-batched step to the function of one stage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from rhino_jax._compat import (
    at_line_of,
    close_jaxpr,
    consts_as_inputs,
    jaxpr_consts,
    last_as_consts,
    open_jaxpr,
    without_dead_code,
)
from rhino_jax.errors import StageError
from rhino_jax.frontend.regions import PLAIN_CALLS
from rhino_jax.ir.program import Program
from rhino_jax.ir.transform import MICROBATCHES, ONE_PROGRAM, num_microbatches
from rhino_jax.passes.ops_along import Stacked
from rhino_jax.passes.program_pass import ProgramPass
from rhino_jax.passes.spmd_pipeline.along import (
    StackedRegion,
    StageAxis,
    StageValues,
    reads_along,
    traced_back,
)
from rhino_jax.passes.spmd_pipeline.body import MicrobatchBody, body_of, layer_loops
from rhino_jax.passes.spmd_pipeline.run import StageRun
from rhino_jax.rewrite.flat import FlatOp, FlatProgram
from rhino_jax.rewrite.flatten import flatten
from rhino_jax.rewrite.retraced import without_captured


def find(flat: FlatProgram, stages: int, asked: int) -> MicrobatchBody:
    """Return the loop over micro-batches, if its layers divide into stages.

    Args:
      flat: the step in micro-batches, calls inlined.
      stages: number of stages.
      asked: number of micro-batches that was requested.
    Raises:
      StageError: there is no such loop with a scan over layers, or several; or its
        layers, or micro-batches, do not divide among stages.
    """
    name = flat.program.name
    scans = [each for each in flat.top.ops if each.is_scan]
    found = [
        each
        for each in scans
        if MICROBATCHES in each.op.source.name_stack
        and layer_loops(each.regions[0], each.call.num_consts)
    ]
    if len(found) != 1:
        lengths = [each.call.trip_count for each in scans]
        raise StageError(
            f"`{name}` does not run in one program of {stages} stages: "
            + (
                "several loops over its micro-batches go through layers."
                if found
                else "it has no `lax.scan` over layers whose weights are stacked."
            ),
            where=f"`{name}`",
            numbers=f"loops in its micro-batches, by their turns: {lengths}",
            fix="write the layers as one `lax.scan` over weights [layers, …], cut the"
            ' batch (microbatches=), or take another schedule, as schedule="1f1b".',
        )
    body = body_of(found[0])
    count = body.loop.call.trip_count
    if count != asked:
        raise StageError(
            f"the batch of `{name}` does not divide into {asked} equal micro-batches.",
            where="`microbatches=`",
            numbers=f"{count} of equal size, and a smaller one",
            fix=f"take a number that divides the batch, and a multiple of {stages}.",
        )
    layers = tuple(body.region.ops[i].call.trip_count for i in body.loops)
    _check_sizes(name, stages, count, layers)
    _check_carries(name, body)
    return body


def _check_sizes(name: str, stages: int, count: int, layers: tuple[int, ...]) -> None:
    if any(n % stages for n in layers):
        fitting = [
            n for n in range(2, min(layers) + 1) if all(k % n == 0 for k in layers)
        ]
        raise StageError(
            f"the layers of `{name}` do not divide into {stages} equal stages.",
            where="`stages=`",
            numbers=f"loops over {', '.join(map(str, layers))} layers",
            fix=f"take one of {fitting} stages; in one program all have as many layers."
            if fitting
            else 'take another schedule, as schedule="1f1b".',
        )
    if count % stages:
        raise StageError(
            f"{count} micro-batches of `{name}` do not divide among {stages} stages,"
            " which share what is not in a layer.",
            where="`microbatches=` and `stages=`",
            numbers=f"{count} micro-batches, {stages} stages",
            fix=f"take a multiple of {stages} micro-batches.",
        )


def _check_carries(name: str, body: MicrobatchBody) -> None:
    steps, carries = body.in_sums, {*body.loop.call.carries(body.region.inputs)}
    for i, reads in enumerate(body.region.reads):
        if i not in steps and carries.intersection(reads):
            raise StageError(
                f"a micro-batch of `{name}` reads what those before have left.",
                where=body.region.ops[i].op.source.name_stack,
                numbers=f"`{body.region.ops[i].op.name}`",
                fix='take another schedule, as schedule="1f1b".',
            )


@dataclass(frozen=True, eq=False)
class LoopedStep(StackedRegion):
    """A step around its loop over micro-batches, calls inlined.

    Attributes:
      body: of that loop.
      results: for every result, whether it is sharded by layers.
    """

    body: MicrobatchBody
    results: tuple[bool, ...]

    def shapes(self, stages: int) -> list[tuple[int, ...]]:
        """Return the shapes of inputs, then constants, on one stage."""
        shapes = ((v, tuple(self.region.avals[v].shape)) for v in self.region.inputs)
        return [
            (shape[0] // stages, *shape[1:]) if v in self.stacks else shape
            for v, shape in shapes
        ]


def step_of(flat: FlatProgram, body: MicrobatchBody) -> LoopedStep:
    """Determine which values are sharded by layers.

    These are stacks that the loop reads, what it outputs of them, and what depends on
    these elementwise, as optimizer state.

    Args:
      flat: the step, calls inlined.
      body: of the loop over micro-batches in it.
    """
    region, state = flat.top, [e.state_of for e in flat.program.outputs]
    read = zip(body.loop.operands, body.reads_stacks, strict=False)
    wanted = {v for v, is_stack in read if is_stack}
    while True:
        given, made = traced_back(region, wanted, [body.loop])
        # All values that are sharded by layers, and ops on them.
        stacks, stacked = given.intersection(region.inputs), dict[FlatOp, Stacked]()
        for each in region.ops:
            if each is body.loop:
                pairs = zip(each.results, body.sums, strict=False)
                stacks |= {v for v, s in pairs if body.is_stacked_sum(s)}
                continue
            found = made.get(each)
            if found is None and stacks.intersection(each.operands):
                found = reads_along(each, stacks)
            if found is not None:
                stacked[each] = found
                stacks |= found.stacks_in(each.results)
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
    return LoopedStep(region, stacks, stacked, body, by_layers)


def results_on_stage(
    step: LoopedStep, axis: StageAxis, arrays: Sequence[Any]
) -> list[Any]:
    """Return the results of a step on one stage, stacks as this stage's part.

    Args:
      step: the step.
      axis: the stages.
      arrays: its inputs on this stage.
    """
    region, body = step.region, step.body
    env = dict(zip(region.inputs, arrays, strict=True))
    env |= {v: region.result(v, {}) for v in region.consts.keys() & region.outputs}
    values = StageValues(axis, step, env)

    def as_part(value: int) -> Any:
        """Return this stage's part of a value that is sharded by layers."""
        x = values.read(value, True)
        return x if value in step.stacks else values.part(x)

    def run(each: FlatOp) -> list[Any]:
        with at_line_of(each.eqn):
            made = values.run(each, values.read)
            found = step.stacked.get(each)
            if found is not None and found.reducer:
                made = [axis.together(x, found.reducer) for x in made]
        return made

    def looped(each: FlatOp) -> list[Any]:
        """Run the loop over micro-batches and return its outputs."""
        given = [
            as_part(v) if is_stack else values.read(v, False)
            for v, is_stack in zip(each.operands, body.reads_stacks, strict=False)
        ]
        # Slices of micro-batches: a stage takes its own.
        rows = each.call.sliced(each.operands)
        given += [values.part(values.read(v, False)) for v in rows]
        made = StageRun(body, axis, given).results()
        left = each.call.num_carry
        return [*made[:left], *map(axis.whole, made[left:])]

    for each in region.ops:
        made = looped(each) if each is body.loop else run(each)
        values.env.update(zip(each.results, made, strict=True))
    return [
        as_part(v) if is_part else values.read(v, False)
        for v, is_part in zip(region.outputs, step.results, strict=True)
    ]


AXIS = "stage"
"""Name of the mesh axis of stages, which the collectives of a stage are over."""


def on_stage(closed: Any, program: Program, choice: str) -> Any:
    """Return what each of several stages runs of a micro-batched step.

    Results are those of the original step but for the order in which floats are added.
    All micro-batches pass forward through all stages, then back (as in GPipe): a stage
    holds the residuals of all of them. Equations outside of layers each stage runs for
    some of the micro-batches, and updates of stacks for its layers.

    Args:
      closed: closed jaxpr of the step in micro-batches.
      program: imported from it.
      choice: JSON, as `{"stages": 2}`.
    Returns:
      A closed jaxpr of the same inputs and results, stacks of layers `[L, …]` as `[L /
        stages, …]`, to be run inside of `shard_map` over the axis `stage`: it has
        collectives over it.
    Raises:
      StageError: it has no scan over layers that divides; see `find`.
    """
    stages = int(json.loads(choice)["stages"])
    flat = flatten(program, closed, lambda op: op.name in PLAIN_CALLS)
    body = find(flat, stages, num_microbatches(program.transforms))
    step = step_of(flat, body)

    def run(*arrays: Any) -> list[Any]:
        axis = StageAxis(AXIS, stages, body.loop.call.trip_count, lax.axis_index(AXIS))
        return results_on_stage(step, axis, arrays)

    consts, opened = jaxpr_consts(closed), consts_as_inputs(open_jaxpr(closed))
    new = without_captured(run, opened, step.shapes(stages), {AXIS: stages})
    return without_dead_code(last_as_consts(close_jaxpr(new, ()), consts))


PASS = ProgramPass(ONE_PROGRAM, on_stage)
