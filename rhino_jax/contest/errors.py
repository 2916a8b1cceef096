"""The error of instances that cannot be read."""

from __future__ import annotations

from rhino_jax.errors import RhinoError


class InstanceError(RhinoError, ValueError):
    """A malformed instance, or choices that do not belong to it."""
