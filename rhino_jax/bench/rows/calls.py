"""Seconds of a step's first call: under `jit` on one device, and under `auto_shard` on
several emulated ones, each in a separate process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

import rhino_jax as rhino
from rhino_jax.bench.process import answers
from rhino_jax.bench.rows.row_run import Found, RowKind, TableLines
from rhino_jax.bench.suite import BenchRow


HOWS = ("jit", "auto_shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstCall:
    """The first call of one model's step.

    Attributes:
      cpu_s: way of calling → its CPU seconds, over all threads.
      wall_s: way of calling → its wall-clock seconds.
      plan_s: planning seconds of the call under `auto_shard`.
      mesh: mesh of the plan: axis → size.
    """

    cpu_s: Mapping[str, float]
    wall_s: Mapping[str, float]
    plan_s: float
    mesh: Mapping[str, int]


def call_row(row: BenchRow) -> FirstCall:
    """Call a row's step in both ways.

    Raises:
      BenchError: one of them failed.
    """
    cpu_s, wall_s = {}, {}
    for how in HOWS:
        devices = row.num_devices if how != "jit" else 1
        task = row, how, devices
        (said,) = answers(
            f"{__name__}:first_call",
            [task],
            f"`bench`: the first call of {row.model!r} under {how} failed.",
            where=f"{row.model}, {how}, devices: {devices}",
        )
        cpu_s[how], wall_s[how] = said["cpu_s"], said["wall_s"]
    plan_s, mesh = said["plan_s"], said["mesh"]
    return FirstCall(cpu_s=cpu_s, wall_s=wall_s, plan_s=plan_s, mesh=mesh)


def _table_lines(row: BenchRow, found: FirstCall) -> TableLines:
    yield {
        "mesh": " × ".join(map(str, found.mesh.values())),
        **{f"{how} CPU s": f"{s:.1f}" for how, s in found.cpu_s.items()},
        **{f"{how} s": f"{s:.1f}" for how, s in found.wall_s.items()},
        "of it planning s": f"{found.plan_s:.1f}",
    }


def _summary(suite: str, found: Found[FirstCall]) -> tuple[str, ...]:
    """Return the CPU seconds of all rows."""
    said = (
        f"{row.model} {x.cpu_s['auto_shard']:.0f} ({x.cpu_s['jit']:.0f} under `jit`)"
        for row, x in found
    )
    return (f"`{suite}`, CPU seconds of the first call: {', '.join(said)}.",)


CALLS: RowKind[FirstCall] = RowKind(
    name="calls",
    sample=FirstCall,
    measure=call_row,
    describe=lambda found: ", ".join(
        f"{how} {s:.1f} CPU s" for how, s in found.cpu_s.items()
    ),
    table=_table_lines,
    notes="The first call of a step, until its results are there: traced, planned"
    " (under `auto_shard`), compiled and run. Each in a process of its own, imports and"
    " initial state not counted; nothing is read from caches.",
    summary=_summary,
)


def first_call(task: tuple[BenchRow, str, int]) -> dict[str, Any]:
    """Call a row's step once, and return its seconds; runs in a worker.

    Args:
      task: the row; "jit" or "auto_shard"; number of emulated devices.
    """
    row, how, devices = task
    jax.config.update("jax_num_cpu_devices", devices)
    work = row.make()
    state, batch = work.init(jax.random.key(0)), work.make_batch(jax.random.key(1))
    jax.block_until_ready(batch)
    wrap = work.jit if how == "jit" else rhino.auto_shard
    step = wrap(work.step, donate_argnums=work.donate_argnums)
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(step(*state, batch))
    found: dict[str, Any] = {
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
    }
    if how != "jit":
        plan = step.last_plan
        found |= {"plan_s": plan.search.seconds, "mesh": dict(plan.mesh_axes)}
    return found
