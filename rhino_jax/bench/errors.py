"""The error of this package."""

from __future__ import annotations

from rhino_jax.errors import RhinoError


class BenchError(RhinoError, ValueError):
    """A suite that is malformed, or a benchmark that cannot run as asked."""
