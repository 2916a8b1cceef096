"""Dims that a reshape merged, kept apart: see `unmerge`."""

from rhino_jax.frontend.unmerge.emit import unmerge


__all__ = ["unmerge"]
