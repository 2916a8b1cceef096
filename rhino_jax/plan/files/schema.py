"""The content of a plan file: a plan as JSON data, and back.

It contains everything but the mesh (devices are not portable); axes are named, not
numbered, where people read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import jax

from rhino_jax.cost.utilisation import ModelFlops
from rhino_jax.ir.transform import Transform
from rhino_jax.plan.files.stage_json import (
    pipeline_from_json,
    pipeline_to_json,
    stages_from_json,
    stages_to_json,
)
from rhino_jax.plan.files.tree_json import (
    floats,
    number,
    predicted_from_json,
    record_to_json,
    tree_from_json,
    tree_to_json,
)
from rhino_jax.plan.fingerprint import outline_of
from rhino_jax.plan.plan import Leaf, PlanData
from rhino_jax.plan.records import (
    Collective,
    CompiledCandidate,
    Coverage,
    LineTime,
    PeakValue,
    SearchReport,
    Variant,
    WhileLoop,
)


SCHEMA_VERSION = 6
FORMAT = "rhino_jax plan"


def plan_to_dict(plan: PlanData) -> dict[str, Any]:
    """Return the content of a plan file, without its checksum."""
    names = [name for name, _ in plan.mesh_axes]
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "versions": dict(plan.versions) or current_versions(),
        "program_name": plan.program_name,
        "fingerprint": plan.fingerprint,
        "hardware": plan.hardware,
        "mesh_axes": [[name, size] for name, size in plan.mesh_axes],
        "memory_budget_bytes": plan.memory_budget_bytes,
        "stages": stages_to_json(plan.stages),
        "pipeline": pipeline_to_json(plan.pipeline),
        "transforms": [record_to_json(x) for x in plan.transforms],
        "variants": [record_to_json(x) for x in plan.variants],
        "inputs": [_leaf_to_json(x, names) for x in plan.inputs],
        "outputs": [_leaf_to_json(x, names) for x in plan.outputs],
        "predicted": record_to_json(plan.predicted),
        "recipes": {
            name: None if cost is None else record_to_json(cost)
            for name, cost in plan.recipes.items()
        },
        "search": record_to_json(plan.search),
        "coverage": record_to_json(plan.coverage),
        "collectives": [record_to_json(x) for x in plan.collectives],
        "at_peak": [record_to_json(x) for x in plan.at_peak],
        "pins": dict(plan.pins),
        "meshes": [[list(shape), number(s)] for shape, s in plan.meshes],
        "refined": [record_to_json(x) for x in plan.refined],
        "line_times": [record_to_json(x) for x in plan.line_times],
        "model_flops": record_to_json(plan.model_flops),
        "while_loops": [record_to_json(x) for x in plan.while_loops],
        "notes": list(plan.notes),
        "outline": outline_of(plan),
        "lines": {text: list(place) for text, place in plan.lines.items()},
        "trees": {
            "in": tree_to_json(plan.in_tree),
            "in_leaf_positions": list(plan.in_leaf_positions),
            "out": tree_to_json(plan.out_tree),
            "out_leaf_positions": list(plan.out_leaf_positions),
        },
    }


def plan_from_dict(data: Mapping[str, Any]) -> PlanData:
    """Convert the content of a plan file to a plan without a mesh.

    Raises:
      KeyError, TypeError, ValueError: the content does not fit the schema.
    """
    axes = tuple((str(name), int(size)) for name, size in data["mesh_axes"])
    place = {name: i for i, (name, _) in enumerate(axes)}
    stages = len(data["stages"])
    trees = data["trees"]
    in_tree, in_positions = tree_from_json(
        trees["in"], tuple(trees["in_leaf_positions"])
    )
    out_tree, out_positions = tree_from_json(
        trees["out"], tuple(trees["out_leaf_positions"])
    )
    return PlanData(
        program_name=data["program_name"],
        fingerprint=data["fingerprint"],
        mesh_axes=axes,
        hardware=data["hardware"],
        inputs=tuple(_leaf(x, place, stages) for x in data["inputs"]),
        outputs=tuple(_leaf(x, place, stages) for x in data["outputs"]),
        stages=stages_from_json(data["stages"]),
        pipeline=pipeline_from_json(data["pipeline"]),
        transforms=tuple(Transform(**x) for x in data["transforms"]),
        variants=tuple(Variant(**floats(x, "step_time_s")) for x in data["variants"]),
        predicted=predicted_from_json(data["predicted"]),
        collectives=tuple(_collective(x) for x in data["collectives"]),
        search=_search(data["search"]),
        coverage=_coverage(data["coverage"]),
        recipes={
            name: None if cost is None else predicted_from_json(cost)
            for name, cost in data["recipes"].items()
        },
        memory_budget_bytes=int(data["memory_budget_bytes"]),
        at_peak=tuple(PeakValue(**x) for x in data["at_peak"]),
        pins=dict(data["pins"]),
        meshes=tuple((tuple(shape), float(s)) for shape, s in data["meshes"]),
        refined=tuple(_candidate(x) for x in data["refined"]),
        line_times=tuple(LineTime(**x) for x in data["line_times"]),
        model_flops=ModelFlops(**data["model_flops"]),
        while_loops=tuple(WhileLoop(**x) for x in data["while_loops"]),
        notes=tuple(data["notes"]),
        lines={text: (int(op), int(k)) for text, (op, k) in data["lines"].items()},
        in_tree=in_tree,
        out_tree=out_tree,
        in_leaf_positions=in_positions,
        out_leaf_positions=out_positions,
        versions=dict(data["versions"]),
        outline=str(data["outline"]),
    )


def _leaf(data: Mapping[str, Any], place: Mapping[str, int], stages: int) -> Leaf:
    # Older files lack the last three keys, or have stage -1 for all stages.
    stage = int(data.get("stage", 0))
    return Leaf(
        path=data["path"],
        shape=tuple(data["shape"]),
        dtype=data["dtype"],
        spec=tuple(tuple(place[name] for name in dim) for dim in data["spec"]),
        bytes_per_device=data["bytes_per_device"],
        is_donated=bool(data.get("is_donated", False)),
        stage=max(stage, 0),
        num_stages=int(data.get("num_stages", stages if stage < 0 else 1)),
    )


def _collective(data: Mapping[str, Any]) -> Collective:
    record = floats(data, "seconds")
    return Collective(**{**record, "axes": tuple(record["axes"])})


def _candidate(data: Mapping[str, Any]) -> CompiledCandidate:
    record = floats(data, "predicted_s", "compiled_s")
    return CompiledCandidate(**{**record, "mesh": tuple(record["mesh"])})


def _search(data: Mapping[str, Any]) -> SearchReport:
    record = floats(data, "objective_s", "bound_s", "gap", "seconds")
    return SearchReport(**{**record, "nodes": tuple(record["nodes"])})


def _coverage(data: Mapping[str, Any]) -> Coverage:
    record = floats(data, "ops", "flops", "bytes")
    unknown = tuple((name, count) for name, count in record["unknown"])
    return Coverage(**{**record, "unknown": unknown})


def current_versions() -> dict[str, str]:
    """Return the versions of the installed rhino_jax and JAX."""
    try:
        ours = metadata.version("rhino_jax")
    except metadata.PackageNotFoundError:
        ours = "not installed"
    return {"rhino_jax": ours, "jax": jax.__version__}


def _leaf_to_json(leaf: Leaf, names: Sequence[str]) -> dict[str, Any]:
    return {
        "path": leaf.path,
        "shape": [int(d) for d in leaf.shape],
        "dtype": leaf.dtype,
        "spec": [[names[a] for a in dim] for dim in leaf.spec],
        "bytes_per_device": int(leaf.bytes_per_device),
        "is_donated": leaf.is_donated,
        "stage": leaf.stage,
        "num_stages": leaf.num_stages,
    }
