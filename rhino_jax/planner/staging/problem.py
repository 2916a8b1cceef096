"""A micro-batch, forward and backward, as a stage cut problem, with the ops that are
fixed to stages; and the estimated costs of the chunks of a cut, before any submesh is
planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from itertools import pairwise

from rhino_jax.errors import PinError, StageError, nearest
from rhino_jax.ir.places import in_scope, known_places, on_line, path_glob
from rhino_jax.ir.program import RegionKind
from rhino_jax.passes.microbatch.cutting import WITHOUT_LOOP
from rhino_jax.passes.staged.apart import Apart
from rhino_jax.passes.staged.labels import Labels
from rhino_jax.passes.staged.sides import Sides
from rhino_jax.passes.staged.stacks import Unstacked
from rhino_jax.pipeline.cut import ops as cutting
from rhino_jax.pipeline.cut.ops import CutProblem, StageCut
from rhino_jax.pipeline.tasks import TransferLink
from rhino_jax.pipeline.work import StepWork, as_work
from rhino_jax.plan.kept import Part
from rhino_jax.plan.stages import Between, StageCost
from rhino_jax.planner.staging.shapes import GroupMeshes, with_regions


PartOf = tuple[int, int]
"""(Position of a stack, index of one of its parts)."""

Chain = tuple[tuple[int, ...], ...]
"""For each part of a stack, the forward ops that read it, as positions in the body."""


def pinned_ops(
    pins: Mapping[str, int],
    of_step: Unstacked,
    apart: Apart,
    sides: Sides,
    kept: Mapping[int, Part],
) -> tuple[dict[int, int], list[Chain]]:
    """Return the ops that stage pins and split stacks fix to stages.

    A forward op is fixed to a stage if the user pins it, or if it reads a part of a
    stack whose stages are known; the readers of parts of other stacks are fixed to
    consecutive stages.

    Args:
      pins: key → stage. A path or glob stands for the ops that read the argument.
      of_step: the step, with layer stacks split.
      apart, sides: a micro-batch of it, and its passes.
      kept: input of the step → its stages in a plan whose cut is taken over, except for
        pins. The first op that reads it is there: more stages may have copies.
    Returns:
      Position of an op in the body → stage; chains.
    Raises:
      PinError: a key matches nothing, or an op is pinned twice.
    """
    found: dict[int, int] = {}
    said: dict[int, str] = {}
    paths = [entry.path for entry in of_step.program.inputs]
    stack_of = {i: k for k, s in enumerate(of_step.stacks) for i in s.slots}
    # (Input, its stack part or None, forward ops that read no other state).
    reads: list[tuple[int, PartOf | None, list[int]]] = []
    for value, sources in zip(sides.region.inputs[1:], apart.sources, strict=True):
        state = sources - apart.data
        readers = [i for i in sides.readers.get(value, ()) if i in sides.forward]
        parted = (of_step.inputs[i] for i in state)
        parts = {(stack_of[e.whole], e.part) for e in parted if e.part is not None}
        whose = next(iter(parts)) if len(parts) == 1 else None
        reads += [(i, whose, readers) for i in state if readers]
    chains: list[Chain] = []
    for k, stack in enumerate(of_step.stacks):
        links = [
            {i for _, end, mine in reads if end == (k, part) for i in mine}
            for part in range(len(stack.sizes))
        ]
        if not all(links):
            continue
        if stack.first is None:
            chains.append(tuple(tuple(sorted(link)) for link in links))
            continue
        for part, link in enumerate(links, stack.first):
            found.update(dict.fromkeys(link, part))
    for key, stage in pins.items():
        glob = path_glob(key)
        ops = {i for at, _, mine in reads if glob.match(paths[at]) for i in mine}
        # Those on a line or in a scope.
        line, scope, program = on_line(key), in_scope(key), sides.program
        for i in sides.forward:
            inside = program.within(program.ops[program.body.ops[i]])
            lines = (op.source for op, _ in inside)
            if any(line(x) if line else scope(x.scopes) is not None for x in lines):
                ops.add(i)
        if not ops:
            places = known_places(of_step.program)
            if key in paths:
                raise PinError(
                    f"pin {key!r} of a stage is no parameter that a micro-batch reads"
                    " forward.",
                    where=repr(key),
                    numbers="the batch is read wherever it is needed, state after the"
                    " loop is where its parameter is",
                    fix="pin a parameter that its first op reads, or that op's line.",
                )
            raise PinError(
                f"pin {key!r} of a stage matches nothing that a micro-batch reads"
                " forward, no source line and no scope."
                f"{nearest(key, [*paths, *places])}",
                where=repr(key),
                numbers=f"{len(paths)} paths, {len(places)} lines and scopes",
                fix="write a path or glob of parameters, a line as 'model.py:61', or a"
                " scope.",
            )
        for i in sorted(ops):
            if found.setdefault(i, stage) != stage:
                raise _pinned_twice(key, stage, said.get(i, "a stack"), found[i])
            said[i] = key
        for chain in chains:
            if sum(1 for link in chain if ops.intersection(link)) > 1:
                raise _pinned_twice(key, stage, "a stack", stage + 1)
    for at, end, mine in reads:
        stage, count = kept.get(of_step.inputs[at].whole, (0, 0))
        if count == 1 and end is None:
            found.setdefault(min(mine), stage)
    return found, chains


def _pinned_twice(key: str, stage: int, other: str, already: int) -> PinError:
    return PinError(
        f"pin {key!r} and {other!r} say two stages of one op.",
        where=repr(key),
        numbers=f"stages {stage} and {already}",
        fix="take one of them out; an op runs in one stage.",
    )


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
