"""The version of rhino_jax."""

__version__ = "0.1.0"
