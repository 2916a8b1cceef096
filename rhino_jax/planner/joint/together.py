"""Programs that share state, planned as one problem."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rhino_jax._compat import context_mesh
from rhino_jax.errors import RhinoError, nearest
from rhino_jax.frontend.call import split_call
from rhino_jax.frontend.parameters import read_parameters
from rhino_jax.frontend.trace import Traced, trace_call
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.shared import Plans
from rhino_jax.planner.joint.shared import WHAT, Together
from rhino_jax.planner.options import PlanOptions
from rhino_jax.runtime.constraints import auto_mesh
from rhino_jax.runtime.meshes import read_mesh
from rhino_jax.runtime.processes.agree import attending
from rhino_jax.runtime.sharded import ShardedFunction


def planned_together(
    programs: Mapping[str, Sequence[Any]],
    *,
    weights: Mapping[str, float] | None,
    mesh: Any,
    pins: Mapping[str, Any] | None,
    **options: Any,
) -> Plans[PlanData]:
    """Plan programs that share state as one problem; see `rhino_jax.plan_together`.

    Args:
      programs, weights, mesh, pins: as the user gave them.
      options: `PlanOptions` of every program.
    """
    started = time.monotonic()
    given = read_mesh(mesh if mesh is not None else context_mesh(), WHAT)
    pins = _by_name("pins", pins, programs)
    shares = {**dict.fromkeys(programs, 1.0), **_by_name("weights", weights, programs)}
    for name, weight in shares.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 < weight < math.inf:
            raise RhinoError(
                f"{WHAT}: a weight must be a positive number.",
                where=f"weights[{name!r}]",
                numbers=f"got {weight!r}",
                fix="state how often the program runs relative to the others, as 10 or"
                " 0.1.",
            )
    plan_options = {
        name: PlanOptions(pins=pins.get(name), what=WHAT, **options)
        for name in programs
    }
    twin = None if given is None else auto_mesh(given)
    traced: dict[str, Traced] = {}
    with attending(given):
        for name, entry in programs.items():
            fn, args, kwargs = _call_of(name, entry)
            is_sharded = isinstance(fn, ShardedFunction)
            parameters = fn.parameters if is_sharded else read_parameters(fn, what=WHAT)
            call = split_call(parameters, tuple(args), kwargs, WHAT)
            traced[name] = trace_call(parameters, call, mesh=twin, what=WHAT)
        weighted = {name: float(weight) for name, weight in shares.items()}
        return Together(traced, weighted, plan_options, given, started).plans()


def _by_name(
    keyword: str, given: Mapping[str, Any] | None, programs: Mapping[str, Any]
) -> dict[str, Any]:
    """Check a keyword that maps program names to values.

    Raises:
      RhinoError: it is no mapping, or it names an unknown program.
    """
    if not isinstance(programs, Mapping) or not programs:
        raise RhinoError(
            f"{WHAT}: give a mapping of names to programs.",
            where="the first argument",
            numbers=f"got {type(programs).__name__}",
            fix='write {"train": (train_step, args), "eval": (evaluate, args)}.',
        )
    if given is None:
        return {}
    names = given if isinstance(given, Mapping) else [type(given).__name__]
    for name in names:
        if name not in programs:
            raise RhinoError(
                f"{WHAT}: {keyword}= names no program: {name!r}."
                + nearest(str(name), map(str, programs)),
                where=f"{keyword}=",
                numbers=f"programs: {', '.join(map(str, programs))}",
                fix=f"write {keyword}={{{next(iter(programs))!r}: …}}.",
            )
    return dict(given)


def _call_of(name: str, entry: Any) -> tuple[Any, Any, Any]:
    """Return the function of a program, its arguments and keyword arguments."""
    is_entry = isinstance(entry, tuple | list) and len(entry) in (2, 3)
    if is_entry and callable(entry[0]) and isinstance(entry[1], tuple | list):
        return (*entry, {})[:3]
    raise RhinoError(
        f"{WHAT}: a program is (function, args) or (function, args, kwargs).",
        where=f"programs[{name!r}]",
        numbers=f"got {type(entry).__name__}",
        fix=f'write {{"{name}": (fn, (params, batch))}}; args is a tuple.',
    )
