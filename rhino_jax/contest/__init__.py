"""The ASPLOS/EuroSys 2025 contest on intra-operator parallelism: `solve FILE`.

In: a file of the contest's format. Out: choices, their cost and their memory.
`instance` reads the file and converts it to a problem of `rhino_jax.solver`, `command`
solves that, recomputes the result from the file's own integers, prints and writes it.
"""
