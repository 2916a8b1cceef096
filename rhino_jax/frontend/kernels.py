"""Ops that hide a body: Pallas kernels, foreign calls, manually sharded code.

They are not looked into, but their FLOPs count, and kernels are known by name.
"""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

from rhino_jax.frontend.regions import body_jaxpr


def kernel_name(eqn: Any) -> str | None:
    """The name under which a user registers a rule for this kernel, if it is one."""
    params = eqn.params
    match eqn.primitive.name:
        case "pallas_call":
            name = params.get("name")
        case "ffi_call":
            name = params.get("target_name")
        case "call_hi_primitive":
            name = type(params["_prim"]).__name__
        case _:
            name = None
    return None if name is None else str(name)


def estimated_flops(eqn: Any) -> float | None:
    """FLOPs that a kernel's author states (`pallas_call(cost_estimate=...)`)."""
    estimate = eqn.params.get("cost_estimate")
    flops = getattr(estimate, "flops", None)
    return None if flops is None else float(flops)


def hidden_body(eqn: Any) -> Any | None:
    """The sub-jaxpr that does the work of an op that is not looked into, if any."""
    return body_jaxpr(eqn.params)


def runs_of_body(eqn: Any) -> int:
    """How often the body runs: once per grid cell, or per shard."""
    if eqn.primitive.name == "pallas_call":
        grid = eqn.params["grid_mapping"].grid
        return math.prod(int(n) for n in grid if isinstance(n, Integral))
    if eqn.primitive.name == "shard_map":
        mesh = eqn.params["mesh"]
        return math.prod(mesh.shape[a] for a in eqn.params["newly_manual_axes"])
    return 1
