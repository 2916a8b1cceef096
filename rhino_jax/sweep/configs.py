"""Configurations: one value of every varied option."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rhino_jax.errors import RhinoError
from rhino_jax.hardware.files import load_target
from rhino_jax.planner.meshes import read_stages
from rhino_jax.planner.per_microbatch import read_microbatches
from rhino_jax.utils.keywords import brief, read_bytes, read_count


WHAT = "`rhino.sweep`"

NAMES = (
    "hardware",
    "devices",
    "mesh",
    "memory_budget_bytes",
    "batch",
    "stages",
    "microbatches",
)
"""Options that may vary."""


@dataclass(frozen=True, slots=True)
class SweepConfig:
    """One value of every option that may vary.

    Attributes:
      hardware: as in `auto_shard`; None: the devices present.
      devices: number of devices, from which rhino forms meshes; None: as `hardware` or
        `mesh` specify.
      mesh: (name, size) of its axes; None: the best one of up to two axes.
      memory_budget_bytes: per device; None: the memory of the hardware.
      batch: size of the batch; None: as in the arguments.
      stages, microbatches: as in `auto_shard`.
    """

    hardware: Any
    devices: int | None
    mesh: tuple[tuple[str, int], ...] | None
    memory_budget_bytes: int | None
    batch: int | None
    stages: int | str | tuple[int, ...]
    microbatches: int | str

    @property
    def passes(self) -> tuple[int | None, int | str | tuple[int, ...], int | str]:
        """Options that change the program: batch, stages, micro-batches."""
        return self.batch, self.stages, self.microbatches


def configurations(lists: Mapping[str, Any]) -> list[SweepConfig]:
    """Return every combination, the last list varying fastest.

    Args:
      lists: option → values; a single value is a list of one, None the default.

    Raises:
      RhinoError: a value is not valid for its option; or meshes and numbers of devices
        are both given.
    """
    if lists.get("mesh") is not None and lists.get("devices") is not None:
        raise RhinoError(
            f"{WHAT}: mesh= and devices= are both given.",
            where="mesh= and devices=",
            numbers=f"mesh={brief(lists['mesh'])}, devices={brief(lists['devices'])}",
            fix="give mesh= to compare meshes, or devices= to let rhino choose them.",
        )
    every = [_values(name, lists.get(name)) for name in NAMES]
    return [SweepConfig(*each) for each in itertools.product(*every)]


def _values(name: str, given: Any) -> list[Any]:
    single = isinstance(given, str | Mapping) or not isinstance(given, Iterable)
    values: Sequence[Any] = [given] if single else list(given)
    if not values:
        raise RhinoError(
            f"{WHAT}: {name} is empty.",
            where=f"{name}=",
            numbers="0 values",
            fix=f"leave {name} out, or give at least one value.",
        )
    return [_value(name, value) for value in values]


def _value(name: str, value: Any) -> Any:
    if name == "stages":
        return 1 if value is None else read_stages(WHAT, value)
    if name == "microbatches":
        return 1 if value is None else read_microbatches(WHAT, value)
    if value is None:
        return None
    if name == "hardware":
        load_target(value)  # raises for a misspelt name, instead of an infeasible point
    if name in ("devices", "batch"):
        return read_count(WHAT, name, value, least=1)
    if name == "memory_budget_bytes":
        return read_bytes(WHAT, name, value)
    if name == "mesh":
        if not isinstance(value, Mapping):
            raise RhinoError(
                f"{WHAT}: a mesh is a mapping of axis name to size.",
                where="mesh=",
                numbers=f"got {brief(value)} ({type(value).__name__})",
                fix='write mesh=[{"data": 8}, {"data": 4, "model": 2}].',
            )
        return tuple((str(k), read_count(WHAT, str(k), v, least=1))
                     for k, v in value.items())  # fmt: skip
    return value
