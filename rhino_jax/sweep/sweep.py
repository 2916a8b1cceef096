"""`rhino.sweep`: the call, and its progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from rhino_jax.frontend.call import split_call
from rhino_jax.frontend.parameters import CALLING, read_parameters
from rhino_jax.frontend.trace import Traced, trace_call
from rhino_jax.hardware.files import load_target
from rhino_jax.options import split_options, with_options_of_call
from rhino_jax.planner.options import PlanOptions
from rhino_jax.runtime.sharded import ShardedFunction
from rhino_jax.sweep.point import NAMES, WHAT, Point, configurations
from rhino_jax.sweep.table import Sweep
from rhino_jax.units import format_seconds
from rhino_jax.utils.keywords import read_count


TOLD_EVERY_S = 1.0
"""Minimum seconds between two lines of progress."""

Told = Callable[[int, int, Point | None], None]


@with_options_of_call(
    *NAMES,
    *("pins", "level", "recompute", *CALLING, "progress", "workers"),
    own=dict.fromkeys(NAMES, "Any")
    | {"progress": "bool | Told", "workers": "int | None"},
    level="fast",
    recompute="as written",
    progress=True,
)
def sweep(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Sweep:
    """Plan `fn(*args, **kwargs)` for every combination of the listed options.

    Allocates and runs nothing. Every point has the plan for its figures, made when
    `point.plan()` is called. Trace, analysis and models are shared: budgets cost next
    to nothing, another machine or mesh a fraction of a plan. Configurations of several
    stages, of `microbatches="auto"` or with `recompute="auto"` are each planned in
    full.

    Args:
      fn: a function, or the result of `auto_shard` for one.
      args, kwargs: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them.
      hardware: names, paths or `Target`s, with or without a topology.
      devices: numbers of devices, for which rhino chooses meshes of up to two axes.
      mesh: mappings of axis name to size, instead of `devices`.
      memory_budget_bytes: per device; None: the memory of the hardware.
      batch: sizes of the batch, which is the leading dim of the arguments that are
        data; different leading dims change in proportion.
      stages, microbatches: as in `auto_shard`; None: 1. pins, recompute,
        donate_argnums, …: as in `auto_shard`, for all points.
      level: "fast": as meshes are compared; "best" takes several times as long.
      progress: show a line on standard error; or a function that is called with the
        number of points done, of all, and the best point so far.
      workers: number of processes that search; 1: this one alone; None: one for each
        core, if they save more time than their start takes. Results are the same.

    Returns:
      `points`, `best`, `pareto()`, `table()`, `to_pandas()`. A configuration that does
      not fit, or is not possible, is a point with the reason.

    Raises:
      RhinoError: a list contains a value that is not valid for its option.
    """
    # The solver takes a second to import; `import rhino_jax` need not wait.
    from rhino_jax.sweep.evaluate import Evaluator
    from rhino_jax.sweep.running import SweepRun

    started_s = time.monotonic(), time.process_time()
    said, kwargs = split_options(sweep, kwargs)
    configs = configurations({name: said[name] for name in NAMES})
    own = {name: said[name] for name in CALLING}
    if isinstance(fn, ShardedFunction) and all(x is None for x in own.values()):
        parameters = fn.parameters
    else:
        raw = fn.parameters.fn if isinstance(fn, ShardedFunction) else fn
        parameters = read_parameters(raw, what=WHAT, **own)
    workers = said["workers"]
    many = None if workers is None else read_count(WHAT, "workers", workers, least=1)
    plan_options = PlanOptions(
        what=WHAT,
        pins=said["pins"],
        level=said["level"],
        recompute=said["recompute"],
        progress=False,
    )
    call = split_call(parameters, args, kwargs, WHAT)
    written = trace_call(parameters, call, what=WHAT)
    evaluator = Evaluator(plan_options, plan_options.level)

    def traced_for(size: int | None) -> Traced:
        from rhino_jax.sweep.batch import with_batch

        if size is None:
            return written
        # The batch dims do not depend on the hardware.
        analysis = evaluator.analysis(written.program, load_target("cpu"))
        return with_batch(parameters, call, analysis, size)

    run = SweepRun(evaluator, configs, _telling(said["progress"]))
    points, work = run.points(traced_for, many, started_s)
    return Sweep(written.name, tuple(points), work)


def _telling(progress: bool | Told) -> Told:
    """Return the callback for progress: the user's, a printing one, or a no-op."""
    if callable(progress):
        return progress
    if not progress:
        return lambda done, of, best: None
    told = [time.monotonic()]

    def tell(done: int, of: int, best: Point | None) -> None:
        if done < of and time.monotonic() - told[0] < TOLD_EVERY_S:
            return
        told[0] = time.monotonic()
        text = "nothing fits yet"
        if best is not None:
            text = f"best {format_seconds(best.step_s)} on {best.hardware}"
        print(f"rhino: sweep {done} of {of}: {text}", file=sys.stderr)

    return tell
