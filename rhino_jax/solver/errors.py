"""The error of instances that cannot be solved or read."""

from __future__ import annotations

from rhino_jax.errors import RhinoError


class InstanceError(RhinoError, ValueError):
    """A malformed instance, or one that no choice satisfies."""
