"""Published solutions: the best stages of a workload that others found.

    alpa = {stages = [2, 2, 4], microbatches = 128, mesh = {stage = 4, x = 2}}

in a row: the devices of every stage, the number of micro-batches, and optionally the
mesh and `pins` from a parameter's path to the stage that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rhino_jax.bench.checks import FilePlace


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutline:
    """The outline of a plan in stages.

    Shardings and remat are left to the planner, which chooses them for all outlines in
    the same way.

    Attributes:
      stages: number of devices of every stage.
      microbatches: number of micro-batches.
      mesh: (name, size) of every mesh axis, major first; empty: the planner chooses.
      pins: (path or glob, stage) of parameters.
    """

    stages: tuple[int, ...]
    microbatches: int
    mesh: tuple[tuple[str, int], ...] = ()
    pins: tuple[tuple[str, int], ...] = ()

    def to_table(self) -> dict[str, Any]:
        """Return the outline as a suite writes it."""
        table: dict[str, Any] = {
            "stages": list(self.stages),
            "microbatches": self.microbatches,
        }
        if self.mesh:
            table["mesh"] = dict(self.mesh)
        if self.pins:
            table["pins"] = dict(self.pins)
        return table

    def asked(self) -> dict[str, Any]:
        """Return the keywords of `rhino.plan`; the schedule is 1F1B, as Alpa runs."""
        one = len(self.stages) == 1
        return {
            "stages": 1 if one else list(self.stages),
            "microbatches": self.microbatches,
            "mesh": dict(self.mesh) or None,
            "pins": dict(self.pins) or None,
            "schedule": "auto" if one else "1f1b",
        }


def parse_solution(table: Any, devices: int, at: FilePlace) -> PlanOutline | None:
    """Return the checked solution of a row; None if the row has none.

    Args:
      table: the row's `alpa`, or None.
      devices: number of devices of the row's target.
      at: the row, for errors.

    Raises:
      BenchError: a key is unknown, missing, or has an invalid value.
    """
    if table is None:
        return None
    at.check(isinstance(table, dict), "alpa", table, "a table")
    keys = ("stages", "microbatches", "mesh", "pins")
    at.check_keys(table, keys, required=keys[:2])
    stages, count = table["stages"], table["microbatches"]
    is_list = isinstance(stages, list) and all(map(_is_count, stages))
    is_whole = is_list and sum(stages) == devices
    at.check(is_whole, "stages", stages, f"a list of devices, {devices} together")
    at.check(_is_count(count), "microbatches", count, "a number >= 1")
    mesh, pins = table.get("mesh", {}), table.get("pins", {})
    at.check(_is_table(mesh, least=1), "mesh", mesh, "a table of axis sizes >= 1")
    at.check(_is_table(pins, least=0), "pins", pins, "a table of stages >= 0")
    return PlanOutline(
        stages=tuple(stages),
        microbatches=count,
        mesh=tuple(mesh.items()),
        pins=tuple(pins.items()),
    )


def _is_count(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_table(value: Any, least: int) -> bool:
    return isinstance(value, Mapping) and all(
        _is_count(v, least) for v in value.values()
    )
