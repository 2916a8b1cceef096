"""Wall-clock time of steps on emulated CPU devices, rhino's compared with recipes'.

Emulated devices share the host's cores, so a step's time is the work and the copying
of all devices together, not the time on real hardware; it shows the actual work of a
plan. Samples of all methods are interleaved, so that other load of the host affects all
of them equally.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import rhino_jax as rhino
from rhino_jax.bench.methods import parse_method
from rhino_jax.bench.planning import Planner
from rhino_jax.bench.rows.row_run import Found, RowKind, TableLines
from rhino_jax.bench.suite import BenchRow
from rhino_jax.bench.tables.figures import (
    by_name,
    format_ms,
    format_seconds_span,
    format_span,
)
from rhino_jax.bench.timing import fed_back, mean_s
from rhino_jax.runtime.sharded import jit_with_plan
from rhino_jax.units import format_seconds


ROUNDS = 41
"""Number of samples of each method; the median is used."""

SAMPLE_S = 0.02
"""Approximate seconds of a sample, which consists of several steps, so that the clock's
resolution and a thread's wake-up are negligible."""

CALLS = 1000
"""Number of calls of each function whose overhead is compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocked:
    """Wall times of one row.

    Attributes:
      step_s: method → median seconds of a step.
      ratio: rhino's method → median over samples of its seconds over those of the
        fastest recipe, sampled at the same time.
      recipe: the fastest recipe; empty if there is none.
      overhead_s: median seconds of a decorated call of a function with the workload's
        arguments, less those of a `jax.jit` call, on one device.
      num_arrays: number of these arguments.
    """

    step_s: Mapping[str, float]
    ratio: Mapping[str, float]
    recipe: str
    overhead_s: float
    num_arrays: int


def clock_row(row: BenchRow) -> Clocked:
    """Run every method's step on the CPU devices that are present."""
    workload = row.make()
    state = jax.device_get(workload.make_args(jax.random.key(0)))
    steps: dict[str, Callable[[], Any]] = {}
    planner = Planner.of(row)
    for method in row.methods:
        _, plan = planner.plan(method)
        if plan is not None:
            donated = workload.donate_argnums
            run = jit_with_plan(workload.step, plan, donate_argnums=donated)
            steps[method.name] = fed_back(run, workload, state)
    samples = _interleave(steps)
    medians = {name: statistics.median(found) for name, found in samples.items()}
    recipes = [name for name in samples if parse_method(name).is_recipe]
    best = min(recipes, key=lambda name: medians[name], default="")
    overhead_s, num_arrays = call_overhead_s(state)
    return Clocked(
        step_s=medians,
        ratio={
            name: median_ratio(found, samples[best])
            for name, found in samples.items()
            if best and name not in recipes
        },
        recipe=best,
        overhead_s=overhead_s,
        num_arrays=num_arrays,
    )


def median_ratio(these: Sequence[float], those: Sequence[float]) -> float:
    """Return the median of the ratios of samples that were taken together."""
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


def _interleave(steps: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Return samples of seconds per step, one of each method per round."""
    counts: dict[str, int] = {}
    for name, step in steps.items():
        mean_s(step)
        counts[name] = max(1, math.ceil(SAMPLE_S / mean_s(step)))
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            each = (mean_s(step) for _ in range(counts[name]))
            samples[name].append(statistics.fmean(each))
    return samples


def call_overhead_s(args: Sequence[Any]) -> tuple[float, int]:
    """Return the overhead of a decorated call over one of `jax.jit`, once planned.

    The function does next to nothing with these arguments, on one device: dispatch is
    compared, which the devices' work would hide.

    Returns:
      Median seconds, and the number of arrays among the arguments.
    """

    def touch(*args: Any) -> Any:
        return jax.tree.map(lambda x: jnp.ravel(x)[:1], args)

    sharded = rhino.auto_shard(touch, mesh={"data": 1}, hardware="cpu", progress=False)
    calls = {"sharded": sharded, "plain": jax.jit(touch)}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    shardings = jax.tree.leaves(sharded.plan(*args).in_shardings)
    leaves, tree = jax.tree.flatten(tuple(args))
    given = jax.tree.unflatten(tree, jax.device_put(leaves, shardings))
    for call in calls.values():
        jax.block_until_ready(call(*given))
    for _ in range(CALLS):
        for name, call in calls.items():
            started = time.perf_counter()
            result = call(*given)
            samples[name].append(time.perf_counter() - started)
            jax.block_until_ready(result)
    found = {name: statistics.median(x) for name, x in samples.items()}
    return found["sharded"] - found["plain"], len(leaves)


def _table_lines(row: BenchRow, found: Clocked) -> TableLines:
    names = [m.name for m in row.methods if not m.is_recipe]
    yield {
        "fastest recipe": found.recipe,
        "ms": format_ms(found.step_s.get(found.recipe)),
        **{f"{name} ms": format_ms(found.step_s.get(name)) for name in names},
        **{
            f"{name} ÷ recipe": f"{found.ratio[name]:.2f}"
            for name in names
            if name in found.ratio
        },
        "arrays": str(found.num_arrays),
        "overhead of a call µs": f"{1e6 * found.overhead_s:.0f}",
    }


def _summary(suite: str, found: Found[Clocked]) -> Sequence[str]:
    """Return a line on steps over recipes' steps, and a call's overhead."""
    ratios = by_name(pair for _, clocked in found for pair in clocked.ratio.items())
    said = ", ".join(f"`{name}` {format_span(x)}" for name, x in ratios.items())
    overhead = format_seconds_span([x.overhead_s for _, x in found])
    return (
        f"`{suite}`, {len(found)} models that really run, on emulated devices: step"
        f" over the fastest recipe's: {said}. A decorated call costs {overhead} more"
        " than one of `jax.jit`.",
    )


CLOCK: RowKind[Clocked] = RowKind(
    name="clock",
    sample=Clocked,
    measure=clock_row,
    describe=lambda found: ", ".join(
        f"{name} {format_seconds(s)}" for name, s in found.step_s.items()
    ),
    table=_table_lines,
    notes="Seconds of all devices together on this host's cores: medians of interleaved"
    " samples; ratios are medians of ratios within a sample. The overhead is of a"
    " decorated call over one of `jax.jit`, with the workload's arguments.",
    summary=_summary,
)
