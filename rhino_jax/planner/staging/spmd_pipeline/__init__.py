"""SPMD pipeline: stages are an axis of one mesh, and run the same program.

In: a `variant_search.Search` of the whole step, the numbers of stages and
micro-batches.
Out: a `plan.plan.PlanData` of one program, whose `origin` can plan it again.
Order: `whole` (the search of one stage's program, its ticks, the plan of all stages,
and its origin), `planned` (remat in its loops, the best number of micro-batches, and
the comparison with stages that run as tasks).
"""
