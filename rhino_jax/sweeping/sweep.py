"""`rhino.sweep`: the call, and its progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rhino_jax.apply.sharded import ShardedFunction
from rhino_jax.frontend.call import split_call
from rhino_jax.frontend.parameters import CALLING, read_parameters
from rhino_jax.frontend.trace import Traced, trace_call
from rhino_jax.hardware.files import load_target
from rhino_jax.keywords import read_count
from rhino_jax.planning.wishes import Wishes
from rhino_jax.sweeping.configs import NAMES, WHAT, Config, configurations
from rhino_jax.sweeping.point import Point
from rhino_jax.sweeping.table import Sweep, best_of
from rhino_jax.units import format_seconds


if TYPE_CHECKING:
    from rhino_jax.sweeping.answers import Answer
    from rhino_jax.sweeping.evaluate import Evaluator


TOLD_EVERY_S = 1.0
"""Progress is not read faster."""

Told = Callable[[int, int, Point | None], None]


def sweep(
    fn: Callable[..., Any],
    *args: Any,
    hardware: Any = None,
    devices: Any = None,
    mesh: Any = None,
    memory_budget_bytes: Any = None,
    batch: Any = None,
    stages: Any = None,
    microbatches: Any = None,
    pins: Any = None,
    level: str = "fast",
    recompute: str = "as written",
    donate_argnums: int | Iterable[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    static_argnums: int | Iterable[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    progress: bool | Told = True,
    workers: int | None = None,
    **kwargs: Any,
) -> Sweep:
    """What `fn(*args, **kwargs)` costs in every combination of what is listed.

    Allocates and runs nothing. Every point has the plan whose figures it shows, made
    when `point.plan()` is called. Trace, analysis and models are shared: budgets cost
    next to nothing, another machine or mesh a fraction of a plan. Configurations of
    several stages, of `microbatches="auto"` or with `recompute="auto"` are each planned
    in full.

    Args:
      fn: a function, or what `auto_shard` made of one.
      args, kwargs: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them.
      hardware: names, paths or `Target`s, with or without a topology.
      devices: numbers of devices, for which rhino chooses meshes of up to two axes.
      mesh: mappings of axis name to size, instead of `devices`.
      memory_budget_bytes: per device; None: what the hardware has.
      batch: sizes of the batch, which is the leading dim of the arguments that are
        data; the others of such dims change in proportion.
      stages, microbatches: as of `auto_shard`; None: 1.
      pins, recompute, donate_argnums, …: as of `auto_shard`, for all points.
      level: "fast", as meshes are compared; "best" takes several times as long.
      progress: show a line on standard error; or a function that is called with the
        number of points done, of all, and the best point so far.
      workers: processes that search; 1: this one alone; None: one for each core, where
        they gain more than they take to start. What is found is the same.
    Returns:
      `points`, `best`, `pareto()`, `table()`, `to_pandas()`. What does not fit, or
      cannot be, is a point that says why.
    Raises:
      RhinoError: a list holds something that is no such value.
    """
    # The solver takes a second to import; `import rhino_jax` need not wait.
    from rhino_jax.sweeping.evaluate import Evaluator

    started, said = time.monotonic(), locals()
    configs = configurations({name: said[name] for name in NAMES})
    own = {name: said[name] for name in CALLING}
    if isinstance(fn, ShardedFunction) and all(x is None for x in own.values()):
        parameters = fn.parameters
    else:
        raw = fn.parameters.fn if isinstance(fn, ShardedFunction) else fn
        parameters = read_parameters(raw, what=WHAT, **own)
    many = None if workers is None else read_count(WHAT, "workers", workers, least=1)
    wishes = Wishes(
        hardware=None,
        memory_budget_bytes=None,
        pins=pins,
        level=level,
        time_limit_s=None,
        seed=0,
        refine=0,
        progress=False,
        what=WHAT,
        recompute=recompute,
    )
    call = split_call(parameters, args, kwargs, WHAT)
    written = trace_call(parameters, call, what=WHAT)
    evaluator = Evaluator(wishes, level)

    def traced_for(size: int) -> Traced:
        from rhino_jax.sweeping.batch import with_batch

        # Which dims are the batch does not depend on the hardware.
        analysis = evaluator.analysis(written.program, load_target("cpu"))
        return with_batch(parameters, call, analysis, size)

    points = _points(
        evaluator, configs, written, traced_for, _telling(progress), workers
    )
    return Sweep(written.name, tuple(points), time.monotonic() - started)


def _points(
    evaluator: Evaluator,
    configs: Sequence[Config],
    written: Traced,
    traced_for: Callable[[int], Traced],
    tell: Told,
    workers: int | None,
) -> list[Point]:
    """A point for every configuration, those of a group searched together."""
    from rhino_jax.sweeping.evaluate import Pending, refused
    from rhino_jax.sweeping.searching import Searching

    of_group: dict[Hashable, list[int]] = {}
    for i, config in enumerate(configs):
        of_group.setdefault(evaluator.group(config), []).append(i)
    groups = list(of_group.values())
    found: dict[int, Point] = {}
    programs: dict[int | None, Traced] = {None: written}
    pending: dict[int, Pending] = {}
    best: Point | None = None

    def take(key: int, points: Sequence[Point]) -> None:
        nonlocal best
        found.update(zip(groups[key], points, strict=True))
        best = best_of([*points, *([best] if best else [])])
        tell(len(found), len(configs), best)

    def take_all(answers: Iterable[tuple[int, Answer]]) -> None:
        for key, answer in answers:
            group = pending.pop(key)
            if answer.refused:
                take(key, refused(group.group, answer.refused))
            else:
                take(key, evaluator.end(group, answer.best))

    with Searching(evaluator.meshes, workers, len(groups)) as searching:
        for key, members in enumerate(groups):
            group = [configs[i] for i in members]
            size = group[0].batch
            if size not in programs:
                assert size is not None
                programs[size] = traced_for(size)
            begun = evaluator.begin(programs[size], group)
            if isinstance(begun, Pending):
                pending[key] = begun
                searching.ask(key, begun)
            else:
                take(key, begun)
            take_all(searching.answers())
        take_all(searching.answers(all_of_them=True))
    return [found[i] for i in range(len(configs))]


def _telling(progress: bool | Told) -> Told:
    """Who is told of progress: a function, a line on standard error, or nobody."""
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
