"""The reducer by which an op combines elements along a dim."""

from __future__ import annotations

from rhino_jax.frontend.rules.reduce import REDUCERS
from rhino_jax.ir.program import Op


def reducer_of(op: Op) -> str | None:
    """Return the reducer, as "sum"; None where partial results cannot be combined."""
    return "sum" if op.name == "dot_general" else REDUCERS.get(op.name)
