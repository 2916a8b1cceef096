"""What a plan file holds: a plan as JSON data, and back.

Everything but the mesh (devices are not portable) is held; axes are named, not
numbered, where people read them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import metadata
from typing import Any

import jax

from rhino_jax.hardware.lowering import LoweringPolicy
from rhino_jax.ir.spec import Spec
from rhino_jax.plan.decisions import Decisions
from rhino_jax.plan.plan import Leaf, Plan
from rhino_jax.plan.records import (
    Collective,
    CompiledCandidate,
    Coverage,
    Holding,
    Predicted,
    SearchReport,
)
from rhino_jax.plan.tree_json import tree_from_json, tree_to_json


SCHEMA_VERSION = 3
FORMAT = "rhino_jax plan"


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The content of a plan file, without its checksum."""
    names = [name for name, _ in plan.mesh_axes]
    specs = _SpecTable()
    decisions = plan.decisions
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "versions": dict(plan.versions) or current_versions(),
        "program_name": plan.program_name,
        "fingerprint": plan.fingerprint,
        "hardware": plan.hardware,
        "mesh_axes": [[name, size] for name, size in plan.mesh_axes],
        "memory_budget_bytes": plan.memory_budget_bytes,
        "inputs": [_leaf_to_json(x, names) for x in plan.inputs],
        "outputs": [_leaf_to_json(x, names) for x in plan.outputs],
        "predicted": _record_to_json(plan.predicted),
        "recipes": {
            name: None if cost is None else _record_to_json(cost)
            for name, cost in plan.recipes.items()
        },
        "search": _record_to_json(plan.search),
        "coverage": _record_to_json(plan.coverage),
        "collectives": [_record_to_json(x) for x in plan.collectives],
        "at_peak": [_record_to_json(x) for x in plan.at_peak],
        "pins": dict(plan.pins),
        "meshes": [[list(shape), _number(s)] for shape, s in plan.meshes],
        "refined": [_record_to_json(x) for x in plan.refined],
        "notes": list(plan.notes),
        "lines": {text: list(place) for text, place in plan.lines.items()},
        "trees": {
            "in": tree_to_json(plan.in_tree),
            "in_leaf_positions": list(plan.in_leaf_positions),
            "out": tree_to_json(plan.out_tree),
            "out_leaf_positions": list(plan.out_leaf_positions),
        },
        "decisions": {
            "values": [[v, specs.index(s)] for v, s in decisions.values.items()],
            "operands": [
                [*key, specs.index(s)] for key, s in decisions.operands.items()
            ],
            "region_outputs": [
                [*key, specs.index(s)] for key, s in decisions.region_outputs.items()
            ],
            "outputs": [specs.index(s) for s in decisions.outputs],
            "stops": [
                [v, [specs.index(s) for s in waypoints]]
                for v, waypoints in decisions.waypoints.items()
            ],
            "gathers_by_axis": decisions.lowering.gathers_by_axis,
            "says_stops": decisions.lowering.annotates_waypoints,
            "specs": specs.specs,
        },
    }


def plan_from_dict(data: Mapping[str, Any]) -> Plan:
    """The plan that `plan_to_dict` wrote, without a mesh.

    Raises:
      KeyError, TypeError, ValueError: the content does not fit the schema.
    """
    axes = tuple((str(name), int(size)) for name, size in data["mesh_axes"])
    place = {name: i for i, (name, _) in enumerate(axes)}
    trees, decisions = data["trees"], data["decisions"]
    specs = [_spec(s) for s in decisions["specs"]]
    in_tree, in_positions = tree_from_json(
        trees["in"], tuple(trees["in_leaf_positions"])
    )
    out_tree, out_positions = tree_from_json(
        trees["out"], tuple(trees["out_leaf_positions"])
    )
    return Plan(
        program_name=data["program_name"],
        fingerprint=data["fingerprint"],
        mesh_axes=axes,
        hardware=data["hardware"],
        inputs=tuple(_leaf(x, place) for x in data["inputs"]),
        outputs=tuple(_leaf(x, place) for x in data["outputs"]),
        decisions=Decisions(
            values={v: specs[s] for v, s in decisions["values"]},
            operands={(op, i): specs[s] for op, i, s in decisions["operands"]},
            region_outputs={
                (op, r, o): specs[s] for op, r, o, s in decisions["region_outputs"]
            },
            outputs=tuple(specs[s] for s in decisions["outputs"]),
            waypoints={
                v: tuple(specs[s] for s in waypoints)
                for v, waypoints in decisions["stops"]
            },
            lowering=LoweringPolicy(
                gathers_by_axis=bool(decisions["gathers_by_axis"]),
                annotates_waypoints=bool(decisions["says_stops"]),
            ),
        ),
        predicted=_predicted(data["predicted"]),
        collectives=tuple(_collective(x) for x in data["collectives"]),
        search=_search(data["search"]),
        coverage=_coverage(data["coverage"]),
        recipes={
            name: None if cost is None else _predicted(cost)
            for name, cost in data["recipes"].items()
        },
        memory_budget_bytes=int(data["memory_budget_bytes"]),
        at_peak=tuple(Holding(**x) for x in data["at_peak"]),
        pins=dict(data["pins"]),
        meshes=tuple((tuple(shape), float(s)) for shape, s in data["meshes"]),
        refined=tuple(_candidate(x) for x in data["refined"]),
        notes=tuple(data["notes"]),
        lines={text: (int(op), int(k)) for text, (op, k) in data["lines"].items()},
        in_tree=in_tree,
        out_tree=out_tree,
        in_leaf_positions=in_positions,
        out_leaf_positions=out_positions,
        versions=dict(data["versions"]),
    )


