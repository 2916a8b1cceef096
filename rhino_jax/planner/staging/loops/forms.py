"""Candidate splits of a step's loops over layers, by their seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from rhino_jax.passes.staged.apart import Apart, take_apart
from rhino_jax.passes.staged.layers import Layers, layers_of
from rhino_jax.passes.staged.sides import Sides, sides_of
from rhino_jax.passes.staged.stacks import LayerStack
from rhino_jax.plan.kept import Part
from rhino_jax.planner.meshes import MeshAxes
from rhino_jax.planner.staging.costs import with_regions
from rhino_jax.planner.staging.counts import data_of
from rhino_jax.planner.staging.cuts import StagingRequest, worth_comparing
from rhino_jax.planner.staging.enough import check_any, most_seconds
from rhino_jax.planner.staging.loops.parts import parts_of
from rhino_jax.planner.staging.loops.rows import choices_of
from rhino_jax.planner.staging.shapes import GroupMeshes, shapes_of


def all_layers(asked: StagingRequest) -> tuple[Layers, ...]:
    """Return the layers of a step whose loops are whole."""
    of_step = asked.of_step
    data = data_of(of_step.closed, of_step.program, asked.places)
    return layers_of(of_step.program, data)


def forms_of(
    whole: StagingRequest, rounds: Sequence[Sequence[int]]
) -> tuple[list[tuple[LayerStack, ...]], Sequence[MeshAxes]]:
    """Return the candidate splits of stacks, the most even first, and the meshes that
    are then worth comparing.

    Args:
      whole: the step, its loops whole.
      rounds: numbers of micro-batches, the usual one first.
    Returns:
      For each candidate, the stacks to be split, and their parts (empty: none); the
        meshes.
    Raises:
      NotFaster: no number of micro-batches makes a step short enough.
    """
    counts = rounds[0]
    program, meshes = whole.of_step.program, whole.search.meshes
    layers = all_layers(whole)
    choices = [choices_of(of.length, whole.shares) for of in layers]
    is_whole = all(row.count == 1 for rows in choices for row in rows)
    is_whole |= any(entry.is_const for entry in program.inputs)
    if is_whole and math.isinf(whole.enough_s):
        return [()], meshes
    apart = take_apart(whole.of_step.closed, program, counts[0], whole.places)
    sides = sides_of(apart)
    shapes = _shapes(whole, sides, meshes, rounds)
    if is_whole:
        return [()], shapes.good
    seconds = shapes.seconds[whole.shares[0]]
    took = _seconds(layers, apart, sides, seconds)
    rest = sum(seconds.values()) - sum(took)
    return parts_of(layers, took, rest, whole.shares), worth_comparing(
        shapes, apart, max(counts)
    )


def _shapes(
    whole: StagingRequest,
    sides: Sides,
    meshes: Sequence[MeshAxes],
    rounds: Sequence[Sequence[int]],
) -> GroupMeshes:
    """Return the submeshes with the seconds of a micro-batch, where these may do.

    Raises:
      NotFaster: they are not.
    """
    search, shares, finds = whole.search, whole.shares, whole.finds
    after_axes = None
    if math.isfinite(whole.enough_s):
        after_axes = partial(most_seconds, rounds=rounds, enough_s=whole.enough_s)
    shapes = shapes_of(search, sides, shares, meshes, finds, after_axes)
    check_any(shapes, rounds, whole.enough_s)
    return shapes


def reusing(
    forms: Sequence[tuple[LayerStack, ...]], kept: Mapping[int, Part]
) -> Sequence[tuple[LayerStack, ...]]:
    """Return the splits whose parts are on the same stages as in another plan; all,
    where there are none.

    Args:
      forms: the candidate splits.
      kept: input of the step → its stages in the other plan.
    """
    found = []
    for form in forms:
        parts = {i: len(stack.sizes) for stack in form for i in stack.slots}
        if any(parts.get(i, 1) != count for i, (_, count) in kept.items()):
            continue
        firsts = [{kept[i][0] for i in s.slots & kept.keys()} for s in form]
        pairs = zip(form, firsts, strict=True)
        found.append(tuple(replace(s, first=min(at)) if at else s for s, at in pairs))
    return found or forms


def _seconds(
    layers: Sequence[Layers],
    apart: Apart,
    sides: Sides,
    seconds: Mapping[int, float],
) -> list[float]:
    """Return the seconds of a step's loops over layers, in a micro-batch."""
    program = sides.program
    data = [
        entry.value
        for entry, sources in zip(program.inputs[1:], apart.sources, strict=False)
        if sources & apart.data
    ]
    found = [0.0] * len(layers)
    for inner in layers_of(program, data):
        read = [apart.sources[i - 1] for i in inner.slots if i > 0]
        sources = frozenset().union(*read)
        own = [k for k, of in enumerate(layers) if of.slots & sources]
        for k in own[:1]:
            found[k] += sum(with_regions(program, seconds, op) for op in inner.loops)
    return found
