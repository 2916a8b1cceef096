"""Cost of one configuration, with its plan on request.

`SweepConfig` has one value of every varied option, `SweepWork` counts and seconds of a
sweep.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any

from rhino_jax.errors import RhinoError
from rhino_jax.explain.plan import Plan
from rhino_jax.explain.report.line import format_mesh
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.target import Target
from rhino_jax.planner.meshes import AUTO, read_stages
from rhino_jax.units import format_bytes, format_seconds
from rhino_jax.utils.keywords import brief, read_bytes, read_count, read_count_or


WHAT = "`rhino.sweep`"


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


NAMES = tuple(f.name for f in fields(SweepConfig))
"""Options that may vary."""


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
        return 1 if value is None else read_count_or(WHAT, name, value, AUTO)
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


S_PER_HOUR = 3600  # by definition


@dataclass(frozen=True, slots=True, repr=False)
class Point:
    """A configuration and its cost.

    Attributes:
      hardware: name of the target; `devices`: their number; `mesh`: (name, size) of the
        axes, chosen if none was given.
      memory_budget_bytes: per device; `batch`: None: as in the arguments.
      stages, microbatches: as requested; sizes of submeshes as a tuple.
      fits: whether there is a plan; `why`: why not, in a sentence.
      step_s, compute_s, communication_s, peak_bytes: predicted, per device; infinite
        times, and the lowest peak found, if nothing fits.
      price_per_step: cost of a step on all devices; None if the hardware has no price.
      make: makes the plan; None if nothing fits.
    """

    hardware: str
    devices: int
    mesh: tuple[tuple[str, int], ...]
    memory_budget_bytes: int
    batch: int | None
    stages: int | str | tuple[int, ...]
    microbatches: int | str
    fits: bool = False
    why: str = ""
    step_s: float = math.inf
    compute_s: float = math.inf
    communication_s: float = math.inf
    peak_bytes: int = 0
    price_per_step: float | None = None
    make: Callable[[], Plan] | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        where = f"{format_mesh(self.mesh)} on {self.hardware}"
        if not self.mesh:
            where = f"{self.devices} devices of {self.hardware}"
        if not self.fits:
            return f"Point({where}: {self.why})"
        said = [f"{format_seconds(self.step_s)}/step"]
        said.append(f"peak {format_bytes(self.peak_bytes)}")
        if self.price_per_step is not None:
            said.append(f"price {format_price(self.price_per_step)} per 1M steps")
        for name in ("batch", "stages", "microbatches"):
            value = getattr(self, name)
            if value not in (None, 1):
                said.append(f"{name} {format_stages(value)}")
        return f"Point({where}: {', '.join(said)})"

    def plan(self) -> Plan:
        """Return the plan with these figures.

        Raises:
          RhinoError: nothing fits, for the reason in `why`.
        """
        if self.make is None:
            raise RhinoError(
                "`Point.plan`: this configuration has no plan.",
                where=f"{self.hardware}, {self.devices} devices",
                numbers=self.why,
                fix="take a point of which `fits` is true.",
            )
        return self.make()

    @property
    def worth(self) -> tuple[float, float, float, float]:
        """Sort key, lowest best: step, cost, peak bytes, devices.

        Step and cost are per row of the batch, if that varies.
        """
        rows = self.batch or 1
        price = self.price_per_step or 0.0
        return self.step_s / rows, price / rows, self.peak_bytes, self.devices


def why_not(error: RhinoError) -> str:
    """Return why a configuration has no plan, with the numbers, in a line."""
    numbers = error.numbers.partition("; ")[0]
    what = error.what.rstrip(".")
    return f"{what}: {numbers}" if numbers else what


def format_stages(stages: int | str | tuple[int, ...]) -> str:
    """Format stages as 2, auto, or 4 + 2 + 2 (devices of each stage)."""
    if isinstance(stages, tuple):
        return " + ".join(map(str, stages))
    return str(stages)


def format_price(per_step: float) -> str:
    """Format the cost of a million steps as "1,230", with three significant digits."""
    return f"{float(f'{1e6 * per_step:.3g}'):,.10g}"


def price_per_step(target: Target, devices: int, step_s: float) -> float | None:
    """Return a step's cost in the hardware file's currency; None without a price.

    Args:
      target: the hardware, with its price per hour of a device.
      devices: number of devices.
      step_s: seconds of the step.
    """
    price = target.device.price_per_hour
    return None if price is None else price * devices * step_s / S_PER_HOUR


@dataclass(frozen=True, slots=True)
class Counts:
    """Work to find the best mesh within each of several budgets.

    Attributes:
      models: number of meshes for which a model was built.
      searches: number of searches, with and without a limit.
      reused: number of (mesh, budget) pairs whose result, or infeasibility, was known
        from a search within a larger budget or none.
      ruled_out: number of (mesh, budget) pairs whose lower bound was no faster than the
        best result.
    """

    models: int = 0
    searches: int = 0
    reused: int = 0
    ruled_out: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(operator.add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepWork:
    """Work of a sweep.

    Attributes:
      configurations: number of configurations.
      groups: number of groups of configurations that differ in their budgets alone.
      planned: number of configurations that were each planned in full, or are not
        possible.
      counts: meshes and searches of the others.
      processes: number of processes that searched.
      cpu_s: CPU seconds of all processes, their start included.
      seconds: wall-clock seconds.
    """

    configurations: int
    groups: int
    planned: int
    counts: Counts
    processes: int
    cpu_s: float
    seconds: float


Told = Callable[[int, int, Point | None], None]
"""Called with the number of points done, of all, and the best point so far."""
