"""The loop over micro-batches whose layers may be spread over stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rhino_jax._compat import open_jaxpr, scan_counts
from rhino_jax.errors import StageError
from rhino_jax.frontend.importer import import_jaxpr
from rhino_jax.passes.spmd_pipeline.body import MicrobatchBody, body_of
from rhino_jax.passes.spmd_pipeline.layers import layer_loops, length_of
from rhino_jax.rewrite.emit import inline_body
from rhino_jax.rewrite.equations import Equations


@dataclass(frozen=True, slots=True, eq=False)
class StageLoop:
    """A loop over micro-batches, to be run in stages.

    Attributes:
      at: position of its equation.
      closed: its body, of one micro-batch, calls inlined.
      body: the same, with the phases of its equations.
      count: number of micro-batches.
      layers: for every scan over layers, their number.
    """

    at: int
    closed: Any
    body: MicrobatchBody
    count: int
    layers: tuple[int, ...]


def find(closed: Any, name: str, stages: int, asked: int) -> StageLoop:
    """Return the loop over micro-batches, if its layers divide into stages.

    Args:
      closed: closed jaxpr of the step in micro-batches.
      name: of the step.
      stages: number of stages.
      asked: number of micro-batches that was requested.
    Raises:
      StageError: there is no such loop with a scan over layers, or several; or its
        layers, or micro-batches, do not divide among stages.
    """
    opened = open_jaxpr(closed)
    found = [*_loops(opened)]
    if len(found) != 1:
        scans = [e for e in opened.eqns if e.primitive.name == "scan"]
        lengths = [int(e.params["length"]) for e in scans]
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
    at, inner, lines, loops = found[0]
    eqn = opened.eqns[at]
    count = int(eqn.params["length"])
    layers = tuple(length_of(lines, i) for i in loops)
    if count != asked:
        raise StageError(
            f"the batch of `{name}` does not divide into {asked} equal micro-batches.",
            where="`microbatches=`",
            numbers=f"{count} of equal size, and a smaller one",
            fix=f"take a number that divides the batch, and a multiple of {stages}.",
        )
    _check_sizes(name, stages, count, layers)
    program = import_jaxpr(inner, name=name)
    body = body_of(lines, program, *scan_counts(eqn.params))
    _check_carries(name, body)
    return StageLoop(at, inner, body, count, layers)


def _loops(jaxpr: Any) -> Iterator[tuple[int, Any, Equations, list[int]]]:
    for at, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name != "scan":
            continue
        if "micro-batches" not in str(eqn.source_info.name_stack):
            continue
        inner = inline_body(eqn)
        lines = Equations.of(inner)
        loops = layer_loops(lines, scan_counts(eqn.params)[0])
        if loops:
            yield at, inner, lines, loops


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
    carries = set(body.lines.inputs[first : first + body.carries])
    for i, reads in enumerate(body.lines.reads):
        if i not in steps and carries.intersection(reads):
            raise StageError(
                f"a micro-batch of `{name}` reads what those before have left.",
                where=str(body.lines.eqns[i].source_info.name_stack),
                numbers=f"`{body.lines.eqns[i].primitive.name}`",
                fix='take another schedule, as schedule="1f1b".',
            )
