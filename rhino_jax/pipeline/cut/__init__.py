"""Division of a program into pipeline stages.

In: `ops.CutProblem`, a graph of ops with seconds and bytes, and the stages' devices.
Out: `ops.StageCut`, a stage for every op, with its cost.
Order: `ops`, `numbers` (the problem as integers, orders of the ops, and the cost of any
cut), `fast` (intervals of an order), `best` (the graph, by CP-SAT), `choose` (both, in
turn, with ops contracted that stay in one stage).
"""
