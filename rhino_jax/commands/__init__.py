"""The commands of `python -m rhino_jax`, a file for each kind; see `rhino_jax.cli`.

In: the words of a command line.
Out: printed text, files, and an exit code.
Order: `words` (parsing of words, flags in error messages), `loading` (functions and
models by name, arguments from a TOML file), `planning`, `checking`, `exploring`,
`benching` and `demo` (the commands).
"""
