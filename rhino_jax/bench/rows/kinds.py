"""The kinds of suites whose rows are measured as a whole, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rhino_jax.bench.rows.calls import CALLS
from rhino_jax.bench.rows.clock import CLOCK
from rhino_jax.bench.rows.pipeline_run import PIPELINES
from rhino_jax.bench.rows.plan_run import PLAN
from rhino_jax.bench.rows.row_run import RowKind
from rhino_jax.bench.rows.scale_run import SCALE
from rhino_jax.bench.rows.stages_run import STAGES


ROW_KINDS: Mapping[str, RowKind[Any]] = {
    kind.name: kind for kind in (CALLS, CLOCK, PLAN, PIPELINES, SCALE, STAGES)
}
