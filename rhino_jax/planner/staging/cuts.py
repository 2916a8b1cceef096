"""Stage cuts of a step, and the numbers of micro-batches that are compared."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rhino_jax.errors import (
    InfeasiblePlanError,
    MicrobatchError,
    ScheduleError,
    StageError,
)
from rhino_jax.ir.program import Program
from rhino_jax.passes.microbatch.cut import MicrobatchChoice, MicrobatchCut
from rhino_jax.passes.sequence_slices.sliced import sequence_length
from rhino_jax.passes.staged.apart import MAX_LOOPS, Apart, cut_for_stages, take_apart
from rhino_jax.passes.staged.sides import Sides, sides_of
from rhino_jax.passes.staged.stacks import Unstacked
from rhino_jax.passes.staged.staging import with_split_loops
from rhino_jax.pipeline.cut.choose import cut
from rhino_jax.pipeline.cut.ops import CutProblem, StageCut
from rhino_jax.pipeline.schedules.sequence_slices import TOKEN_SLICES
from rhino_jax.pipeline.work import FORWARD_ONLY, StepWork
from rhino_jax.planner.decision import MIN_GAIN, NOT_POSSIBLE, NotFaster
from rhino_jax.planner.meshes import AUTO, MeshAxes
from rhino_jax.planner.staging import schedules
from rhino_jax.planner.staging.problem import estimate_work, pinned_ops, problem_of
from rhino_jax.planner.staging.shapes import (
    GroupMeshes,
    StepBound,
    SubmeshSearches,
    shapes_of,
)
from rhino_jax.planner.staging.slices import (
    COUNTS,
    Slicing,
    check_length,
    paced,
)
from rhino_jax.planner.variant_search import Search


PER_STAGE = ((4, 2, 8), (16,), (32,), (64,))
"""Micro-batches per stage that are compared where rhino chooses, and numbers that are
tried after them where nothing fits: their activations are smaller. Meshes are compared
for the first of them."""


MAX_OPS_OF_BEST = 1500
"""Maximum number of forward ops for which CP-SAT solves the stage cut; with more,
orders are cut."""


def batch_of(
    closed: Any,
    program: Program,
    places: tuple[str, ...],
    most_loops: int | None = MAX_LOOPS,
) -> MicrobatchCut:
    """Return the batch of a step: its number of rows, and the value ids of the inputs
    that hold it.

    Args:
      closed: closed jaxpr of the step; `program`: imported from it.
      places: places where sums over the batch are taken over each micro-batch.
      most_loops: see `MicrobatchChoice`.
    Raises:
      MicrobatchError: the step has no batch that can be split.
    """
    choice = MicrobatchChoice(1, most_loops=most_loops, per_microbatch=places, least=1)
    return cut_for_stages(closed, program, choice)[0]


def counts_of(rows: int, stages: int, multiple_of: int = 1) -> Iterator[list[int]]:
    """Yield lists of numbers of micro-batches to be compared; each is for where nothing
    of those before fits.

    Args:
      rows: rows of the batch, which each number divides.
      stages: the number of stages.
      multiple_of: a divisor of each number.
    """
    counts = [n for n in range(2, rows + 1) if rows % n == 0 and n % multiple_of == 0]
    seen = set[int]()
    for factors in PER_STAGE if counts else ():
        # The nearest to some numbers of micro-batches per stage.
        near = (
            min(counts, key=lambda n: (abs(math.log(n / (k * stages))), n))
            for k in factors
        )
        found = [n for n in dict.fromkeys(near) if n not in seen]
        seen.update(found)
        if found:
            yield found


@dataclass(frozen=True, slots=True, eq=False)
class StagingRequest:
    """A step that is to be planned in stages.

    Attributes:
      search: the search of the user's step.
      of_step: the step, with layer stacks split.
      shares: number of places of each submesh along the stage axis.
      schedule: name of a schedule, or "auto".
      started: `time.monotonic()` when planning began.
      slices: sequence slices of schedule `token-slices`: their number, or their
        lengths; empty: chosen here.
      finds: results of searches of the step, and of its submeshes.
    """

    search: Search
    of_step: Unstacked
    shares: tuple[int, ...]
    schedule: str
    started: float
    slices: tuple[int, ...] = ()
    finds: SubmeshSearches = field(default_factory=SubmeshSearches)

    @property
    def places(self) -> tuple[str, ...]:
        """Places where sums over the batch are taken over each micro-batch."""
        return tuple(self.search.options.per_microbatch)

    @property
    def batch(self) -> MicrobatchCut:
        """The batch of the step."""
        return batch_of(self.of_step.closed, self.of_step.program, self.places)

    def apart(self, count: int) -> Apart:
        """Return the step with its loop over `count` micro-batches taken apart."""
        return take_apart(self.of_step.closed, self.of_step.program, count, self.places)

    def one_micro_batch(self, refused: ScheduleError | None) -> MicrobatchError:
        """Return the error of a training step that is to run in one micro-batch.

        Args:
          refused: why its sequences cannot be sliced; None where they can.
        """
        numbers, fixes = f"{len(self.shares)} stages", ["stages=1"]
        if refused is None:
            fixes.insert(0, f'schedule="{TOKEN_SLICES}"')
        else:
            numbers += f"; in slices of its sequences: {refused.what}"
        has_rows = self.batch.rows > 1
        two = "take two or more micro-batches" if has_rows else "give two rows or more"
        return MicrobatchError(
            f"`{self.of_step.program.name}` cannot run in 1 micro-batch: all stages but"
            " one would be idle.",
            where=refused.where if refused else "`microbatches=`",
            numbers=numbers,
            fix=f"{two}; or {'; or '.join(fixes)}.",
        )


@dataclass(frozen=True, slots=True, eq=False)
class CutStep:
    """A step in some number of micro-batches, cut into stages.

    Attributes:
      asked: the step to plan.
      apart: the step, with its loop over micro-batches taken apart.
      shapes: the submeshes.
      has_backward: whether there is a backward pass.
      chosen: the stage cut.
      group_of: submesh of each chunk; empty where each chunk has its own.
      work: estimated costs of the chunks.
      slices: lengths of the sequence slices; empty where sequences are whole.
    """

    asked: StagingRequest
    apart: Apart
    shapes: GroupMeshes
    has_backward: bool
    chosen: StageCut
    group_of: tuple[int, ...]
    work: StepWork
    slices: tuple[int, ...] = ()


def worth_comparing(shapes: GroupMeshes, apart: Apart, most: int) -> Sequence[MeshAxes]:
    """Return the meshes to compare for other numbers of micro-batches than that of a
    step, up to `most`.

    The best mesh of one number is the best of all where every device has rows of a
    micro-batch in each; where there are too few rows for that, the best few are
    compared again.
    """
    devices = max(map(shapes.devices, range(shapes.groups)))
    return shapes.good[:1] if apart.cut.rows // most >= devices else shapes.good


def cuts_of(
    asked: StagingRequest, meshes: Sequence[MeshAxes], count: int
) -> list[CutStep]:
    """Cut a step in `count` micro-batches at its best: into one chunk for each stage,
    and into several, as schedules may need; where that does not fit, also at the best
    cut with all stages recomputed, if they may be.

    Args:
      asked: the step to plan.
      meshes: candidate meshes of all devices.
      count: the number of micro-batches.
    Raises:
      StageError, MicrobatchError, InfeasiblePlanError, PinError.
      NotFaster: the step takes too long, however it is cut.
    """
    of_step, shares, schedule = asked.of_step, asked.shares, asked.schedule
    search, apart = asked.search, asked.apart(count)
    may_recompute, sides = search.options.may_recompute, sides_of(apart)
    in_slices = bool(sides.backward) and (count == 1 or schedule == TOKEN_SLICES)
    if in_slices and schedule != TOKEN_SLICES:
        refused: ScheduleError | None = None
        try:
            check_length(sequence_length(apart), 2)
        except ScheduleError as error:
            refused = error
        if refused is not None or schedule != AUTO:
            raise asked.one_micro_batch(refused) from None
    bound = StepBound([count], search.enough_s)
    shapes = shapes_of(search, sides, shares, meshes, asked.finds, bound)
    bound.check(shapes)
    pins = pinned_ops(search.stage_pins, of_step, apart, sides, search.kept)
    found: list[CutStep] = []
    known: dict[tuple[int, ...], list[tuple[CutProblem, StageCut]]] = {}
    limit = search.request.memory_budget_bytes
    for group_of in schedules.placements(schedule, shapes.groups):
        chunks = len(group_of)
        is_asked = not found
        # Pins name a stage, so its ops are in its only chunk.
        is_one = of_step.stacks or search.stage_pins or search.kept or in_slices
        if not is_asked and (is_one or not sides.backward):
            continue
        sizes = tuple(shares[group] for group in group_of)
        try:
            if sizes not in known:
                problem = problem_of(sides, shapes, group_of, count, limit, *pins)
                is_again = may_recompute and is_asked and bool(sides.backward)
                known[sizes] = _cut_into(asked, problem, may_recompute=is_again)
        except (StageError, InfeasiblePlanError):
            if is_asked:
                raise
            continue
        for problem, chosen in known[sizes]:
            apart_too = sides, shapes
            if schedules.may_split(schedule) and sides.backward:
                loops = with_split_loops(apart, chosen.stages, group_of)
                if loops is not apart:
                    # On the mesh that is best for whole loops.
                    one, in_two = [shapes.mesh_axes], sides_of(loops)
                    seconds = shapes_of(search, in_two, shares, one, asked.finds)
                    apart_too = in_two, seconds
            work = estimate_work(problem, chosen, *apart_too, group_of)
            own = group_of if chunks > shapes.groups else ()
            whole = CutStep(
                asked, apart, shapes, bool(sides.backward), chosen, own, work
            )
            if in_slices or schedule == TOKEN_SLICES:
                found += _in_slices(whole, sides, problem)
                continue
            if schedule == AUTO and is_asked and count < shapes.groups:
                # Sequence slices fill a pipeline that so few micro-batches leave idle.
                with contextlib.suppress(ScheduleError):
                    found += _in_slices(whole, sides, problem)
            found.append(whole)
    return found


def _in_slices(whole: CutStep, sides: Sides, problem: CutProblem) -> list[CutStep]:
    """Return a step cut into stages with its sequences sliced in a few ways.

    Args:
      whole: the step, cut at its best for many slices.
      sides: forward and backward pass of a micro-batch.
      problem: the cut problem that it is a solution of.
    """
    asked, stages = whole.asked, whole.chosen.stages
    device, split = asked.search.target.device, (whole.apart, sides, whole.shapes)
    slicing = Slicing(*split, problem, stages, whole.work, device)
    return [
        replace(whole, work=in_slices, slices=lengths)
        for lengths, in_slices in slicing.ways(asked.slices)
    ]


def _cut_into(
    asked: StagingRequest, problem: CutProblem, *, may_recompute: bool
) -> list[tuple[CutProblem, StageCut]]:
    """Return the best cut; and, where that does not fit and stages may be recomputed,
    the best cut with all of them recomputed."""
    request, few = asked.search.request, len(problem.ops.ops) <= MAX_OPS_OF_BEST
    solve = partial(cut, level=request.level if few else "fast", seed=request.seed)
    if asked.schedule == TOKEN_SLICES:
        said = asked.slices
        most = said[0] if len(said) == 1 else len(said) or max(COUNTS)
        # The growth of work along a sequence is not modelled: closer is no better.
        many, solve = paced(problem, most), partial(solve, gap=MIN_GAIN)
        whole = _cut_where_best(many, solve, may_recompute=may_recompute)
        return [(problem, chosen) for _, chosen in whole]
    return _cut_where_best(problem, solve, may_recompute=may_recompute)


def _cut_where_best(
    problem: CutProblem,
    solve: Callable[[CutProblem], StageCut],
    *,
    may_recompute: bool,
) -> list[tuple[CutProblem, StageCut]]:
    groups = tuple(replace(g, limit_bytes=None) for g in problem.groups)
    free = replace(problem, groups=groups)
    found = free, solve(free)
    pairs = zip(found[1].held_bytes, problem.groups, strict=True)
    if all(g.limit_bytes is None or held <= g.limit_bytes for held, g in pairs):
        return [(problem, found[1])]
    # Optimizer state is a guess here; planning the submeshes tells its real bytes.
    with contextlib.suppress(InfeasiblePlanError):
        found = problem, solve(problem)
    if not may_recompute:
        return [found]
    # Forward passes run twice, and save nothing.
    ops = (
        replace(op, backward_s=op.forward_s + op.backward_s, activation_bytes=0)
        for op in problem.ops.ops
    )
    again = solve(replace(free, ops=replace(problem.ops, ops=tuple(ops))))
    return [found] if again.stages == found[1].stages else [found, (problem, again)]


def add_fewer(found: list[CutStep], least: int) -> None:
    """Add the step cut in half as many micro-batches, and so on down to one, as long
    as that is estimated to be faster.

    Args:
      found: the step in numbers of micro-batches of which `least` is the least.
    """
    while least > 1:
        best = candidates_of(found, found[0].asked.schedule)[0]
        taken = found[best.cut]
        rows = taken.apart.cut.rows
        if taken.apart.cut.count > least:
            return
        least = max(n for n in range(1, least // 2 + 1) if rows % n == 0)
        meshes = worth_comparing(taken.shapes, taken.apart, least)
        try:
            found += cuts_of(taken.asked, meshes, least)
        except (NotFaster, *NOT_POSSIBLE):
            return


def candidates_of(
    cuts: Sequence[CutStep], schedule: str
) -> list[schedules.EstimatedSchedule]:
    """Return the schedules of cuts, the best first."""
    if all(c.has_backward for c in cuts):
        if schedule == FORWARD_ONLY:
            raise ScheduleError(
                f"{schedule!r} is of programs without a backward pass, and this has"
                " one.",
                where="`schedule=`",
                numbers=f"schedules with one: {', '.join(schedules.RUN)}",
                fix='take one of these, or "auto".',
            )
        return schedules.compare([c.work for c in cuts], schedule)
    one = (1,) * cuts[0].work.groups
    found = (
        schedules.EstimatedSchedule(
            i, FORWARD_ONLY, False, c.chosen.step_time_s, True, one, is_usual=True
        )
        for i, c in enumerate(cuts)
    )
    return sorted(found, key=lambda candidate: candidate.step_time_s)
