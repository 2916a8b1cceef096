"""Rows that are measured as a whole, each in a separate process.

In: a suite that only plans, or one whose steps run and are timed.
Out: a saved result per row, and the suite's report.
Order: `row_run` (a kind of suites: how rows are measured, and its report), `timed_plan`
(the plans of four kinds), `plan_run` (seconds and memory of planning), `scale_run` (of
large clusters), `pipeline_run` (planned pipelines), `layouts_run` (layouts that others
measured), `stages_run` (pipelines that run), `calls` (a step's first call), `clock`
(steps on emulated devices), `device_run` (steps on the devices that are here).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rhino_jax.bench.rows.calls import CALLS
from rhino_jax.bench.rows.clock import CLOCK
from rhino_jax.bench.rows.device_run import DEVICE
from rhino_jax.bench.rows.layouts_run import LAYOUTS
from rhino_jax.bench.rows.pipeline_run import PIPELINES
from rhino_jax.bench.rows.plan_run import PLAN
from rhino_jax.bench.rows.row_run import RowKind
from rhino_jax.bench.rows.scale_run import SCALE
from rhino_jax.bench.rows.stages_run import STAGES


ROW_KINDS: Mapping[str, RowKind[Any]] = {
    kind.name: kind
    for kind in (CALLS, CLOCK, DEVICE, LAYOUTS, PLAN, PIPELINES, SCALE, STAGES)
}
"""The kinds of suites whose rows are measured as a whole, by name."""
