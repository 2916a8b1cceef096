"""The errors of instances that cannot be read, or solved."""

from __future__ import annotations

from rhino_jax.errors import RhinoError


class InstanceError(RhinoError, ValueError):
    """A malformed instance, or choices that do not belong to it."""


class UnsatisfiedError(RhinoError, RuntimeError):
    """No choice satisfies the instance, or none that does was found in time."""
