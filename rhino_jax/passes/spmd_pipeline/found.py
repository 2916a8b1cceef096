"""The loop over micro-batches whose layers may be spread over stages."""

from __future__ import annotations

from dataclasses import dataclass

from rhino_jax.errors import StageError
from rhino_jax.ir.transform import MICROBATCHES
from rhino_jax.passes.spmd_pipeline.body import MicrobatchBody, body_of, layer_loops
from rhino_jax.rewrite.flat import FlatOp, FlatProgram


@dataclass(frozen=True, slots=True, eq=False)
class StageLoop:
    """A loop over micro-batches, to be run in stages.

    Attributes:
      op: its op.
      body: of one micro-batch, with the phases of its ops.
      count: number of micro-batches.
    """

    op: FlatOp
    body: MicrobatchBody
    count: int


def find(flat: FlatProgram, stages: int, asked: int) -> StageLoop:
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
    found = [*filter(_goes_through_layers, scans)]
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
    (each,) = found
    count, body = each.call.trip_count, body_of(each)
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
    return StageLoop(each, body, count)


def _goes_through_layers(each: FlatOp) -> bool:
    """Whether a scan is over micro-batches, and has scans over layers."""
    is_loop = MICROBATCHES in each.op.source.name_stack
    return is_loop and bool(layer_loops(each.regions[0], each.call.num_consts))


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
    steps = {i for s in body.sums for i in s.steps}
    first = body.consts
    carries = set(body.region.inputs[first : first + body.carries])
    for i, reads in enumerate(body.region.reads):
        if i not in steps and carries.intersection(reads):
            raise StageError(
                f"a micro-batch of `{name}` reads what those before have left.",
                where=body.region.ops[i].op.source.name_stack,
                numbers=f"`{body.region.ops[i].op.name}`",
                fix='take another schedule, as schedule="1f1b".',
            )
