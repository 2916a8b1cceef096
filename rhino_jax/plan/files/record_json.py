"""Flat records as JSON data, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rhino_jax.plan.records import Predicted


def number(value: Any) -> Any:
    """Return a value as JSON data: numbers that are not finite as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def record_to_json(record: Any) -> dict[str, Any]:
    """Convert a flat record to JSON data; numpy scalars become Python's."""
    out = {}
    for item in fields(record):
        value = getattr(record, item.name)
        out[item.name] = number(value.item() if hasattr(value, "item") else value)
    return out


def floats(data: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the record with the named fields converted to floats (see `number`)."""
    return {**data, **{name: float(data[name]) for name in names}}


def predicted_from_json(data: Mapping[str, Any]) -> Predicted:
    times = ("step_time_s", "compute_s", "communication_s", "flops_per_device")
    return Predicted(**floats(data, *times))
