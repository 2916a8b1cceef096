"""Stages of a plan as JSON data, and back; specs name axes by number, each once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rhino_jax.hardware.lowering import LoweringPolicy
from rhino_jax.ir.spec import Spec
from rhino_jax.plan.decisions import Decisions
from rhino_jax.plan.files.tree_json import floats, predicted_from_json, record_to_json
from rhino_jax.plan.stages import (
    Between,
    Pipeline,
    PipelinePass,
    StageCost,
    StageHop,
    StagePlan,
    StageRemat,
    StageSend,
)


def stages_to_json(stages: Sequence[StagePlan]) -> list[dict[str, Any]]:
    """Convert stages to JSON data, without their meshes, which belong to a process.

    Decisions that several stages share are written once, then as the position of the
    first stage that has them.
    """
    first: dict[int, int] = {}
    return [
        {
            "mesh_axes": [[name, size] for name, size in stage.mesh_axes],
            "devices": _runs(stage.devices),
            "predicted": record_to_json(stage.predicted),
            "sends": [record_to_json(x) for x in stage.sends],
            "layers": [list(x) for x in stage.layers],
            "decisions": _decisions_to_json(stage.decisions)
            if (known := first.setdefault(id(stage.decisions), i)) == i
            else known,
        }
        for i, stage in enumerate(stages)
    ]


def stages_from_json(data: Iterable[Mapping[str, Any]]) -> tuple[StagePlan, ...]:
    """Convert the result of `stages_to_json` back to stages."""
    found: list[StagePlan] = []
    for x in data:
        said = x["decisions"]
        found.append(
            StagePlan(
                mesh_axes=tuple((str(n), int(size)) for n, size in x["mesh_axes"]),
                devices=tuple(d for a, b in x["devices"] for d in range(a, b)),
                decisions=found[said].decisions
                if isinstance(said, int)
                else _decisions(said),
                predicted=predicted_from_json(x["predicted"]),
                sends=tuple(StageSend(**floats(s, "seconds")) for s in x["sends"]),
                layers=tuple((a, b) for a, b in x.get("layers", ())),
            )
        )
    return tuple(found)


def pipeline_to_json(pipeline: Pipeline | None) -> dict[str, Any] | None:
    """Convert a pipeline to JSON data; None for a single stage."""
    if pipeline is None:
        return None
    return {
        "micro_batches": pipeline.micro_batches,
        "schedule": pipeline.schedule,
        "runs": [list(run) for run in pipeline.runs],
        "costs": [record_to_json(x) for x in pipeline.costs],
        "hops": [record_to_json(x) for x in pipeline.hops],
        "per_microbatch": list(pipeline.per_microbatch),
        "group_of": list(pipeline.group_of),
        "is_split": pipeline.is_split,
        "orders": list(pipeline.orders),
        "is_twice": pipeline.is_twice,
        "slices": list(pipeline.slices),
        "between": [record_to_json(x) for x in pipeline.between],
        "recomputed": list(pipeline.recomputed),
        "made_again": [record_to_json(x) for x in pipeline.made_again],
        "passes": [record_to_json(x) for x in pipeline.passes],
        "host_bytes_per_s": pipeline.host_bytes_per_s,
    }


def pipeline_from_json(data: Mapping[str, Any] | None) -> Pipeline | None:
    """Convert the result of `pipeline_to_json` back to a pipeline."""
    if data is None:
        return None
    seconds = ("forward_s", "backward_s", "update_s", "weights_s", "ahead_s")
    return Pipeline(
        micro_batches=int(data["micro_batches"]),
        schedule=str(data["schedule"]),
        runs=tuple((int(stage), int(count)) for stage, count in data["runs"]),
        costs=tuple(
            StageCost(**floats({"weights_s": 0.0, "ahead_s": 0.0, **x}, *seconds))
            for x in data["costs"]
        ),
        hops=tuple(
            StageHop(**floats(x, "bytes_per_s", "latency_s")) for x in data["hops"]
        ),
        per_microbatch=tuple(data["per_microbatch"]),
        # Older files lack these keys.
        group_of=tuple(data.get("group_of", ())),
        is_split=bool(data.get("is_split", False)),
        orders=tuple(data.get("orders", ())),
        is_twice=bool(data.get("is_twice", False)),
        slices=tuple(data.get("slices", ())),
        between=tuple(
            Between(float(x["seconds"]), tuple((s, n) for s, n in x["receives"]))
            for x in data.get("between", ())
        ),
        recomputed=tuple(data.get("recomputed", ())),
        made_again=tuple(
            StageRemat(**floats(x, "added_s")) for x in data.get("made_again", ())
        ),
        passes=tuple(
            PipelinePass(**floats(x, "tick_s", "handed_s", "before_s"))
            for x in data.get("passes", ())
        ),
        host_bytes_per_s=float(data.get("host_bytes_per_s", 0.0)),
    )


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    """Compress numbers to [start, stop) runs: [0, 1, 2, 8] is [[0, 3], [8, 9]]."""
    found: list[list[int]] = []
    for n in numbers:
        if found and found[-1][1] == n:
            found[-1][1] = n + 1
        else:
            found.append([n, n + 1])
    return found


def _decisions_to_json(decisions: Decisions) -> dict[str, Any]:
    specs = _SpecTable()
    return {
        "values": [[v, specs.index(s)] for v, s in decisions.values.items()],
        "operands": [[*key, specs.index(s)] for key, s in decisions.operands.items()],
        "region_outputs": [
            [*key, specs.index(s)] for key, s in decisions.region_outputs.items()
        ],
        "outputs": [specs.index(s) for s in decisions.outputs],
        "waypoints": [
            [v, [specs.index(s) for s in waypoints]]
            for v, waypoints in decisions.waypoints.items()
        ],
        "through": [
            [*key, [specs.index(s) for s in copies]]
            for key, copies in decisions.through.items()
        ],
        "lowering": {
            "gathers_by_axis": decisions.lowering.gathers_by_axis,
            "annotates_waypoints": decisions.lowering.annotates_waypoints,
        },
        "specs": specs.specs,
    }


def _decisions(data: Mapping[str, Any]) -> Decisions:
    specs = [_spec(s) for s in data["specs"]]
    return Decisions(
        values={v: specs[s] for v, s in data["values"]},
        operands={(op, i): specs[s] for op, i, s in data["operands"]},
        region_outputs={(op, r, o): specs[s] for op, r, o, s in data["region_outputs"]},
        outputs=tuple(specs[s] for s in data["outputs"]),
        waypoints={
            v: tuple(specs[s] for s in waypoints) for v, waypoints in data["waypoints"]
        },
        # Older files lack this key.
        through={
            (op, i): tuple(specs[s] for s in copies)
            for op, i, copies in data.get("through", ())
        },
        lowering=LoweringPolicy(
            gathers_by_axis=bool(data["lowering"]["gathers_by_axis"]),
            annotates_waypoints=bool(data["lowering"]["annotates_waypoints"]),
        ),
    )


def _spec(data: Any) -> Spec:
    return tuple(tuple(int(a) for a in dim) for dim in data)


class _SpecTable:
    """A table of distinct specs, so that thousands of equal ones are written once."""

    def __init__(self) -> None:
        self.specs: list[Spec] = []
        self._numbers: dict[Spec, int] = {}

    def index(self, spec: Spec) -> int:
        if spec not in self._numbers:
            self._numbers[spec] = len(self.specs)
            self.specs.append(spec)
        return self._numbers[spec]
