"""One program on many machines: what each configuration costs, and the best of them.

In: a function with example arguments, and a list for everything that may vary.
Out: `table.Sweep`: a `point.Point` for every configuration, with a plan behind it.
Order: `configs` (lists → configurations), `batch` (another batch size: the function
traced on other shapes), `evaluate` (configurations that share a model, `pending` until
they are searched), `meshes` (the best mesh, within every budget), `whole` (passes
chosen, too), `answers`, `child` and `children` (the same in other processes),
`searching` (where), `running`, `point`, `work`, `table` (text), `sweep` (the call).
"""
