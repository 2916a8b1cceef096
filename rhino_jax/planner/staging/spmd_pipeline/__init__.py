"""SPMD pipeline: stages are an axis of one mesh, and run the same program.

In: a `variant_search.Search` of the whole step, the numbers of stages and
micro-batches.
Out: a `plan.plan.PlanData` of one program, whose `origin` can plan it again.
Order: `stage` (the search of one stage's program), `timed` (its ticks), `whole` (from
the plan of one stage to that of all), `again` (the origin of a plan), `recomputed`
(remat in its loops), `planned` (the best number of micro-batches), `compared` (with
stages that run as tasks).
"""
