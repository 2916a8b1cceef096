"""The error of this package."""

from __future__ import annotations

from rhino_jax.errors import RhinoError


class BenchError(RhinoError, ValueError):
    """A suite is malformed, or a benchmark cannot run as requested."""
