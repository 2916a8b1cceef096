"""A micro-batch, forward and backward, as a stage cut problem, and the estimated costs
of the chunks of a cut, before any submesh is planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from itertools import pairwise

from rhino_jax.errors import StageError
from rhino_jax.ir.program import RegionKind
from rhino_jax.passes.microbatch.cutting import WITHOUT_LOOP
from rhino_jax.passes.staged.labels import Labels
from rhino_jax.passes.staged.sides import Sides
from rhino_jax.pipeline.cut import ops as cutting
from rhino_jax.pipeline.cut.ops import CutProblem, StageCut
from rhino_jax.pipeline.tasks import TransferLink
from rhino_jax.pipeline.work import StepWork, as_work
from rhino_jax.plan.stages import Between, StageCost
from rhino_jax.planner.staging.shapes import GroupMeshes, with_regions


STATE_COPIES = 4
"""Bytes that a stage holds for every byte of a parameter: with its gradient, and two
moments of Adam's. Optimizers differ; a plan counts the real bytes."""


def problem_of(
    sides: Sides,
    shapes: GroupMeshes,
    group_of: Sequence[int],
    micro_batches: int,
    limit_bytes: float,
    pins: Mapping[int, int],
    chains: Sequence[Sequence[Sequence[int]]] = (),
) -> cutting.CutProblem:
    """Return the stage cut problem of a micro-batch.

    Bytes are those of a device of the first submesh: where others have more devices,
    their limit is higher in proportion, and a hop is faster in proportion to its
    smaller end.

    Args:
      sides: passes of a micro-batch.
      shapes: the submeshes.
      group_of: submesh of each stage of the problem.
      micro_batches: the number of micro-batches.
      limit_bytes: the memory budget of a device.
      pins: forward equation → the stage that it is fixed to.
      chains: forward equations that are fixed to consecutive stages.
    Raises:
      StageError: there is no forward pass, or a loop contains both passes.
    """
    program, stages = sides.program, len(group_of)
    if not sides.forward:
        raise StageError(
            f"Going forward, nothing of `{program.name}` reads weights and depends on"
            " its data: there is nothing for stages to share.",
            where="`stages=`",
            numbers=f"{stages} stages; {len(program.body.ops)} ops of a micro-batch,"
            " of which those going forward read data and scalars alone",
            fix="plan with stages=1.",
        )
    flops = {i: program.flops_of(program.ops[i]) for i in program.body.ops}
    forward = [program.ops[program.body.ops[i]] for i in sides.forward]
    most = max(forward, key=lambda op: flops[op.id])
    share = flops[most.id] / max(sum(flops.values()), 1.0)
    if share > 1 / 2 and program.holds_backward(most):
        assert most.call is not None
        is_loop = most.call.kind is not RegionKind.COND
        raise StageError(
            f"`{program.name}` computes gradients inside of a"
            f" {'loop' if is_loop else 'conditional'}, which runs whole in one stage.",
            where=str(most.source),
            numbers=f"`{most.name}`, with a backward pass in it: {share:.0%} of the"
            f" FLOPs; {stages} stages",
            fix=f"{WITHOUT_LOOP}; or stages=1."
            if is_loop
            else "compute the gradients outside of it, and select their values or zeros"
            " with `jnp.where`; or stages=1.",
        )
    place = {i: k for k, i in enumerate(sides.forward)}
    seconds = shapes.seconds[shapes.places[0]]
    forward_s, backward_s = [0.0] * len(place), [0.0] * len(place)
    for i, op_id in enumerate(sides.program.body.ops):
        home = sides.homes[i]
        if home is not None:
            into = backward_s if sides.is_backward[i] else forward_s
            into[place[home]] += with_regions(sides.program, seconds, op_id)
    devices, stages, region = shapes.devices(0), len(group_of), sides.region
    left, values, has_backward = [0] * len(place), [], bool(sides.backward)
    for i in place:
        for v in region.makes[i]:
            readers = sides.readers.get(v, ())
            ahead = tuple(place[r] for r in readers if r in place and r != i)
            size = region.bytes(v) // devices
            if any(sides.is_backward[r] for r in readers):
                left[place[i]] += size
            if ahead:
                dtype = getattr(region.avals[v], "dtype", None)
                is_float = getattr(dtype, "kind", "") in "fV"
                back = size if has_backward and is_float else 0
                values.append(cutting.CutValue(place[i], ahead, size, back))
    values += [
        cutting.CutValue(place[home], (place[at],), 0) for home, at in sides.not_before
    ]
    parameters = [
        cutting.Parameter(
            tuple(place[r] for r in sides.readers.get(v, ()) if r in place),
            STATE_COPIES * region.bytes(v) // devices,
            region.bytes(v) // devices,
        )
        for v in sorted(sides.parameters)
    ]
    name = "gpipe" if sides.is_coupled else "1f1b" if has_backward else "forward-only"
    in_flight = cutting.IN_FLIGHT[name]
    return cutting.CutProblem(
        ops=cutting.CutOps(
            tuple(
                cutting.CutOp(
                    name=str(sides.program.ops[sides.program.body.ops[i]].source),
                    forward_s=forward_s[k],
                    backward_s=backward_s[k],
                    activation_bytes=left[k],
                )
                for i, k in place.items()
            ),
            tuple(values),
            tuple(p for p in parameters if p.readers),
        ),
        groups=tuple(
            cutting.StageDevices(
                int(limit_bytes * shapes.devices(g) / devices), shapes.speed(g)
            )
            for g in group_of
        ),
        hops=tuple(
            TransferLink(
                "",
                shapes.hop[0] * min(map(shapes.devices, pair)) / devices,
                shapes.hop[1],
            )
            for pair in pairwise(group_of)
        ),
        micro_batches=micro_batches,
        in_flight=in_flight(stages, micro_batches),
        pins={place[i]: stage for i, stage in pins.items()},
        chains=tuple(
            tuple(tuple(place[i] for i in link) for link in chain) for chain in chains
        ),
    )


