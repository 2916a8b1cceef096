"""`rhino.sweep`: the call, its progress, and tracing with other batch sizes.

The batch is the leading dim of the arguments that are data, which the analysis
distinguishes from parameters and state by their use; it is the dim that `microbatches`
splits. If data arguments have different leading dims (images, and patches of them), all
change in the same proportion.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

from rhino_jax.errors import RhinoError
from rhino_jax.frontend.call import Call, split_call
from rhino_jax.frontend.parameters import CALLING, Parameters, read_parameters
from rhino_jax.frontend.trace import Traced, trace_call
from rhino_jax.hardware.files import load_target
from rhino_jax.options import split_options, with_options_of_call
from rhino_jax.planner.options import PlanOptions
from rhino_jax.runtime.sharded import ShardedFunction
from rhino_jax.sweep.point import NAMES, WHAT, Point, Told, configurations
from rhino_jax.sweep.table import Sweep
from rhino_jax.units import format_seconds
from rhino_jax.utils.keywords import read_count


if TYPE_CHECKING:
    from rhino_jax.analysis.program_analysis import ProgramAnalysis

TOLD_EVERY_S = 1.0
"""Minimum seconds between two lines of progress."""


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


def leading_dims(analysis: ProgramAnalysis) -> dict[int, int]:
    """Return position of an argument that is data → size of its leading dim."""
    graph, roles = analysis.graph, analysis.roles
    found = {}
    for node in graph.nodes:
        if node.kind.value != "input" or node.slot not in roles.data:
            continue
        dims = analysis.dim_classes.results(node, 0)
        if dims and dims[0] in roles.batch:
            found[node.slot] = graph.program.values[node.value].shape[0]
    return found


def with_batch(
    parameters: Parameters, call: Call, analysis: ProgramAnalysis, batch: int
) -> Traced:
    """Retrace a call with arguments of another batch size.

    Args:
      parameters: signature of the function, with static and donated arguments.
      call: the original call.
      analysis: analysis of its program, which identifies the data arguments.
      batch: the new size.

    Raises:
      RhinoError: no argument has a batch, or the size of one would not be an integer.
    """
    dims = leading_dims(analysis)
    if not dims:
        raise RhinoError(
            f"{WHAT}: no argument of `{parameters.name}` has a batch.",
            where="batch=",
            numbers="no leading dim of an argument runs through the program as data",
            fix="leave out batch=, and sweep once for each size.",
        )
    now = Counter(dims.values()).most_common(1)[0][0]
    arrays = [jax.typeof(x) if not hasattr(x, "shape") else x
              for x in call.leaves.arrays]  # fmt: skip
    for slot, size in dims.items():
        if size * batch % now:
            raise RhinoError(
                f"{WHAT}: batch={batch} makes no whole leading dim.",
                where=call.leaves.array_paths[slot],
                numbers=f"{size} of a batch of {now}, so {size * batch / now:g} of"
                f" {batch}",
                fix=f"take multiples of {now}.",
            )
        x = arrays[slot]
        shape = (size * batch // now, *x.shape[1:])
        arrays[slot] = jax.ShapeDtypeStruct(shape, x.dtype)
    changed = call.leaves.with_arrays(arrays)
    args, kwargs = changed.unflatten(arrays)
    other = replace(call, leaves=changed, args=tuple(args), kwargs=kwargs)
    return trace_call(parameters, other, what=WHAT)
