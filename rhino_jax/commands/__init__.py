"""The commands of `python -m rhino_jax`, a file for each kind; see `rhino_jax.cli`."""