def estimate_work(
    problem: CutProblem,
    chosen: StageCut,
    sides: Sides,
    shapes: GroupMeshes,
    group_of: Sequence[int],
) -> StepWork:
    """Return the estimated work of all chunks, with backward passes whole and split.

    Args:
      problem, chosen: the cut problem and its cut, one chunk for each of its stages.
      sides: passes of a micro-batch, with the loops of its backward pass split in two
        where schedules split it.
      shapes: the submeshes, with the seconds of ops on them.
      group_of: submesh of each chunk.
    """
    work = as_work(problem, chosen, group_of)
    labels = Labels.at(sides, chosen.stages, group_of, is_split=True)
    took = [0.0] * labels.count
    devices = shapes.devices(0)  # The problem's bytes are of these devices too.
    for label, op_id in zip(labels.of, sides.program.body.ops, strict=True):
        if label is not None:
            seconds = shapes.seconds[shapes.places[labels.group(label)]]
            took[label] += with_regions(sides.program, seconds, op_id)
    chunks = tuple(
        replace(chunk, costs=(_cost(labels, c, took, devices, chunk.costs[0]),))
        for c, chunk in enumerate(work.chunks)
    )
    work = replace(work, chunks=chunks)
    # The cost between the passes is the same in all candidate schedules, so it is 0.
    between = (Between(),) * work.groups if sides.is_coupled else ()
    return replace(work, between=between)


def _cost(
    labels: Labels, chunk: int, took: Sequence[float], devices: int, whole: StageCost
) -> StageCost:
    if not labels.is_split:
        return whole
    count, region, made = labels.chunks, labels.region, labels.made_at
    back, late = 2 * count - 1 - chunk, 3 * count - 1 - chunk
    ahead = {v for v, at in made.items() if at == chunk} | labels.reads[chunk]
    left = ahead & (labels.reads[back] | labels.reads[late]) & made.keys()
    handed = (labels.reads[late] & made.keys()) - ahead

    def size(values: Set[int]) -> int:
        return sum(region.bytes(v) for v in values) // devices

    return replace(
        whole,
        backward_s=took[back],
        weights_s=took[late],
        activation_bytes=size(left),
        weight_residual_bytes=size(left & labels.reads[late]),
        output_gradient_bytes=size(handed),
    )
