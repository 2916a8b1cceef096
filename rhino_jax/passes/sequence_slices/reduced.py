"""How an op combines what it has along a dim."""

from __future__ import annotations

from rhino_jax.frontend.rules.reduce import REDUCERS
from rhino_jax.ir.program import Op


def reducer_of(op: Op) -> str | None:
    """As "sum"; None where parts of the dim cannot be combined afterwards."""
    return "sum" if op.name == "dot_general" else REDUCERS.get(op.name)
