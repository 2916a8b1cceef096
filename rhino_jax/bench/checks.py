"""Validation of the values of a suite's file.

Published solutions: the best stages of a workload that others found.

    alpa = {stages = [2, 2, 4], microbatches = 128, mesh = {stage = 4, x = 2}}

in a row: the devices of every stage, the number of micro-batches, and optionally the
mesh and `pins` from a parameter's path to the stage that reads it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from rhino_jax.errors import RhinoError, check_keys
from rhino_jax.models.config import ModelConfigError
from rhino_jax.models.workload import Workload
from rhino_jax.units import parse_bytes
from rhino_jax.utils.checked_table import CheckedTable, is_number


class BenchError(RhinoError, ValueError):
    """A suite is malformed, or a benchmark cannot run as requested."""


def _is_names(value: Any) -> bool:
    is_list = isinstance(value, list | tuple)
    return is_list and all(isinstance(name, str) for name in value)


def _is_count(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and is_number(value, least)


def _is_table(value: Any, least: int = 1) -> bool:
    return isinstance(value, Mapping) and all(
        _is_count(v, least) for v in value.values()
    )


def _is_list(value: Any, is_one: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_one, value))


Checks = Mapping[str, tuple[Callable[[Any], bool], str]]
"""Key → whether a value is valid, and what is expected."""

_MESH = _is_table, "a table of axis sizes >= 1"
_COUNT = (lambda value: _is_count(value, 0), "a number >= 0")

ROW: Checks = {
    "overrides": (lambda value: isinstance(value, dict), "a table"),
    "mesh": _MESH,
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
    "microbatches": _COUNT,
    "stages": _COUNT,
    "per_microbatch": (_is_names, "a list of names"),
    "published": (is_number, "a number >= 0"),
    "published_s": (lambda value: _is_list(value, is_number), "a list of seconds"),
}
"""Keys of a row whose values are valid or not by themselves."""


def checked(at: CheckedTable, checks: Checks) -> dict[str, Any]:
    """Return the values of a table; tables as pairs, lists as tuples.

    Raises:
      BenchError: a value is invalid.
    """
    for key, (is_good, expected) in checks.items():
        if key in at.entries:
            at.check(is_good(at.entries[key]), key, at.entries[key], expected)
    return {key: _frozen(value) for key, value in at.entries.items()}


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(value.items())
    return tuple(value) if isinstance(value, list) else value


def entries_of(record: Any, **changed: Any) -> dict[str, Any]:
    """Return a record's values as a suite writes them, without those by default.

    Args:
      record: the record.
      changed: values in place of the record's.
    """
    values = [(f, changed.get(f.name, getattr(record, f.name))) for f in fields(record)]
    return {f.name: value for f, value in values if value != f.default}


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
        mesh, pins = dict(self.mesh) or (), dict(self.pins) or ()
        return entries_of(self, stages=list(self.stages), mesh=mesh, pins=pins)

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
    at.refuse_unknown(f.name for f in fields(PlanOutline))

    def is_whole(stages: Any) -> bool:
        return _is_list(stages, _is_count) and sum(stages) == devices

    required: Checks = {
        "stages": (is_whole, f"a list of devices, {devices} together"),
        "microbatches": (_is_count, "a number >= 1"),
    }
    for key, (_, expected) in required.items():
        at.check(key in table, key, MISSING, expected)
    pins = lambda value: _is_table(value, 0), "a table of stages >= 0"
    return PlanOutline(**checked(at, {**required, "mesh": _MESH, "pins": pins}))
