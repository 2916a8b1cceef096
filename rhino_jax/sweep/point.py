"""Cost of one configuration, with its plan on request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rhino_jax.errors import RhinoError
from rhino_jax.explain.report.line import format_mesh
from rhino_jax.explain.results.plan import Plan
from rhino_jax.hardware.target import Target
from rhino_jax.units import format_bytes, format_seconds


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
    fits: bool
    why: str
    step_s: float
    compute_s: float
    communication_s: float
    peak_bytes: int
    price_per_step: float | None
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
