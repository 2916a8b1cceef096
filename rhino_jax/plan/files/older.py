"""Plan files of older schema versions.

2: without stages, transforms and lines. 3: without the variants that were compared.
4: without a pipeline. 5: without `while_loops`, an outline of the
program, and seconds by line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


VERSIONS = (5, 4, 3, 2)

_NEW_IN_3 = ("stages", "transforms", "lines")
"""Keys added in version 3, in place of the key `decisions`."""

_NEW_IN_4 = ("variants",)

_NEW_IN_5 = ("pipeline",)

_NEW_IN_6 = ("line_times", "model_flops", "while_loops", "outline")


def keys_of(version: int, keys: Sequence[str]) -> list[str]:
    """Return the keys of a file of an older version.

    Args:
      version: schema version of the file.
      keys: keys of the current version.
    """
    left = [k for k in keys if k not in _NEW_IN_6]
    if version == 5:
        return left
    left = [k for k in left if k not in _NEW_IN_5]
    if version == 4:
        return left
    left = [k for k in left if k not in _NEW_IN_4]
    if version == 3:
        return left
    return [k for k in left if k not in _NEW_IN_3] + ["decisions"]


def upgraded(data: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the content of a file of an older version to the current version.

    Raises:
      KeyError, TypeError, ValueError: the content does not fit its version.
    """
    if data["schema_version"] == 2:
        data = _from_2(data)
    new: dict[str, Any] = {"variants": [], "pipeline": None}
    new |= {"while_loops": [], "outline": "", "line_times": [], "model_flops": {}}
    return {**new, **data, "schema_version": 6}


def _from_2(data: Mapping[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in data.items() if key != "decisions"}
    decisions = dict(data["decisions"])
    decisions["waypoints"] = decisions.pop("stops")
    decisions["lowering"] = {
        "gathers_by_axis": decisions.pop("gathers_by_axis"),
        "annotates_waypoints": decisions.pop("says_stops"),
    }
    stage = {
        "mesh_axes": data["mesh_axes"],
        "devices": [[0, math.prod(size for _, size in data["mesh_axes"])]],
        "predicted": data["predicted"],
        "sends": [],
        "decisions": decisions,
    }
    # Lines are found again when the plan is applied to its program.
    return {**rest, "stages": [stage], "transforms": [], "lines": {}}
