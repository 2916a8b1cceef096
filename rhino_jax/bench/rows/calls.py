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
from rhino_jax.bench.checks import BenchError
from rhino_jax.bench.rows.row_run import Cells, Found, RowKind, the_only
from rhino_jax.bench.suite import BenchRow, model_of
from rhino_jax.hardware.files import load_target
from rhino_jax.utils.worker import TaskFailed, Worker, WorkerEnded


HOWS = ("jit", "auto_shard")

_ENVIRONMENT = {"RHINO_CACHE": "0"}


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
        devices = load_target(row.target).num_devices if how != "jit" else 1
        task = row.model, how, devices, dict(row.overrides)
        try:
            with Worker(f"{__name__}:first_call", environment=_ENVIRONMENT) as worker:
                said = worker.answer(task)
        except (TaskFailed, WorkerEnded) as error:
            raise BenchError(
                f"`bench`: the first call of {row.model!r} under {how} failed.",
                where=f"{row.model}, {how}, devices: {devices}",
                numbers=str(error),
                fix="see the traceback above, if there is one.",
            ) from error
        cpu_s[how], wall_s[how] = said["cpu_s"], said["wall_s"]
    plan_s, mesh = said["plan_s"], said["mesh"]
    return FirstCall(cpu_s=cpu_s, wall_s=wall_s, plan_s=plan_s, mesh=mesh)


def _cells(row: BenchRow, found: FirstCall) -> Cells:
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
    read=the_only,
    line=lambda found: ", ".join(
        f"{how} {s:.1f} CPU s" for how, s in found.cpu_s.items()
    ),
    cells=_cells,
    notes="The first call of a step, until its results are there: traced, planned"
    " (under `auto_shard`), compiled and run. Each in a process of its own, imports and"
    " initial state not counted; nothing is read from caches.",
    summary=_summary,
)


def first_call(task: tuple[str, str, int, Mapping[str, Any]]) -> dict[str, Any]:
    """Call the step of a model once, and return its seconds; runs in a worker.

    Args:
      task: name of the model, "jit" or "auto_shard", number of emulated devices,
        keywords of the model.
    """
    model, how, devices, overrides = task
    jax.config.update("jax_num_cpu_devices", devices)
    work = model_of(model, **overrides)
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
