"""The ASPLOS/EuroSys 2025 contest on intra-operator parallelism: `solve FILE`.

In goes a file of the contest's format, out come choices and what they are worth:
`instance` reads the file and states it as a problem of `rhino_jax.solver`, `engine`
solves that, `check` recomputes the answer from the file's own whole numbers, `command`
prints and writes it.
"""
