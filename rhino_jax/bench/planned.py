"""List of a row's plans, as written by the process that plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rhino_jax.bench.planning import Planned
from rhino_jax.bench.records import Measure, file_name
from rhino_jax.bench.store import read_json, write_json
from rhino_jax.plan.files.store import save_plan
from rhino_jax.utils.codec import from_json


LIST = "planned.json"
"""Name of the list's file, in the folder of the row's plans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEntry:
    """The plan of one method, or why there is none.

    Attributes:
      status: "ok", "no plan" or "not allowed".
      plan_s: seconds of planning, tracing excluded.
      error: why there is no plan; empty if there is one.
      file: name of the plan's file.
      mesh: size by axis, major first; None without a plan.
      predicted: the plan's predictions; None without a plan.
    """

    status: str
    plan_s: float = 0.0
    error: str = ""
    file: str = ""
    mesh: Mapping[str, int] | None = None
    predicted: Measure | None = None

    @classmethod
    def of(cls, planned: Planned, file: str) -> PlanEntry:
        plan = planned.plan
        return cls(
            status=planned.status,
            plan_s=planned.plan_s,
            error=planned.error,
            file=file,
            mesh=None if plan is None else dict(plan.mesh_axes),
            predicted=None
            if plan is None
            else Measure.of(plan.predicted, plan.collectives),
        )


def read_entries(folder: Path, versions: Mapping[str, str]) -> dict[str, PlanEntry]:
    """Return the entries of a folder by method; empty if they are of other versions."""
    listed = read_json(folder / LIST)
    if listed is None or listed["versions"] != dict(versions):
        return {}
    return from_json(dict[str, PlanEntry], listed["methods"])


def add_entry(folder: Path, versions: Mapping[str, str], planned: Planned) -> None:
    """Save a plan, and add it to the list, next to those of the same versions."""
    name = planned.method.name
    file = f"{file_name(name)}.json"
    if planned.plan is not None:
        save_plan(planned.plan, folder / file)
    entries = read_entries(folder, versions) | {name: PlanEntry.of(planned, file)}
    write_json(folder / LIST, {"versions": versions, "methods": entries})
