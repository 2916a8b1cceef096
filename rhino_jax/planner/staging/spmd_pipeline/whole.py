"""The search of one stage of an SPMD pipeline, and from its plan that of all stages.

One stage's program (`passes.spmd_pipeline`) has its layers, its reductions and the
ticks of all micro-batches. It is planned on one stage's devices, so its predicted cost
includes the bubble, the residuals of all micro-batches, and the ops between layers.
Transfers between stages are added here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rhino_jax.cost.collectives import collective_s, wire_bytes
from rhino_jax.errors import PinError
from rhino_jax.hardware.layout import lay_out
from rhino_jax.ir.collectives import KINDS, OF_PRIMITIVE, PERMUTE
from rhino_jax.ir.op import Op, RegionKind
from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import Spec, format_spec, share_of, without
from rhino_jax.ir.transform import ONE_PROGRAM, RECOMPUTE, Transform, chosen
from rhino_jax.passes.microbatch import cut_in
from rhino_jax.passes.remat.unremat import has_remat
from rhino_jax.plan.decisions import Decisions
from rhino_jax.plan.lines import sent as lines_of, summed
from rhino_jax.plan.plan import Leaf, PlanData
from rhino_jax.plan.records import Collective, Predicted
from rhino_jax.plan.stages import (
    IN_ONE_PROGRAM,
    STAGE_AXIS,
    Between,
    Pipeline,
    PipelinePass,
    StageCost,
    StagePlan,
    StageSend,
)
from rhino_jax.planner.meshes import MeshAxes, own_mesh, stage_devices
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.staging.shapes import seconds_by_op, with_regions
from rhino_jax.planner.variant_search import Search


OpSend = tuple[int, Collective]
"""Bytes of one device each time, and the collective of all times."""


@dataclass(frozen=True, slots=True, eq=False)
class StageSearch:
    """Search on one stage's devices.

    Attributes:
      search: the search of the whole step, on all devices.
      stages: the number of stages.
    """

    search: Search
    stages: int

    @property
    def axis(self) -> int:
        """Position of the stage axis."""
        names = [[n for n, _ in axes] for axes in self.search.meshes]
        (axis,) = {of.index(STAGE_AXIS) for of in names}
        return axis

    def of_step(self, done: Sequence[Transform] = ()) -> Search:
        """Return the search of the whole step on one stage's devices.

        Args:
          done: passes applied before.
        """
        own = [own_mesh(axes, 1) for axes in self.search.meshes]
        devices = math.prod(n for _, n in own[0])
        target = self.search.target.replace(num_devices=devices)
        found = replace(self.search, mesh=None, meshes=own, target=target, refine=0)
        found = found.after(done)
        request, axis = found.request, self.axis
        return found.asking(
            pins={i: without(s, [axis]) for i, s in request.pins.items()},
            output_pins={i: without(s, [axis]) for i, s in request.output_pins.items()},
            value_pins={
                v: replace(
                    p,
                    spec=tuple(
                        None if d is None else without((d,), [axis])[0] for d in p.spec
                    ),
                )
                for v, p in request.value_pins.items()
            },
            has_recipes=False,
        )

    def of_stage(self, count: int, done: Sequence[Transform] = ()) -> Search:
        """Return the search of one stage's program in `count` micro-batches.

        Args:
          count: the number of micro-batches.
          done: passes applied before.
        """
        cut = cut_in(count, self.search.options.per_microbatch)
        stage = chosen(ONE_PROGRAM, {"stages": self.stages})
        return self.of_step([*done, cut, stage])

    def whole_axes(self, own: MeshAxes) -> MeshAxes:
        """Return the mesh of all devices for the mesh of one stage."""
        every = self.search.meshes
        return every[[own_mesh(axes, 1) for axes in every].index(own)]


@dataclass(frozen=True, eq=False)
class SolvedInOne:
    """The search that gave the plan of an SPMD pipeline, and the step from the plan of
    one stage to that of all stages.

    Attributes:
      stage: the search of the whole step.
      search, found: the search of one stage's program, with the plan's passes, and its
        result.
    """

    stage: StageSearch
    search: Search
    found: SearchResult

    @classmethod
    def again(
        cls, search: Search, stages: int, done: Sequence[Transform]
    ) -> SolvedInOne:
        """Solve the problem of a plan again that is not cached.

        Args:
          search: the search of the whole step, on the plan's mesh.
          stages: the number of stages.
          done: the plan's passes, including those of micro-batches and stages.
        """
        stage = StageSearch(search, stages)
        of_stage = stage.of_step(done)
        return cls(stage, of_stage, of_stage.find()).alone()

    def alone(self) -> SolvedInOne:
        """Return the search limited to the best mesh, without progress reports."""
        found = replace(self.found, solved=self.found.solved[:1])
        axes = self.stage.whole_axes(found.mesh_axes)
        stage = replace(self.stage, search=self.stage.search.quiet(axes))
        return SolvedInOne(stage, self.search.quiet(found.mesh_axes), found)

    @cached_property
    def of_stage(self) -> Program:
        """One stage's program."""
        return self.search.running.program

    @cached_property
    def axes(self) -> MeshAxes:
        """(Name, size) of the axes of all devices."""
        return self.stage.whole_axes(self.found.mesh_axes)

    @cached_property
    def axis(self) -> int:
        """Position of the stage axis."""
        return self.stage.axis

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.stage.stages

    def step_s(self, found: SearchResult) -> float:
        """Return the step of all stages in seconds, from the result of one; infinite
        where nothing fits."""
        if not found.fits:
            return math.inf
        sent = self._sent(found.decisions())
        return found.step_s + sum(of_all.seconds for _, (_, of_all) in sent)

    def plan(self) -> PlanData:
        """Return the plan of all stages, with this search as its origin.

        Raises:
          InfeasiblePlanError: nothing fits.
          PinError: a pin shards something over the stage axis that is no stack of
            layers.
        """
        plan = self.found.plan()
        program = self.search.traced.program
        sent = dict(self._sent(plan.decisions))
        collectives = [of_all for _, of_all in sent.values()]
        seconds = sum(c.seconds for c in collectives)
        predicted = replace(
            plan.predicted,
            step_time_s=plan.predicted.step_time_s + seconds,
            communication_s=plan.predicted.communication_s + seconds,
        )
        report = replace(
            plan.search,
            objective_s=plan.search.objective_s + seconds,
            bound_s=plan.search.bound_s + seconds,
        )
        shapes = [
            [program.values[e.value].shape for e in ends]
            for ends in (program.inputs, program.outputs)
        ]
        inputs = tuple(map(self._leaf, plan.inputs, shapes[0]))
        pipeline = self._pipeline(plan, sent)
        whole = replace(
            plan,
            mesh_axes=self.axes,
            inputs=inputs,
            outputs=tuple(map(self._leaf, plan.outputs, shapes[1])),
            stages=self._stages(plan, pipeline, inputs, predicted),
            pipeline=pipeline,
            predicted=predicted,
            line_times=summed([*plan.line_times, *lines_of(collectives, seconds)]),
            collectives=tuple(
                sorted((*plan.collectives, *collectives), key=lambda c: -c.seconds)
            ),
            search=report,
            recipes={},
            notes=(*self._notes(plan.microbatches), *plan.notes),
            origin=self.alone(),
        )
        self._check_pins(whole)
        return self.search.told(whole)

    def _pipeline(self, plan: PlanData, sent: Mapping[int, OpSend]) -> Pipeline:
        """Return the pipeline of the stages.

        All seconds of the predicted step are counted, each once: those of ops with
        collectives that they wait for (`seconds_by_op`), and those of transfers between
        stages. So the step of the pipeline is the predicted step, which has precedence:
        the total of the ops is searched and compared, and only distributed over ticks
        here. The residuals of all ticks are allocated from the first tick on. The rest
        of the peak, other than arguments, is working memory of ops.
        """
        program, stages, count = self.of_stage, self.stages, plan.microbatches
        ticks, seconds = count + stages - 1, seconds_by_op(self.found.best)
        passes: list[PipelinePass] = []
        once_s = saved = 0.0
        for op in (program.ops[o] for o in program.body.ops):
            every = [inner for inner, _ in program.within(op)]
            work_s = with_regions(program, seconds, op.id)
            handed = [sent[o.id] for o in every if o.id in sent]
            send_s = sum(of_all.seconds for _, of_all in handed)
            permutes = self._permutes(op, ticks)
            if op.call is None or not permutes:
                once_s += work_s + send_s
                continue
            stacked = op.call.stacked(op.results)
            saved += sum(self._local_bytes(plan.decisions, v) for v in stacked) / ticks
            # Whether stages send to those before them: `frontend.provenance` has the
            # label.
            ends = permutes[0].label.partition(",")[0]
            source, _, target = ends.partition(" → ")
            passes.append(
                PipelinePass(
                    tick_s=work_s / ticks,
                    send_s=send_s / ticks,
                    send_bytes=sum(size for size, _ in handed),
                    before_s=once_s,
                    is_backward=any(o.flops and o.source.is_backward for o in every),
                    is_reversed=int(source) > int(target),
                )
            )
            once_s = 0.0
        peak = plan.predicted.peak_bytes
        fixed = min(sum(leaf.bytes_per_device for leaf in plan.inputs), peak)
        most = max((p.send_bytes for p in passes), default=0)
        left = min(int(saved), max(peak - fixed - most, 0) // ticks)
        cost = StageCost(
            forward_s=sum(p.tick_s for p in passes if not p.is_backward),
            backward_s=sum(p.tick_s for p in passes if p.is_backward),
            update_s=once_s,
            activation_bytes=left,
            fixed_bytes=fixed,
            working_bytes=peak - fixed - left * ticks,
        )
        return Pipeline(
            micro_batches=count,
            schedule=IN_ONE_PROGRAM,
            runs=(),
            costs=(cost,) * stages,
            hops=(),
            between=(Between(sum(p.before_s for p in passes)),) * stages,
            passes=tuple(passes),
        )

    def _permutes(self, op: Op, ticks: int) -> list[Op]:
        """Return a tick loop's permutes to the next stage; empty for other ops."""
        call, ops = op.call, self.of_stage.ops
        if call is None or call.kind is not RegionKind.SCAN or call.trip_count != ticks:
            return []
        inner = [ops[o] for region in call.regions for o in region.ops]
        return [o for o in inner if o.name in KINDS[PERMUTE].primitives]

    def _stages(
        self,
        plan: PlanData,
        pipeline: Pipeline,
        inputs: Sequence[Leaf],
        predicted: Predicted,
    ) -> tuple[StagePlan, ...]:
        """Return the records of all stages.

        Args:
          plan: the plan of one stage's program.
          pipeline: the pipeline of all stages.
          inputs: inputs of the plan of all stages.
          predicted: predictions for a step; each stage takes all of it.
        """
        axes, stages, ticks = self.axes, self.stages, pipeline.ticks
        (of_one,) = plan.stages
        lead = {x.shape[0] for x in inputs if x.spec and self.axis in x.spec[0]}
        return tuple(
            replace(
                of_one,
                mesh_axes=own_mesh(axes, 1),
                devices=tuple(own),
                predicted=predicted,
                sends=tuple(
                    StageSend(
                        to,
                        f"activations of layers in pass {i}, {ticks} times",
                        one.send_bytes * len(own) * ticks,
                        one.send_s * ticks,
                    )
                    for i, one in enumerate(pipeline.passes)
                    for to in [stage - 1 if one.is_reversed else stage + 1]
                    if 0 <= to < stages
                ),
                layers=tuple(
                    (stage * n // stages, (stage + 1) * n // stages)
                    for n in sorted(lead)
                ),
            )
            for stage, own in enumerate(stage_devices(axes, (1,) * stages))
        )

    def _leaf(self, leaf: Leaf, shape: tuple[int, ...]) -> Leaf:
        """Return the leaf of all stages: a stack is sharded over the stage axis."""
        spec = without(leaf.spec, [self.axis])
        if leaf.shape != shape:
            spec = ((self.axis, *spec[0]), *spec[1:])
        return replace(leaf, shape=shape, spec=spec, num_stages=self.stages)

    def _notes(self, count: int) -> Iterator[str]:
        stages, ticks = self.stages, count + self.stages - 1
        yield (
            f"one program: its {stages} stages are the axis `{STAGE_AXIS}` of the mesh,"
            f" each with 1/{stages} of the layers; {count} micro-batches pass in"
            f" {ticks} ticks forward and as many back, in {stages - 1} of which a stage"
            " has no micro-batch."
        )
        loops = {
            op.id
            for op, runs in self.of_stage.walk()
            if runs == ticks and op.name in KINDS[PERMUTE].primitives
        }
        if len(loops) < 2:
            return
        left = (
            "their residuals are live for all micro-batches, and"
            " copied on every tick to their buffers and back"
        )
        if any(t.name == RECOMPUTE for t in self.of_stage.transforms):
            yield f"layers make some again in the backward pass: {left}."
        elif not has_remat(self.of_stage):
            yield f"layers make nothing again in the backward pass: {left}."

    def _check_pins(self, plan: PlanData) -> None:
        names = [n for n, _ in self.axes]
        request = self.stage.search.request
        for pins, leaves in (
            (request.pins, plan.inputs),
            (request.output_pins, plan.outputs),
        ):
            for i, spec in pins.items():
                at = [self.axis in dim for dim in spec]
                if not any(at) or at == [self.axis in d for d in leaves[i].spec]:
                    continue
                raise PinError(
                    f"pin {leaves[i].path!r}: over the stages of one program only"
                    " stacks of layers lie, by their first dim.",
                    where=repr(leaves[i].path),
                    numbers=f"pinned {format_spec(spec, names)}, planned"
                    f" {format_spec(leaves[i].spec, names)}",
                    fix=f"leave `{STAGE_AXIS}` out of the pin.",
                )

    def _sent(self, decisions: Decisions) -> Iterator[tuple[int, OpSend]]:
        """Yield ops and their transfers to other stages."""
        laid = lay_out(self.stage.search.target, self.axes)
        for op, runs in self.of_stage.walk():
            kind = OF_PRIMITIVE.get(op.name)
            if kind is None:
                continue
            moved = op.results if kind.gathers else op.operands
            local = sum(self._local_bytes(decisions, v) for v in moved)
            each_s = collective_s(kind.name, local, [laid.axes[self.axis]])
            sent = Collective(
                kind=kind.name,
                axes=(STAGE_AXIS,),
                bytes=round(wire_bytes(kind.name, local, self.stages) * runs),
                count=runs,
                seconds=each_s * runs,
                op=f"{op.name} #{op.id}",
                source=str(op.source),
                reason="between stages",
            )
            yield op.id, (round(local), sent)

    def _local_bytes(self, decisions: Decisions, value: int) -> float:
        of = self.of_stage.values[value]
        spec: Spec | None = decisions.values.get(value)
        if spec is None or len(spec) != len(of.shape):
            return float(of.bytes)
        sizes = tuple(n for _, n in own_mesh(self.axes, 1))
        return of.bytes * share_of(spec, of.shape, sizes)

    @property
    def pinned_search(self) -> Search:
        """The search whose program the user's pins are resolved in."""
        return self.stage.search

    def planned_with(self, search: Search) -> tuple[PlanData, SolvedInOne] | None:
        """Plan with another search's pins and budget, and with this one's passes.

        Args:
          search: the other search of the whole step.
        Returns:
          The plan, and the search that gave it; None where nothing fits.
        Raises:
          PinError: an op cannot produce what is pinned.
        """
        stage = replace(self.stage, search=search)
        # The plan's passes, without those that the search of its step starts with.
        done = self.search.transforms[len(self.stage.search.transforms) :]
        of_stage = stage.of_step(done)
        found = of_stage.held(self.found)
        if not found.fits:
            return None
        solved = SolvedInOne(stage, of_stage, found)
        return solved.plan(), solved.alone()
