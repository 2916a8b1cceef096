"""Dims that a reshape merged, kept apart: see `split_merged_dims`."""

from rhino_jax.frontend.split_dims.emit import split_merged_dims


__all__ = ["split_merged_dims"]