def _spec(data: Any) -> Spec:
    return tuple(tuple(int(a) for a in dim) for dim in data)


def _leaf(data: Mapping[str, Any], place: Mapping[str, int]) -> Leaf:
    return Leaf(
        path=data["path"],
        shape=tuple(data["shape"]),
        dtype=data["dtype"],
        spec=tuple(tuple(place[name] for name in dim) for dim in data["spec"]),
        bytes_per_device=data["bytes_per_device"],
        # Plans were once written without it.
        is_donated=bool(data.get("is_donated", False)),
    )


def _floats(data: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The record with these fields as numbers again (see `_number`)."""
    return {**data, **{name: float(data[name]) for name in names}}


def _predicted(data: Mapping[str, Any]) -> Predicted:
    times = ("step_time_s", "compute_s", "communication_s", "flops_per_device")
    return Predicted(**_floats(data, *times))


def _collective(data: Mapping[str, Any]) -> Collective:
    record = _floats(data, "seconds")
    return Collective(**{**record, "axes": tuple(record["axes"])})


def _candidate(data: Mapping[str, Any]) -> CompiledCandidate:
    record = _floats(data, "predicted_s", "compiled_s")
    return CompiledCandidate(**{**record, "mesh": tuple(record["mesh"])})


def _search(data: Mapping[str, Any]) -> SearchReport:
    record = _floats(data, "objective_s", "bound_s", "gap", "seconds")
    return SearchReport(**{**record, "nodes": tuple(record["nodes"])})


def _coverage(data: Mapping[str, Any]) -> Coverage:
    record = _floats(data, "ops", "flops", "bytes")
    unknown = tuple((name, count) for name, count in record["unknown"])
    return Coverage(**{**record, "unknown": unknown})


def current_versions() -> dict[str, str]:
    """Versions of what makes plans here."""
    try:
        ours = metadata.version("rhino_jax")
    except metadata.PackageNotFoundError:
        ours = "not installed"
    return {"rhino_jax": ours, "jax": jax.__version__}


class _SpecTable:
    """Numbers specs, so that thousands of equal ones are written once."""

    def __init__(self) -> None:
        self.specs: list[Spec] = []
        self._numbers: dict[Spec, int] = {}

    def index(self, spec: Spec) -> int:
        if spec not in self._numbers:
            self._numbers[spec] = len(self.specs)
            self.specs.append(spec)
        return self._numbers[spec]


def _number(value: Any) -> Any:
    """JSON knows no infinity: such a number is written as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _record_to_json(record: Any) -> dict[str, Any]:
    """A flat record; numpy scalars become Python's."""
    out = {}
    for item in fields(record):
        value = getattr(record, item.name)
        out[item.name] = _number(value.item() if hasattr(value, "item") else value)
    return out


def _leaf_to_json(leaf: Leaf, names: Sequence[str]) -> dict[str, Any]:
    return {
        "path": leaf.path,
        "shape": [int(d) for d in leaf.shape],
        "dtype": leaf.dtype,
        "spec": [[names[a] for a in dim] for dim in leaf.spec],
        "bytes_per_device": int(leaf.bytes_per_device),
        "is_donated": leaf.is_donated,
    }
