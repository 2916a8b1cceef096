"""Where a program is cut into stages.

In: `ops.CutOps`, a graph of ops with seconds and bytes, and `ops.Groups` of devices.
Out: `ops.StageCut`, a stage for every op, with what it costs.
Order: `ops`, `numbers` (the same as integers), `price` (what any cut costs),
`contract` (what never separates), `order` and `fast` (intervals of orders of the ops),
`best` (the graph, by CP-SAT), `choose` (both, in turn), `as_work` (a cut as what
schedules are made of).
"""
