"""The error of problems that nothing satisfies."""

from __future__ import annotations

from rhino_jax.errors import RhinoError


class UnsatisfiedError(RhinoError, RuntimeError):
    """No choice satisfies the problem, or none that does was found in time."""
