"""Ops with opaque bodies: Pallas kernels, foreign calls, manually sharded code.

Their bodies are not imported, but their FLOPs count, and kernels are identified by
name.
"""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

from rhino_jax.frontend.regions import body_jaxpr


def kernel_name(eqn: Any) -> str | None:
    """Return the name under which a user registers a rule for this kernel; None for
    other ops."""
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
    """Return the FLOPs that a kernel's author states
    (`pallas_call(cost_estimate=...)`), or None."""
    estimate = eqn.params.get("cost_estimate")
    flops = getattr(estimate, "flops", None)
    return None if flops is None else float(flops)


def hidden_body(eqn: Any) -> Any | None:
    """Return the sub-jaxpr of an opaque op, or None."""
    return body_jaxpr(eqn.params)


def runs_of_body(eqn: Any) -> int:
    """Return how often the body runs: once per grid cell, or per shard."""
    if eqn.primitive.name == "pallas_call":
        grid = eqn.params["grid_mapping"].grid
        return math.prod(int(n) for n in grid if isinstance(n, Integral))
    if eqn.primitive.name == "shard_map":
        mesh = eqn.params["mesh"]
        return math.prod(mesh.shape[a] for a in eqn.params["newly_manual_axes"])
    return 1
