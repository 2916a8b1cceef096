"""The Plan: every choice, what it is predicted to cost, and how it was found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from rhino_jax.cost.utilisation import ModelFlops
from rhino_jax.ir.spec import Spec
from rhino_jax.ir.transform import Transform, num_microbatches, stages_in_one
from rhino_jax.plan.decisions import Decisions
from rhino_jax.plan.records import (
    CUT_BY_CLOCK,
    Collective,
    CompiledCandidate,
    Coverage,
    LineTime,
    PeakValue,
    Predicted,
    SearchReport,
    Variant,
    WhileLoop,
)
from rhino_jax.plan.stages import IN_ONE_PROGRAM, Pipeline, StagePlan


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array that enters or leaves the program.

    Attributes:
      path: tree path.
      shape: global shape.
      dtype: element type.
      spec: chosen spec.
      bytes_per_device: bytes of one device's shard.
      is_donated: whether its memory may be reused for results.
      stage: the stage on whose devices it is.
      num_stages: on how many from there on it is, of a stack of layers: each stage has
        its own part of dim 0.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    bytes_per_device: int
    is_donated: bool = False
    stage: int = 0
    num_stages: int = 1

    @property
    def stages(self) -> str:
        """As "stage 0", or "stages 0 to 2"."""
        last = self.stage + self.num_stages - 1
        return f"stage{'' if last == self.stage else f's {self.stage} to'} {last}"


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanData:
    """How a program is laid out over a mesh, and what that costs: data alone.

    What users hold is `rhino_jax.explain.results.plan.Plan`, which also acts.

    Attributes:
      program_name: the planned function's name.
      fingerprint: hash of the program (shapes, ops, factors); a plan is applied
        only to the program it was made for.
      mesh_axes: (name, size) of every mesh axis, major first.
      hardware: name of the target.
      inputs: the program's inputs (arguments, then captured constants).
      outputs: the program's results.
      stages: the parts that run on devices of their own; one of all devices, where the
        program is not cut. Where they are an axis of one mesh, all have the same
        decisions.
      pipeline: how micro-batches pass through the stages, where there are several.
      predicted: predicted cost of a step.
      collectives: predicted collectives, most expensive first.
      search: how the plan was found.
      coverage: share of the program that rules cover.
      recipes: the experts' plans, by name: what each would cost, or None where
        the program or the budget does not allow it.
      memory_budget_bytes: the budget that was planned for, per device.
      transforms: what was done to the program before it was planned, in order.
      variants: the programs that were compared, where passes were weighed.
      at_peak: what is live at the predicted peak, largest first.
      pins: the user's pins, path → spec text.
      meshes: mesh shapes that were compared, with their objective in seconds,
        where rhino chose the shape.
      refined: the plans that the compiler was asked about, this one among them,
        where the plan was refined.
      line_times: seconds of the step by the user's lines, the most first.
      model_flops: arithmetic of the program as its user wrote it.
      while_loops: loops that data may end, and the trip counts they were planned with.
      notes: things the user should know, in sentences.
      mesh: the JAX mesh, if one was given or could be built.
      in_tree, out_tree: tree structures of (args, kwargs) and of the result, over
        all their leaves.
      in_leaf_positions, out_leaf_positions: where, among all leaves of the trees,
        the arrays are; the arguments come first in `inputs`, in this order.
      lines: the source lines that its text names, each with what of the program is
        there; see `rhino_jax.plan.lines`.
      versions: of what made the plan, as {"rhino_jax": …, "jax": …}; filled in
        when a plan is loaded from a file.
      outline: the ops of the program (`rhino_jax.plan.outline`); filled in when a plan
        is loaded from a file.
      cached: the file of the cache that it was read from, where it was not searched;
        `search.seconds` then says how long that took once.
      origin: what can plan its program again, see `rhino_jax.planner.origin`; None
        where the program is not at hand, as of a plan that was loaded.
      traced: the function as it was traced, where the plan is of this process; what
        is written of the user's own lines needs it (`rhino_jax.export`).
    """

    program_name: str
    fingerprint: str
    mesh_axes: tuple[tuple[str, int], ...]
    hardware: str
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    stages: tuple[StagePlan, ...]
    predicted: Predicted
    collectives: tuple[Collective, ...]
    search: SearchReport
    coverage: Coverage
    recipes: Mapping[str, Predicted | None]
    memory_budget_bytes: int
    transforms: tuple[Transform, ...] = ()
    pipeline: Pipeline | None = None
    variants: tuple[Variant, ...] = ()
    at_peak: tuple[PeakValue, ...] = ()
    pins: Mapping[str, str] = field(default_factory=dict)
    meshes: tuple[tuple[tuple[int, ...], float], ...] = ()
    refined: tuple[CompiledCandidate, ...] = ()
    line_times: tuple[LineTime, ...] = ()
    model_flops: ModelFlops = field(default_factory=ModelFlops)
    while_loops: tuple[WhileLoop, ...] = ()
    notes: tuple[str, ...] = ()
    mesh: Any = None
    in_tree: Any = None
    out_tree: Any = None
    in_leaf_positions: tuple[int, ...] = ()
    out_leaf_positions: tuple[int, ...] = ()
    lines: Mapping[str, tuple[int, int]] = field(default_factory=dict, compare=False)
    versions: Mapping[str, str] = field(default_factory=dict, compare=False)
    outline: str = field(default="", compare=False)
    cached: str = field(default="", compare=False)
    origin: Any = field(default=None, compare=False)
    traced: Any = field(default=None, compare=False, repr=False)

    @property
    def usable_bytes(self) -> int:
        """Most that a plan may hold by prediction, per device."""
        share = 1 - self.search.reserve_share
        return int(round(share * self.memory_budget_bytes, 3))

    @property
    def decisions(self) -> Decisions:
        """Specs of all values, of a plan whose devices all run one program."""
        assert not self.has_tasks, "every stage has its own"
        return self.stages[0].decisions

    @property
    def places(self) -> tuple[int, ...]:
        """Of every stage, how many places it has along the axis of the stages."""
        if self.is_one_program:
            return (1,) * self.num_stages  # plans saved before have one record
        return tuple(stage.places for stage in self.stages)

    @property
    def microbatches(self) -> int:
        """How many parts of the batch run one after the other; 1: it is not cut."""
        if self.pipeline is not None:
            return self.pipeline.micro_batches
        return num_microbatches(self.transforms)

    @property
    def schedule(self) -> str:
        """The family of schedules by which stages run; empty where there is one."""
        if self.is_one_program:
            return IN_ONE_PROGRAM
        return "" if self.pipeline is None else self.pipeline.schedule

    @property
    def num_stages(self) -> int:
        """How many parts of its devices run different parts of the program at once."""
        return max(len(self.stages), stages_in_one(self.transforms))

    @property
    def is_one_mesh(self) -> bool:
        """Whether all devices run the whole program."""
        return self.num_stages == 1

    @property
    def is_one_program(self) -> bool:
        """Whether it has several stages that are an axis of its mesh."""
        return stages_in_one(self.transforms) > 1

    @property
    def num_devices(self) -> int:
        """Devices of all stages."""
        return math.prod(size for _, size in self.mesh_axes)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: model FLOPs over what all devices do at peak in the
        predicted step. Source: PaLM, appendix B (`rhino_jax.cost.utilisation`)."""
        step_s = self.predicted.step_time_s * self.num_devices
        return self.model_flops.at_peak_s / step_s if step_s else 0.0

    @property
    def has_tasks(self) -> bool:
        """Whether it has several stages, each with programs of its own."""
        return self.pipeline is not None and not self.is_one_program

    def __eq__(self, other: object) -> bool:
        """By what they hold, whatever else their classes can do."""
        if not isinstance(other, PlanData):
            return NotImplemented
        names = [f.name for f in fields(PlanData) if f.compare]
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def __copy__(self) -> PlanData:
        return self  # nothing of it changes

    def __deepcopy__(self, memo: Any) -> PlanData:
        return self


def is_cut_by_clock(plan: PlanData) -> bool:
    """Whether a wall clock had a part in what the plan is."""
    return any(note.startswith(CUT_BY_CLOCK) for note in plan.notes)


AnyPlan = TypeVar("AnyPlan", bound=PlanData)
"""A plan of whatever class: what takes one and gives one back keeps its class."""
