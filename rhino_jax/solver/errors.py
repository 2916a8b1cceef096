"""The error for infeasible problems."""

from __future__ import annotations

from rhino_jax.errors import RhinoError


class UnsatisfiedError(RhinoError, RuntimeError):
    """The problem is infeasible, or no feasible assignment was found in time."""
