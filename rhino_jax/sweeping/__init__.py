"""One program on many machines: what each configuration costs, and the best of them.

In: a function with example arguments, and a list for everything that may vary.
Out: `table.Sweep`: a `point.Point` for every configuration, with a plan behind it.
Order: `configs` (lists → configurations), `batch` (another batch size: the function
traced on other shapes), `evaluate` (configurations that share a model), `meshes` (the
best mesh for these, within every budget), `answers`, `child` and `children` (the same
in other processes), `searching` (where), `running` (one after the other), `point`,
`work` (what it took), `table` (rows, the Pareto front, text), `sweep` (the call).
"""
