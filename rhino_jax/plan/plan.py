"""The Plan: every decision, its predicted cost, and how it was found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from rhino_jax.cost.compute import ModelFlops
from rhino_jax.cost.corrections import NO_CORRECTIONS, CostCorrections
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
    Timeline,
    Variant,
    WhileLoop,
)
from rhino_jax.plan.stages import IN_ONE_PROGRAM, Pipeline, StagePlan
from rhino_jax.utils.codec import OF_PROCESS


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array that enters or leaves the program.

    Attributes:
      path: tree path of the array.
      shape: global shape.
      dtype: element type.
      spec: its planned spec.
      bytes_per_device: bytes of one device's shard.
      is_donated: whether its memory may be reused for results.
      stage: the (first) stage whose devices own it.
      num_stages: number of consecutive stages that own it, for a stack of layers: each
        stage owns a part of dim 0.
      on_host: whether it is in the host's memory, not in that of the devices.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    bytes_per_device: int
    is_donated: bool = False
    stage: int = 0
    num_stages: int = 1
    on_host: bool = False

    @property
    def memory_kind(self) -> str | None:
        """The memory of its `NamedSharding`; None: that of the devices."""
        return "pinned_host" if self.on_host else None

    @property
    def stages(self) -> str:
        """The stages as text: "stage 0", or "stages 0 to 2"."""
        last = self.stage + self.num_stages - 1
        return f"stage{'' if last == self.stage else f's {self.stage} to'} {last}"


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanData:
    """The layout of a program over a mesh, and its predicted cost: data alone.

    Users work with `rhino_jax.explain.plan.Plan`, which adds methods.

    Attributes:
      program_name: the planned function's name.
      fingerprint: hash of the program (shapes, ops, factors); a plan is applied only to
        the program it was made for.
      mesh_axes: (name, size) of every mesh axis, major first.
      hardware: name of the target.
      inputs: the program's inputs (arguments, then captured constants).
      outputs: the program's results.
      stages: pipeline stages, each with devices of its own; a single one with all
        devices if the program is not divided. In an SPMD pipeline, all have the same
        decisions.
      pipeline: schedule and costs of the pipeline; None for a single stage.
      predicted: predicted cost of a step.
      collectives: predicted collectives, slowest first.
      search: report of the search that found the plan.
      coverage: share of the program that rules cover.
      recipes: predicted cost of the experts' plans, by name; None where the program or
        the memory budget does not allow one.
      memory_budget_bytes: memory budget of the plan, per device.
      transforms: program passes applied before planning, in order.
      variants: the programs that were compared, if program passes were candidates.
      at_peak: values live at the predicted peak, largest first.
      pins: the user's pins, path → spec text.
      meshes: (mesh shape, objective in seconds) of the mesh shapes that were compared,
        if rhino chose the shape.
      refined: the plans that were compiled for comparison, this one among them, if the
        plan was refined.
      corrections: corrections of the predicted costs by programs that were compiled.
      line_times: predicted seconds by source line, the most first.
      timeline: compute and live memory of the step over time; empty for a plan in
        stages.
      model_flops: arithmetic of the program as its user wrote it.
      while_loops: loops whose trip count depends on data, and the trip counts that were
        assumed.
      notes: remarks for the user, in sentences.
      mesh: the JAX mesh; None if none was given nor could be built.
      in_tree, out_tree: tree structures of (args, kwargs) and of the result, over
        all their leaves.
      in_leaf_positions, out_leaf_positions: positions of the arrays among all leaves of
        the trees; in `inputs` the arguments come first, in this order.
      lines: source lines that the plan's text names → place in the program; see
        `rhino_jax.plan.lines`.
      versions: versions of the software that made the plan, as {"rhino_jax": …, "jax":
        …}; set when a plan is loaded from a file.
      outline: the ops of the program (`rhino_jax.plan.fingerprint`); set when a plan is
        loaded from a file.
      cached: path of the cache file that it was read from; empty if it was searched.
        For a cached plan `search.seconds` is the time of the original search.
      origin: object that can plan the program again, see `rhino_jax.planner.origin`;
        None if the program is not available, as for a loaded plan.
      traced: the traced function, if the plan was made in this process; exported source
        lines need it (`rhino_jax.export`).
    """

    versions: Mapping[str, str] = field(default_factory=dict, compare=False)
    program_name: str
    fingerprint: str
    mesh_axes: tuple[tuple[str, int], ...]
    hardware: str
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    predicted: Predicted
    collectives: tuple[Collective, ...]
    search: SearchReport
    coverage: Coverage
    recipes: Mapping[str, Predicted | None]
    memory_budget_bytes: int
    at_peak: tuple[PeakValue, ...] = ()
    pins: Mapping[str, str] = field(default_factory=dict)
    meshes: tuple[tuple[tuple[int, ...], float], ...] = ()
    refined: tuple[CompiledCandidate, ...] = ()
    corrections: CostCorrections = NO_CORRECTIONS
    line_times: tuple[LineTime, ...] = ()
    timeline: Timeline = field(default_factory=Timeline)
    model_flops: ModelFlops = field(default_factory=ModelFlops)
    while_loops: tuple[WhileLoop, ...] = ()
    notes: tuple[str, ...] = ()
    lines: Mapping[str, tuple[int, int]] = field(default_factory=dict, compare=False)
    outline: str = field(default="", compare=False)
    in_tree: Any = None
    in_leaf_positions: tuple[int, ...] = ()
    out_tree: Any = None
    out_leaf_positions: tuple[int, ...] = ()
    pipeline: Pipeline | None = None
    transforms: tuple[Transform, ...] = ()
    variants: tuple[Variant, ...] = ()
    stages: tuple[StagePlan, ...]
    mesh: Any = field(default=None, metadata=OF_PROCESS)
    cached: str = field(default="", compare=False, metadata=OF_PROCESS)
    origin: Any = field(default=None, compare=False, metadata=OF_PROCESS)
    traced: Any = field(default=None, compare=False, repr=False, metadata=OF_PROCESS)

    @property
    def usable_bytes(self) -> int:
        """Largest predicted memory of a plan, in bytes per device."""
        share = 1 - self.search.reserve_share
        return int(round(share * self.memory_budget_bytes, 3))

    @property
    def decisions(self) -> Decisions:
        """Specs of all values of a plan in which all devices run one program."""
        assert not self.has_tasks, "every stage has its own"
        return self.stages[0].decisions

    @property
    def places(self) -> tuple[int, ...]:
        """Number of places of every stage along the stage axis."""
        if self.is_one_program:
            return (1,) * self.num_stages
        return tuple(stage.places for stage in self.stages)

    @property
    def microbatches(self) -> int:
        """Number of micro-batches; 1: the batch is not divided."""
        if self.pipeline is not None:
            return self.pipeline.micro_batches
        return num_microbatches(self.transforms)

    @property
    def schedule(self) -> str:
        """Name of the pipeline schedule; empty for a single stage."""
        if self.is_one_program:
            return IN_ONE_PROGRAM
        return "" if self.pipeline is None else self.pipeline.schedule

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return max(len(self.stages), stages_in_one(self.transforms))

    @property
    def is_one_mesh(self) -> bool:
        """Whether all devices run the whole program."""
        return self.num_stages == 1

    @property
    def is_one_program(self) -> bool:
        """Whether it is an SPMD pipeline: several stages along an axis of one mesh."""
        return stages_in_one(self.transforms) > 1

    @property
    def num_devices(self) -> int:
        """Number of devices of all stages."""
        return math.prod(size for _, size in self.mesh_axes)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation of the predicted step.

        Model FLOPs over the peak arithmetic of all devices in that time. Source: PaLM,
        appendix B (`rhino_jax.cost.compute`).
        """
        step_s = self.predicted.step_time_s * self.num_devices
        return self.model_flops.at_peak_s / step_s if step_s else 0.0

    @property
    def has_tasks(self) -> bool:
        """Whether it has several stages, each with its own programs."""
        return self.pipeline is not None and not self.is_one_program

    def __eq__(self, other: object) -> bool:
        """Compare by compared fields; plans of different subclasses may be equal."""
        if not isinstance(other, PlanData):
            return NotImplemented
        names = [f.name for f in fields(PlanData) if f.compare]
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def __copy__(self) -> PlanData:
        return self  # immutable

    def __deepcopy__(self, memo: Any) -> PlanData:
        return self


def is_cut_by_clock(plan: PlanData) -> bool:
    """Whether a wall-clock time limit affected the plan."""
    return any(note.startswith(CUT_BY_CLOCK) for note in plan.notes)


AnyPlan = TypeVar("AnyPlan", bound=PlanData)
"""A plan of any subclass: functions that take and return one preserve its class."""
