"""Validation of the values of a suite's file.

Published solutions: the best stages of a workload that others found.

    alpa = {stages = [2, 2, 4], microbatches = 128, mesh = {stage = 4, x = 2}}

in a row: the devices of every stage, the number of micro-batches, and optionally the
mesh and `pins` from a parameter's path to the stage that reads it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, replace
from typing import Any

from rhino_jax.errors import RhinoError, check_keys
from rhino_jax.models.config import ModelConfigError
from rhino_jax.models.workload import Workload
from rhino_jax.units import parse_bytes
from rhino_jax.utils.checked_table import CheckedTable, is_number


class BenchError(RhinoError, ValueError):
    """A suite is malformed, or a benchmark cannot run as requested."""


def suite_table(entries: Mapping[str, Any], file: str, what: str) -> CheckedTable:
    """Return a table of a suite's file, for errors on its values."""
    return CheckedTable(entries, what, file, BenchError)


def _is_names(value: Any) -> bool:
    is_list = isinstance(value, list | tuple)
    return is_list and all(isinstance(name, str) for name in value)


_EXPECTED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "overrides": (lambda value: isinstance(value, dict), "a table"),
    "mesh": (lambda value: _is_table(value, 1), "a table of axis sizes >= 1"),
    "target": (lambda value: isinstance(value, str), "a name, as 'v5e:4x4'"),
    "memory_share": (
        lambda value: is_number(value, most=1) and value > 0,
        "a share, > 0 and at most 1",
    ),
    "memory_room": (lambda value: is_number(value, most=1), "a share, from 0 to 1"),
    "memory": (
        lambda x: isinstance(x, str) and parse_bytes(x) is not None,
        "a size, as '6GiB'",
    ),
    "microbatches": (lambda value: _is_count(value, 0), "a number >= 0"),
    "stages": (lambda value: _is_count(value, 0), "a number >= 0"),
    "per_microbatch": (_is_names, "a list of names"),
    "published": (is_number, "a number >= 0"),
    "published_s": (
        lambda value: isinstance(value, list) and all(map(is_number, value)),
        "a list of seconds",
    ),
}
"""Key of a row → whether a value is valid, and what is expected."""


def check_values(at: CheckedTable) -> None:
    """Check the values of a row that are valid or not by themselves.

    Raises:
      BenchError: a value is invalid, or two limits of memory are given.
    """
    row = at.entries
    for key, (is_good, expected) in _EXPECTED.items():
        if key in row:
            at.check(is_good(row[key]), key, row[key], expected)
    is_one = "memory_share" not in row or "memory_room" not in row
    said = row.get("memory_room")
    at.check(is_one, "memory_room", said, "left out beside `memory_share`")


def built(
    make: Callable[..., Workload], name: str, overrides: Mapping[str, Any]
) -> Workload:
    """Return the workload that a function makes.

    Args:
      make: the function.
      name: name of the model, for messages.
      overrides: keywords of the function.

    Raises:
      ModelConfigError: it has no such keyword.
    """
    known = inspect.signature(make).parameters
    check_keys(
        ModelConfigError, f"the model {name!r}", overrides, known, make.__module__
    )
    return make(**overrides)


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


def parse_solution(table: Any, devices: int, at: CheckedTable) -> PlanOutline | None:
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
    at = replace(at, entries=table)
    at.refuse_unknown(("stages", "microbatches", "mesh", "pins"))
    stages, count = table.get("stages", MISSING), table.get("microbatches", MISSING)
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
    return isinstance(value, int) and is_number(value, least)


def _is_table(value: Any, least: int) -> bool:
    return isinstance(value, Mapping) and all(
        _is_count(v, least) for v in value.values()
    )
