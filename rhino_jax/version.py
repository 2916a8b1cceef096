"""Of which version rhino_jax is."""

__version__ = "0.1.0"
