"""Plan files of schema version 2: without stages, transforms and lines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


VERSION = 2

NEW_KEYS = ("stages", "transforms", "lines")
"""Keys of version 3 that version 2 has not; it has `decisions` in their place."""


def from_version_2(data: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a file of version 2, as version 3 says it.

    Raises:
      KeyError, TypeError, ValueError: the content does not fit version 2.
    """
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
    # Lines are found anew when the plan meets its program.
    new = {"schema_version": 3, "stages": [stage], "transforms": [], "lines": {}}
    return {**rest, **new}
